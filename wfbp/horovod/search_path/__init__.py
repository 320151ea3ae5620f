"""A folder for ``sys.path`` in which lies a module ``horovod`` and nothing else."""
