"""Every check of programs with PyTorch: ``program.py OUT MODE [NAME ...]`` under mpirun."""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import (
    adapter,
    collectives,
    disagreements,
    named_operations,
    rebuilding,
)

check = Checks(
    adapter.check,
    rebuilding.check,
    collectives.check,
    named_operations.check,
    disagreements.check,
)

if __name__ == "__main__":
    check.main()
