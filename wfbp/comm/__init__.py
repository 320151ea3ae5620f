"""Moves bytes between ranks.

Read ``backend`` first: the interface, and how contributions combine. ``mpi`` and ``device`` are the
backends of jobs. ``waiting`` waits, ``cost_probe`` measures costs.
"""
