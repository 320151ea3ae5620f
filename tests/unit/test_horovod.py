"""Programs for Horovod on one rank."""

from __future__ import annotations

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
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "wfbp.horovod", str(script)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run
    assert run.stdout.strip() == "['0.28.1', True, '__mp_main__']", run
