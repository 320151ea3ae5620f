// Gradients leave a running XLA program through these two handlers.
//
// `announce` runs on whichever XLA thread made a gradient. It takes no Python lock, because Python
// may be busy for milliseconds and XLA computes on: it leaves a note and wakes a Python thread,
// the herald, which tells the engine. `wait` runs once all gradients exist. It takes the GIL and
// has Python close the step and fill the outputs; XLA's other threads compute on meanwhile.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// A gradient exists: of which exchange, which leaf, and where it lies.
struct Note {
  std::int64_t exchange;
  std::int32_t index;
  std::uintptr_t address;
};

// Notes on their way from XLA's threads to Python; the mutex protects everything. Who holds it
// waits for nothing, and who waits for it does not hold the GIL.
class Mailbox {
 public:
  void put(const Note& note) {
    bool ring = false;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      notes_.push_back(note);
      ring = listening_;
      listening_ = false;
    }
    if (ring) bell_.notify_one();
  }

  std::vector<Note> take() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return std::exchange(notes_, {});
  }

  // Waits for a note; false once closed.
  bool listen() {
    std::unique_lock<std::mutex> hold(mutex_);
    while (!closed_ && notes_.empty()) {
      listening_ = true;  // each time: whoever rang has reset it, and the notes may be taken since
      bell_.wait(hold);
    }
    listening_ = false;
    return !closed_;
  }

  void close() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      closed_ = true;
    }
    bell_.notify_all();
  }

  bool closed() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return closed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable bell_;
  std::vector<Note> notes_;
  bool listening_ = false;
  bool closed_ = false;
};

// Never destroyed: XLA's threads may outlive static objects.
Mailbox& mailbox() {
  static Mailbox* const only = new Mailbox;
  return *only;
}

PyObject* waiter = nullptr;  // called as waiter(exchange, inputs, outputs); guarded by the GIL

ffi::Error announce(std::int64_t exchange, std::int32_t index, ffi::AnyBuffer gradient,
                    ffi::Result<ffi::AnyBuffer> out) {
  void* const target = out->untyped_data();
  if (target != gradient.untyped_data()) {
    std::memcpy(target, gradient.untyped_data(), gradient.size_bytes());
  }
  mailbox().put({exchange, index, reinterpret_cast<std::uintptr_t>(target)});
  return ffi::Error::Success();
}

// A list of addresses; null with a Python error set where that fails.
PyObject* address_list(const std::vector<void*>& addresses) {
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

// The pending Python exception as text; clears it.
std::string pending_error() {
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

ffi::Error wait(std::int64_t exchange, ffi::RemainingArgs gradients, ffi::RemainingRets reduced) {
  std::vector<void*> inputs, outputs;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    auto input = gradients.get<ffi::AnyBuffer>(i);
    auto output = reduced.get<ffi::AnyBuffer>(i);
    if (!input.has_value()) return input.error();
    if (!output.has_value()) return output.error();
    inputs.push_back(input->untyped_data());
    outputs.push_back((*output)->untyped_data());
  }
  if (mailbox().closed()) {
    return ffi::Error(ffi::ErrorCode::kAborted, "wfbp: the program has ended");
  }
  std::string problem;
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* const from = address_list(inputs);
  PyObject* const to = address_list(outputs);
  PyObject* done = nullptr;
  if (from != nullptr && to != nullptr) {
    done = PyObject_CallFunction(waiter, "LOO", static_cast<long long>(exchange), from, to);
  }
  if (done == nullptr) problem = pending_error();
  Py_XDECREF(from);
  Py_XDECREF(to);
  Py_XDECREF(done);
  PyGILState_Release(state);
  if (!problem.empty()) return ffi::Error(ffi::ErrorCode::kInternal, problem);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(announce_handler, announce,
                       ffi::Ffi::Bind()
                           .Attr<std::int64_t>("exchange")
                           .Attr<std::int32_t>("index")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(
    wait_handler, wait,
    ffi::Ffi::Bind().Attr<std::int64_t>("exchange").RemainingArgs().RemainingRets());

PyObject* handlers(PyObject*, PyObject*) {
  return Py_BuildValue("{s:N,s:N}", "wfbp_announce",
                       PyCapsule_New(reinterpret_cast<void*>(announce_handler), nullptr, nullptr),
                       "wfbp_wait",
                       PyCapsule_New(reinterpret_cast<void*>(wait_handler), nullptr, nullptr));
}

PyObject* serve(PyObject*, PyObject* callback) {
  PyObject* const previous = waiter;
  Py_INCREF(callback);
  waiter = callback;
  Py_XDECREF(previous);
  Py_RETURN_NONE;
}

PyObject* listen(PyObject*, PyObject*) {
  bool open = false;
  Py_BEGIN_ALLOW_THREADS
  open = mailbox().listen();
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(open);
}

PyObject* take(PyObject*, PyObject*) {
  std::vector<Note> notes;
  Py_BEGIN_ALLOW_THREADS
  notes = mailbox().take();
  Py_END_ALLOW_THREADS
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(notes.size()));
  for (std::size_t i = 0; list != nullptr && i < notes.size(); ++i) {
    PyObject* note = Py_BuildValue("LiK", static_cast<long long>(notes[i].exchange),
                                   static_cast<int>(notes[i].index),
                                   static_cast<unsigned long long>(notes[i].address));
    if (note == nullptr) {
      Py_CLEAR(list);
    } else {
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), note);
    }
  }
  return list;
}

PyObject* close_mailbox(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS
  mailbox().close();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// Reads a list of integers; false with a Python error set where it is none.
bool numbers(PyObject* list, std::vector<unsigned long long>& found) {
  PyObject* const items = PySequence_Fast(list, "expected a list of integers");
  if (items == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    found.push_back(PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(items, i)));
  }
  Py_DECREF(items);
  return PyErr_Occurred() == nullptr;
}

PyObject* copy(PyObject*, PyObject* args) {
  PyObject *to_list = nullptr, *from_list = nullptr, *size_list = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &to_list, &from_list, &size_list)) return nullptr;
  std::vector<unsigned long long> to, from, sizes;
  if (!numbers(to_list, to) || !numbers(from_list, from) || !numbers(size_list, sizes)) {
    return nullptr;
  }
  if (to.size() != from.size() || to.size() != sizes.size()) {
    PyErr_SetString(PyExc_ValueError, "expected lists of the same length");
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i] != from[i] && sizes[i] != 0) {
      std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]),
                  static_cast<std::size_t>(sizes[i]));
    }
  }
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"handlers", handlers, METH_NOARGS, "XLA handlers by target name, as capsules."},
    {"serve", serve, METH_O, "Have callback(exchange, inputs, outputs) called by each wait."},
    {"listen", listen, METH_NOARGS, "Wait for notes; False once closed."},
    {"take", take, METH_NOARGS, "All notes that wait: (exchange, index, address) each."},
    {"close", close_mailbox, METH_NOARGS, "End listen(); every later wait fails."},
    {"copy", copy, METH_VARARGS, "copy(to, from, nbytes): copy memory, by lists of integers."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_jax_ffi",
                          "XLA handlers through which gradients leave a running program.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__jax_ffi() {
  PyObject* module = PyModule_Create(&definition);
  // Handlers are bound to the interface that they were compiled against.
  if (module != nullptr && PyModule_AddStringConstant(module, "JAXLIB", WFBP_JAXLIB) != 0) {
    Py_CLEAR(module);
  }
  return module;
}
