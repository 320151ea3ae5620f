"""The backend on MPI, and on the shared memory of ranks on one host.

Read ``backend`` first, which chooses between shared memory and messages, then ``routing``, which
chooses between direct exchange and the library's collectives, and cuts them into jobs.
``jobs`` starts them in order, a window at a time; ``transfers`` are their messages under way.
``shm_memory`` and ``shm_allreduce`` replace messages where all ranks share a host. ``start``
loads MPI, ``launch_check`` compares with what the launcher promised, ``start_notice`` is a program
of its own that reports why a rank does not get beyond its start.
"""
