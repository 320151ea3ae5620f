// What the parts of the extension share. Called while holding the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <type_traits>

#include "kernels.h"

namespace wfbp {

// Act without the GIL. It is not taken back in a destructor, as pybind11 would: where the interpreter
// has ended meanwhile, that ends the thread by unwinding its stack, which no destructor may.
template <class Act>
auto without_gil(Act act) {
  PyThreadState* thread = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<decltype(act())>) {
      act();
      PyEval_RestoreThread(thread);
    } else {
      auto result = act();
      PyEval_RestoreThread(thread);
      return result;
    }
  } catch (const std::exception&) {
    PyEval_RestoreThread(thread);
    throw;
  }
}

// The kernels in use.
Kernels& chosen_kernels();

// Throws pybind11::value_error, or std::invalid_argument for a dtype that there is not.
Reduction reduction(const std::string& dtype, const std::string& op, double divisor);

void bind_pack(pybind11::module_& module);
void bind_transfers(pybind11::module_& module);

}  // namespace wfbp
