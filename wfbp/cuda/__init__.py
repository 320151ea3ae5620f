"""Tensors on CUDA devices: what the runtime needs of them, through CuPy.

Nothing here imports CuPy before a device is asked for.
"""
