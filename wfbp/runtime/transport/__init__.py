"""What gradients lie in and travel through: storage of groups, on the host or on a device.

Read ``transport`` first: the interface that the executor and the tracker use, and the host's.
``buffers`` are the host's fusion, scatter and gather buffers; ``flags`` is what every message says
beside its tensors. ``device_transport`` and ``device_buffers`` are the same on an accelerator.
"""
