"""Moves bytes between ranks.

Read ``backend`` first: the interface that everything above uses, and how contributions combine.
``mpi`` and ``device`` are the backends of jobs, ``emulated`` (a link with given costs) that of
demonstrations. ``waiting`` waits without taking a core, ``probe`` measures cost curves.
"""
