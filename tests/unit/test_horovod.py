"""Programs for Horovod on one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import multiprocessing
import sys

import horovod
import horovod.torch as hvd


def work(queue):
    queue.put([horovod.__version__, hvd.Average is sys.modules["wfbp.torch"].Average, __name__])


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0, worker.exitcode
    print(queue.get())
"""


def test_processes_that_a_program_spawns_find_the_stand_in(tmp_path: Path) -> None:
    """They import the program anew, as workers of a ``DataLoader`` that are not forked."""
    (tmp_path / "program.py").write_text(PROGRAM)
    run = stand_in(["program.py"], tmp_path)
    assert run.returncode == 0, run
    assert run.stdout.strip() == "['0.28.1', True, '__mp_main__']", run


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    run = stand_in(["nosuch.py"], tmp_path)
    told = f"python -m wfbp.horovod: nosuch.py: no such file in {tmp_path}\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", told), run
    run = stand_in(["-m", "nosuch.train"], tmp_path)
    assert run.returncode == 1, run
    assert "No module named 'nosuch'" in run.stderr, run


def stand_in(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program run by ``python -m wfbp.horovod`` in this folder."""
    command = [sys.executable, "-m", "wfbp.horovod", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
