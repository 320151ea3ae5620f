// A running XLA program hands its gradients to wfbp through two handlers.
//
// `announce` runs on the XLA thread that computed a gradient. It only queues a note and never takes
// the GIL, because Python may hold the GIL for milliseconds while XLA computes. If the note
// completes a group that may be sent, `announce` wakes a Python thread (`wfbp-announce`), which
// passes the notes to the reducer. `wait` runs once all gradients exist. It takes the GIL, and
// Python closes the step and fills the outputs. On the CPU it uses a separate thread: XLA's thread
// pool is small and each of its threads has a queue, so a blocked one could delay work that another
// rank waits for.
//
// On CUDA both handlers run while XLA enqueues the program. `announce` records an event after the
// gradient on XLA's stream. `wait` returns once that stream has been made to wait for all work that
// fills the outputs.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "jax_events.h"
#include "jax_mailbox.h"
#include "jax_steps.h"
#include "jax_values.h"
#include "jax_waiters.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using wfbp::EventStock;
using wfbp::Groups;
using wfbp::Mailbox;
using wfbp::Note;
using wfbp::Step;
using wfbp::Waiters;
using wfbp::numbers;
using wfbp::place_of;

// These objects are never destroyed, because XLA's threads may outlive static objects.
Mailbox& mailbox() {
  static Mailbox* const only = new Mailbox;
  return *only;
}

EventStock& events() {
  static EventStock* const only = new EventStock;
  return *only;
}

Waiters& waiters() {
  static Waiters* const only = new Waiters;
  return *only;
}

// The Python callable waiter(exchange, inputs, outputs, place); protected by the GIL.
PyObject* waiter = nullptr;

ffi::Error announce(std::int64_t exchange, std::int32_t index, ffi::AnyBuffer gradient,
                    ffi::Result<ffi::AnyBuffer> out) {
  void* const target = out->untyped_data();
  if (target != gradient.untyped_data()) {
    std::memcpy(target, gradient.untyped_data(), gradient.size_bytes());
  }
  mailbox().put({exchange, index, reinterpret_cast<std::uintptr_t>(target)});
  return ffi::Error::Success();
}

ffi::Error announce_on_stream(void* stream, std::int32_t device, std::int64_t exchange,
                              std::int32_t index, ffi::AnyBuffer gradient,
                              ffi::Result<ffi::AnyBuffer> out) {
  if (out->untyped_data() != gradient.untyped_data()) {
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "wfbp: XLA did not let the announced gradient stay where it is");
  }
  mailbox().put({exchange, index, reinterpret_cast<std::uintptr_t>(gradient.untyped_data()), device,
                 reinterpret_cast<std::uintptr_t>(stream), events().record(stream)});
  return ffi::Error::Success();
}

ffi::Error see_through(const Step& step) {
  if (mailbox().closed()) {
    return ffi::Error(ffi::ErrorCode::kAborted, "wfbp: the program has ended");
  }
  mailbox().close_step(step.exchange);
  return step.see_through(waiter);
}

void finish(ffi::Promise& promise, ffi::Error end) {
  if (end.failure()) {
    promise.SetError(std::move(end));
  } else {
    promise.SetAvailable();
  }
}

ffi::Future wait(std::int64_t exchange, ffi::RemainingArgs gradients, ffi::RemainingRets reduced) {
  ffi::Promise promise;
  ffi::Future future(promise);
  Step step{exchange};
  ffi::Error found = step.find(gradients, reduced);
  if (found.failure()) {
    finish(promise, std::move(found));
  } else {
    // Wait on another thread, because a wait must not block XLA's own threads: ranks may reach
    // several exchanges or collectives in different orders, and would deadlock.
    waiters().run([promise, step]() mutable { finish(promise, see_through(step)); });
  }
  return future;
}

