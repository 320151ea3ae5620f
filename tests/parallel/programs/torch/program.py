"""Every check of programs with PyTorch: ``program.py OUT MODE [NAME ...]`` under mpirun."""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import (
    adapter,
    adasum,
    collectives,
    disagreements,
    named_operations,
    rebuilding,
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
)

if __name__ == "__main__":
    check.main()
