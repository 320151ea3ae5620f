"""Backends whose buffers lie on an accelerator.

Read ``device`` first, the interface to one accelerator, then ``backend``, what NCCL and staging
have in common. ``nccl`` and ``staged`` (through pinned memory of the host) are the two;
``connection`` chooses between them, the same on every rank; ``launch_order`` is the order in which
lanes launch NCCL's collectives.
"""
