"""Every check of decoupled training: ``decoupled.py OUT MODE [NAME ...]`` under mpirun."""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import decoupled_updates, state
from wfbp.runtime.tuning import tuner

if __name__ == "__main__":
    tuner._NUM_SEARCHED = 3  # of dear: a search takes longer than all the rest
    Checks(decoupled_updates.check, state.check).main()
