"""What JAX programs do; every check is its own test."""

from __future__ import annotations

from tests.parallel.programs import jax_hazards
from tests.parallel.programs.harness import Checks

check = Checks(jax_hazards.check)

if __name__ == "__main__":
    check.main()
