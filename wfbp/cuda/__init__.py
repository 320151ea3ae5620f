"""Tensors on CUDA devices, through CuPy, which is imported only when a device is requested."""
