"""Starting a job: ``wfbprun``, or ``wfbp run``.

Read in this order: :mod:`~wfbp.launcher.hosts` (which hosts, and how many ranks each may take),
:mod:`~wfbp.launcher.mpi` (which MPI library this Python uses, and its ``mpirun``),
:mod:`~wfbp.launcher.commands` (the command line for that library; pure),
:mod:`~wfbp.launcher.rank` (what runs on each rank before the program: cores, GPUs, output).
"""
