"""Every check of programs with PyTorch: ``program.py OUT MODE [NAME ...]`` under mpirun.

One program, because each rank that starts loads PyTorch and its compiler, which takes longer than
many checks.
"""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import (
    adapter,
    adasum,
    collectives,
    defects,
    disagreements,
    named_operations,
    own_methods,
    rebuilding,
    state,
    training_in_sets,
    uneven_data,
)

check = Checks(
    adapter.check,
    rebuilding.check,
    collectives.check,
    named_operations.check,
    disagreements.check,
    training_in_sets.check,
    adasum.check,
    uneven_data.check,
    state.check,
    defects.check,
    own_methods.check,
)

if __name__ == "__main__":
    check.main()
