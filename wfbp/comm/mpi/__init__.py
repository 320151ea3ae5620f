"""The backend on MPI, and on shared memory if all ranks share a host.

Read ``mpi_backend`` first (chooses an algorithm, cuts a collective into tasks), then ``transfers``
(starts tasks in order). ``shm_memory`` and ``two_level`` replace messages within a host.
``start`` loads MPI and checks the launcher; ``start_notice`` is a separate program.
"""
