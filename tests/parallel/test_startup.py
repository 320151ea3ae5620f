"""What is said when a job starts."""

from __future__ import annotations

import pytest

from tests import launcher

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(60)]

INIT = """
import sys
sys.modules["wfbp._pack"] = None
import wfbp
from wfbp import native
assert not native.AVAILABLE
wfbp.init()
wfbp.barrier()
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_missing_extension_is_told_once(ranks: int) -> None:
    run = launcher.mpirun(ranks, "-c", INIT, timeout=40)
    assert run.rc == 0, run
    assert run.stderr.count("packing goes through NumPy") == 1, run
    assert "with pip's -v" in run.stderr
