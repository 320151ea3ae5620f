"""Every check of collectives: ``collective_program.py OUT MODE [NAME ...]`` under mpirun."""

from __future__ import annotations

from tests.parallel.programs import collective_arrays, collective_reducer, collective_tensors
from tests.parallel.programs.harness import Checks

check = Checks(collective_tensors.check, collective_arrays.check, collective_reducer.check)

if __name__ == "__main__":
    check.main()
