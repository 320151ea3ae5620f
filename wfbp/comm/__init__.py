"""Moves bytes between ranks.

Read ``backend`` first: the interface, and how contributions combine. ``mpi`` and ``device`` are the
backends of jobs, ``emulated`` of demonstrations. ``waiting`` waits, ``probe`` measures costs.
"""
