"""Moves bytes between ranks.

Read ``backend`` first: the interface, and how contributions combine. Jobs use ``mpi`` and
``device``; demonstrations use ``emulated``. ``waiting`` waits without occupying a core; ``probe``
measures cost curves.
"""