ffi::Error wait_on_stream(void* stream, std::int32_t device, std::int64_t exchange,
                          ffi::RemainingArgs gradients, ffi::RemainingRets reduced) {
  Step step{exchange, {}, {}, device, stream};
  ffi::Error found = step.find(gradients, reduced);
  return found.failure() ? found : see_through(step);
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

XLA_FFI_DEFINE_HANDLER(announce_on_stream_handler, announce_on_stream,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attr<std::int64_t>("exchange")
                           .Attr<std::int32_t>("index")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(wait_on_stream_handler, wait_on_stream,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attr<std::int64_t>("exchange")
                           .RemainingArgs()
                           .RemainingRets());

PyObject* capsule(XLA_FFI_Handler* handler) {
  return PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
}

PyObject* handlers(PyObject*, PyObject*) {
  return Py_BuildValue("{s:{s:N,s:N},s:{s:N,s:N}}",                         //
                       "cpu",                                               //
                       "wfbp_announce", capsule(announce_handler),          //
                       "wfbp_wait", capsule(wait_handler),                  //
                       "CUDA",                                              //
                       "wfbp_announce", capsule(announce_on_stream_handler),  //
                       "wfbp_wait", capsule(wait_on_stream_handler));
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
  const auto now = std::chrono::steady_clock::now();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(notes.size()));
  for (std::size_t i = 0; list != nullptr && i < notes.size(); ++i) {
    const Note& taken = notes[i];
    const std::chrono::duration<double> age = now - taken.time;
    PyObject* note = Py_BuildValue("LiKNd", static_cast<long long>(taken.exchange),
                                   static_cast<int>(taken.index),
                                   static_cast<unsigned long long>(taken.address),
                                   place_of(taken.device, taken.stream, taken.event), age.count());
    if (note == nullptr) {
      Py_CLEAR(list);
    } else {
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), note);
    }
  }
  return list;
}

PyObject* expect(PyObject*, PyObject* args) {
  long long exchange = 0;
  PyObject* group_list = nullptr;
  if (!PyArg_ParseTuple(args, "LO", &exchange, &group_list)) return nullptr;
  std::vector<std::int64_t> group_of;
  PyObject* const items = PySequence_Fast(group_list, "expected a list of integers");
  if (items == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    group_of.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items, i)));
  }
  Py_DECREF(items);
  if (PyErr_Occurred() != nullptr) return nullptr;
  mailbox().expect(exchange, Groups(std::move(group_of)));
  Py_RETURN_NONE;
}

PyObject* close_mailbox(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS
  mailbox().close();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* stock(PyObject*, PyObject* args) {
  unsigned long long record = 0;
  PyObject* handle_list = nullptr;
  std::vector<unsigned long long> handles;
  if (!PyArg_ParseTuple(args, "KO", &record, &handle_list) || !numbers(handle_list, handles)) {
    return nullptr;
  }
  events().fill(reinterpret_cast<EventStock::Record>(record), handles);
  Py_RETURN_NONE;
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
    {"handlers", handlers, METH_NOARGS, "XLA handlers by platform and target name, as capsules."},
    {"serve", serve, METH_O, "Have callback(exchange, inputs, outputs, place) called by each wait."},
    {"expect", expect, METH_VARARGS, "expect(exchange, groups): what leaves before the wait."},
    {"listen", listen, METH_NOARGS, "Wait for a complete group; False once closed."},
    {"take", take, METH_NOARGS, "All notes that wait: (exchange, index, address, place, age) each."},
    {"close", close_mailbox, METH_NOARGS, "End listen(); every later wait fails."},
    {"stock", stock, METH_VARARGS, "stock(record, handles): events to record by that function."},
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
  // Python compares this with the installed jaxlib, because the handlers fit only the interface
  // that they were compiled against.
  if (module != nullptr && PyModule_AddStringConstant(module, "JAXLIB", WFBP_JAXLIB) != 0) {
    Py_CLEAR(module);
  }
  return module;
}
