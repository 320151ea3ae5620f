"""The backend on MPI, and on the shared memory of ranks on one host.

Read ``backend`` first, then ``routing``, which decides how a collective goes and cuts it into jobs.
``jobs`` starts them in order, a window at a time; ``transfers`` are their messages under way.
``shm_memory`` and ``shm_allreduce`` replace messages where all ranks share a host. ``library``
loads MPI, ``launch`` compares with what the launcher promised, ``start_notice`` is a program of its
own that tells why a rank does not get beyond its start.
"""
