"""The command line: ``wfbp run``, ``doctor``, ``plan``, ..., one module per command."""
