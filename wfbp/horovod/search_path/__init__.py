"""A folder for ``sys.path`` with the module ``horovod`` and nothing else."""
