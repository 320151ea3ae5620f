"""What JAX programs do; every check is its own test."""

from __future__ import annotations

import os

# Compile times rule here; what XLA does to the program's graph stays as it is.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.jax import hazards, optimizers

check = Checks(hazards.check, optimizers.check)

if __name__ == "__main__":
    check.main()
