"""Benchmarks end the jobs that they started, gently, when they are ended themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

JOB = """
    import pathlib, signal, sys, time
    def tidy(*_):
        pathlib.Path(sys.argv[1], "tidied").touch()
        sys.exit(3)
    signal.signal(signal.SIGTERM, tidy)
    pathlib.Path(sys.argv[1], "started").touch()
    time.sleep(100)
"""
BENCHMARK = """
import os, signal, sys
from tests.benchmarks.jobs import run_job
# As in a terminal: what a script starts in the background is born deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
run_job(sys.argv[1:], os.environ)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_benchmark_lets_its_job_tidy_up(tmp_path: Path, number: signal.Signals) -> None:
    job = [sys.executable, "-c", textwrap.dedent(JOB), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, *job], stderr=subprocess.DEVNULL
    ) as benchmark:
        try:
            deadline = time.monotonic() + 30.0
            while not (tmp_path / "started").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            benchmark.send_signal(number)
            assert benchmark.wait(60.0) != 0
        finally:
            benchmark.kill()  # else the block would wait for it for ever
    assert (tmp_path / "tidied").exists()
