"""Moves bytes between ranks.

Read ``backend`` first, the interface that everything above uses, and ``buffers``, which defines how
contributions combine. ``mpi`` and ``device`` are the backends of jobs; ``local`` (ranks as threads)
and ``emulated`` (a link with given cost curves) those of tests and simulations. ``waiting`` says
how to wait without taking a core, ``probe`` measures cost curves, ``pages`` gets memory.
"""
