"""The backend on MPI, and on the shared memory of ranks on one host.

Read ``backend`` first, which chooses how a collective travels and cuts it into tasks, then
``transfers``, which starts tasks in order and moves them on. ``shm_memory`` and ``shm_allreduce``
replace messages if all ranks share a host. ``start`` loads MPI and compares with what the launcher
promised; ``start_notice`` is a program of its own that reports why a rank waits at its start.
"""
