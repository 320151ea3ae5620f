// What the parts of the extension share. Called while holding the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "kernels.h"

namespace wfbp {

// The kernels in use.
Kernels& chosen_kernels();

// Throws pybind11::value_error, or std::invalid_argument for a dtype that there is not.
Reduction reduction(const std::string& dtype, const std::string& op, double divisor);

void bind_pack(pybind11::module_& module);
void bind_transfers(pybind11::module_& module);

}  // namespace wfbp
