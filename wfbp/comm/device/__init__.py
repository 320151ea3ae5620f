"""Backends whose buffers are on an accelerator.

Read ``device`` first (the interface), then ``device_backend`` (shared by ``nccl`` and ``staged``);
``links`` chooses one of these on all ranks; ``launch_order`` orders lanes' launches;
``device_memory`` orders a lane's work on the device's streams.
"""
