"""What JAX programs do; every check is its own test."""

from __future__ import annotations

import os

# Compile times rule here; what XLA does to the program's graph stays as it is.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

from tests.parallel.programs import jax_hazards, jax_optimizers
from tests.parallel.programs.harness import Checks

check = Checks(jax_hazards.check, jax_optimizers.check)

if __name__ == "__main__":
    check.main()
