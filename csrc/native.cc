// The extension module. Each part adds its functions and classes.
#include "native.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "Packing of tensors into fusion buffers, reductions, and messages under way.";
  wfbp::bind_pack(module);
  wfbp::bind_transfers(module);
}
