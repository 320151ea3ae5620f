// What the parts of the extension share. All of it is used while holding the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace wfbp {

// The kernels in use.
Kernels& chosen_kernels();

// How contributions are combined; may be run without the GIL.
struct Reduction {
  Reduce reduce;
  std::size_t item;
  double divisor;

  void run(const std::vector<const std::uint8_t*>& shards, std::uint8_t* out,
           std::size_t count) const {
    reduce(shards, out, count, divisor);
  }
};

// Throws pybind11::value_error, or std::invalid_argument for a dtype that there is not.
Reduction reduction(const std::string& dtype, const std::string& op, double divisor);

void bind_pack(pybind11::module_& module);
void bind_transfers(pybind11::module_& module);

}  // namespace wfbp
