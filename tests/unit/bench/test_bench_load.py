"""Foreign load is what the machine did less what we did."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.benchmarks.machine import (
    Usage,
    busy_seconds,
    process_seconds,
    thread_seconds,
    usage,
)

TICKS = os.sysconf("SC_CLK_TCK")


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_busy_is_everything_but_idle_and_guest() -> None:
    stat = "cpu  1 2 4 1000 2000 8 16 32 64 128\ncpu0 9 9 9 9 9 9 9 9 9 9\n"
    assert busy_seconds(stat) * TICKS == pytest.approx(1 + 2 + 4 + 8 + 16 + 32)


def test_busy_refuses_other_text() -> None:
    with pytest.raises(ValueError, match="intr"):
        busy_seconds("intr 1 2 3\n")


def test_process_time_survives_an_ugly_name() -> None:
    fields = " ".join(str(n) for n in range(4, 53))
    assert process_seconds(f"12 (a) b (c) S {fields}") * TICKS == pytest.approx(14 + 15)


def test_foreign_cores_never_negative() -> None:
    assert Usage(0.0, 5.0, 5.0).foreign_cores(Usage(1.0, 6.0, 6.5)) == 0.0


def test_own_work_is_not_foreign_and_a_stranger_is() -> None:
    code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    before = usage([os.getpid()])
    stranger = subprocess.Popen([sys.executable, "-c", code])
    spin(0.3)
    stranger.wait()
    after = usage([os.getpid()])
    assert after.own_s - before.own_s >= 0.25
    assert (after.busy_s - before.busy_s) - (after.own_s - before.own_s) >= 0.35


def test_thread_seconds_counts_only_threads_of_that_name() -> None:
    release = threading.Event()
    counted: list[float] = []

    def work() -> None:
        spin(0.05)
        counted.append(thread_seconds("bench-test"))
        release.wait()

    thread = threading.Thread(target=work, name="bench-test")
    thread.start()
    spin(0.05)
    while not counted:
        time.sleep(0.001)
    release.set()
    thread.join()
    assert 0.04 <= counted[0] < 10
    while thread_seconds("bench-test"):  # the system's thread ends a little after Python's
        time.sleep(0.001)
