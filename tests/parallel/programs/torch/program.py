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
    disagreements,
    gradient_memory,
    named_operations,
    own_methods,
    rebuilding,
    scripts_and_forks,
    state,
    training_in_sets,
    uneven_data,
    user_optimizers,
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
    user_optimizers.check,
    gradient_memory.check,
    scripts_and_forks.check,
    own_methods.check,
)

if __name__ == "__main__":
    check.main()
