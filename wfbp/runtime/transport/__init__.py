"""Storage of groups and how they are sent, on the host or on a device.

Read ``transport`` first: the interface that the executor and the tracker use, and the host's.
``buffers`` are the host's fusion, scatter and gather buffers; ``flags`` are the presence flags and
requests that travel with the tensors. ``device_transport`` and ``device_buffers`` are the same on
an accelerator.
"""
