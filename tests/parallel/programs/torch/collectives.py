"""Every check of collectives: on arrays and tensors, and of the reducer of arrays."""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import collective_arrays, collective_reducer, collective_tensors

check = Checks(collective_tensors.check, collective_arrays.check, collective_reducer.check)
