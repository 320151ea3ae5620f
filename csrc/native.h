// Declarations that the parts of the extension share. Callers hold the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <type_traits>

#include "kernels.h"

namespace wfbp {

// Calls act() without the GIL. Unlike pybind11, this does not reacquire the GIL in a destructor: if
// the interpreter has ended, reacquiring unwinds the stack, which a destructor must not do.
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

// Throws std::invalid_argument for an unknown dtype, else pybind11::value_error.
Reduction reduction(const std::string& dtype, const std::string& op, double divisor);

void bind_pack(pybind11::module_& module);
void bind_transfers(pybind11::module_& module);

}  // namespace wfbp
