"""Starting a job: ``wfbprun``, or ``wfbp run``. Read ``hosts``, ``mpi``, ``commands``, ``rank``."""
