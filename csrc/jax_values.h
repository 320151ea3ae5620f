// Converts values between C++ and Python. The caller holds the GIL.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

namespace wfbp {

// The place of a handler's call, as the tuple (device, stream, event); None on the host.
inline PyObject* place_of(std::int32_t device, std::uintptr_t stream, std::uintptr_t event) {
  if (device < 0) Py_RETURN_NONE;
  return Py_BuildValue("iKK", static_cast<int>(device), static_cast<unsigned long long>(stream),
                       static_cast<unsigned long long>(event));
}

// Returns a list of addresses, or null with a Python error set.
inline PyObject* address_list(const std::vector<void*>& addresses) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(addresses.size()));
  for (std::size_t i = 0; list != nullptr && i < addresses.size(); ++i) {
    PyObject* address = PyLong_FromVoidPtr(addresses[i]);
    if (address == nullptr) {
      Py_CLEAR(list);
    } else {
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), address);
    }
  }
  return list;
}

// Returns the pending Python exception as text, and clears it.
inline std::string pending_error() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  std::string text = type == nullptr ? "" : reinterpret_cast<PyTypeObject*>(type)->tp_name;
  if (PyObject* shown = value == nullptr ? nullptr : PyObject_Str(value)) {
    if (const char* utf8 = PyUnicode_AsUTF8(shown)) text += std::string(": ") + utf8;
    Py_DECREF(shown);
  }
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return text;
}

// Appends a list's integers to `found`. On failure, returns false with a Python error set.
inline bool numbers(PyObject* list, std::vector<unsigned long long>& found) {
  PyObject* const items = PySequence_Fast(list, "expected a list of integers");
  if (items == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    found.push_back(PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(items, i)));
  }
  Py_DECREF(items);
  return PyErr_Occurred() == nullptr;
}

}  // namespace wfbp
