"""Random training programs, on several ranks and in one process: they must agree.

Read in this order: ``program`` (what a program is: data), ``draw`` (the grammar), ``models`` and
``optimizers`` (what programs are made of), ``interpreter`` (runs one, on a rank or as the
reference), ``job`` (many of them under one mpirun), ``driver`` (starts jobs, shrinks failures).
``python -m tests.fuzz --help`` runs them; ``random-programs.md`` says what was found.
"""
