// Passes steps from XLA to Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "jax_values.h"
#include "xla/ffi/api/ffi.h"

namespace wfbp {

// A step whose gradients all exist: its exchange, and the addresses of gradients and outputs.
struct Step {
  std::int64_t exchange;
  std::vector<void*> inputs = {}, outputs = {};
  // On a device, its number and the stream. On the host -1 and null.
  std::int32_t device = -1;
  void* stream = nullptr;

  xla::ffi::Error find(xla::ffi::RemainingArgs& gradients, xla::ffi::RemainingRets& reduced) {
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      auto input = gradients.get<xla::ffi::AnyBuffer>(i);
      auto output = reduced.get<xla::ffi::AnyBuffer>(i);
      if (!input.has_value()) return input.error();
      if (!output.has_value()) return output.error();
      inputs.push_back(input->untyped_data());
      outputs.push_back((*output)->untyped_data());
    }
    return xla::ffi::Error::Success();
  }

  // Takes the GIL and calls waiter(exchange, inputs, outputs, place), which fills the outputs.
  xla::ffi::Error see_through(PyObject* const& waiter) const {
    std::string problem;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject* const from = address_list(inputs);
    PyObject* const to = address_list(outputs);
    PyObject *place = nullptr, *done = nullptr;
    if (from != nullptr && to != nullptr) {
      place = place_of(device, reinterpret_cast<std::uintptr_t>(stream), 0);
    }
    if (place != nullptr) {
      done = PyObject_CallFunction(waiter, "LOOO", static_cast<long long>(exchange), from, to,
                                   place);
    }
    if (done == nullptr) problem = pending_error();
    Py_XDECREF(from);
    Py_XDECREF(to);
    Py_XDECREF(place);
    Py_XDECREF(done);
    PyGILState_Release(state);
    if (!problem.empty()) return xla::ffi::Error(xla::ffi::ErrorCode::kInternal, problem);
    return xla::ffi::Error::Success();
  }
};

}  // namespace wfbp
