// Lets the handlers for CUDA be called by programs on the CPU: XLA tells no stream there, so the
// handlers' view of XLA is replaced by one that tells a stream and a device of the test's choice.
#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler* announce_handler = nullptr;
XLA_FFI_Handler* wait_handler = nullptr;
void* the_stream = nullptr;
int32_t the_device = 0;

XLA_FFI_Error* tell_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = the_stream;
  return nullptr;
}

XLA_FFI_Error* tell_device(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = the_device;
  return nullptr;
}

XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  if (frame->api == nullptr) return handler(frame);
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = tell_stream;
  api.XLA_FFI_DeviceOrdinal_Get = tell_device;
  const XLA_FFI_Api* const before = frame->api;
  frame->api = &api;
  XLA_FFI_Error* const error = handler(frame);
  frame->api = before;
  return error;
}

}  // namespace

extern "C" {

XLA_FFI_Error* announce(XLA_FFI_CallFrame* frame) { return call(announce_handler, frame); }

XLA_FFI_Error* wait(XLA_FFI_CallFrame* frame) { return call(wait_handler, frame); }

void use(XLA_FFI_Handler* announces, XLA_FFI_Handler* waits, void* stream, int32_t device) {
  announce_handler = announces;
  wait_handler = waits;
  the_stream = stream;
  the_device = device;
}
}
