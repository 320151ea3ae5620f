"""Frameworks above PyTorch, on real ranks; ``make install-integrations`` installs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.runs import PROGRAMS
from tests.support.launcher import mpirun

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_accelerate_and_the_trainer_train_as_a_single_process_does(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    program = PROGRAMS / "huggingface_training.py"
    run = mpirun(2, program, tmp_path, env={"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"})
    assert run.rc == 0, run.stderr
    same = [line for line in run.stdout.splitlines() if line.startswith("same: ")]
    assert same == ["same: accelerate", "same: trainer"]


def test_lightning_trains_as_a_single_process_does(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run = mpirun(2, PROGRAMS / "lightning_training.py", tmp_path, env={"PYTHONWARNINGS": "ignore"})
    assert run.rc == 0, run.stderr
    same = [line for line in run.stdout.splitlines() if line.startswith("same: ")]
    assert same == [
        "same: clipped",
        "same: clipped by value",
        "same: accumulated",
        "same: changing",
    ]
