"""A job whose last rank is killed or stopped while it copies out of another rank's memory.

Usage: mpirun -n N python host_faults.py OUT CASE. CASE is ``killed`` or ``stopped``; or
``refused``: that rank may not open the others' memory; or ``forked``: its child communicates.
Each rank writes what it caught, or what it got.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from mpi4py import MPI

import wfbp
from tests.support.ranks import limit_waits
from wfbp.comm.mpi import shm_memory
from wfbp.comm.mpi.two_level import TwoLevelTask
from wfbp.errors import WfbpError
from wfbp.runtime import process

NUMEL = 300_000
PATIENCE_S = 60.0
DEEDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def held_up_within_a_copy(deed: int) -> None:
    """From now on: this process gets a signal when it is about to copy rank 0's part."""
    deliver = TwoLevelTask.deliver

    def then(job: TwoLevelTask, owner: int) -> None:
        if owner == 0:
            TwoLevelTask.deliver = deliver  # type: ignore[method-assign]
            # To this thread: one for the process may reach another first, and this one copies on.
            signal.pthread_kill(threading.get_ident(), deed)
        deliver(job, owner)

    TwoLevelTask.deliver = then  # type: ignore[method-assign]


def refuse(*arguments: Any) -> Any:
    raise PermissionError("not yours")


def told_to_child(reducer: wfbp.GradientReducer) -> str:
    """What a forked process is told that takes a step."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            step(reducer)
        except Exception as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()


def step(reducer: wfbp.GradientReducer) -> Any:
    reducer.mark_ready(0, np.full(NUMEL, wfbp.rank() + 1, np.float32))
    return reducer.wait()[0]


def wait_for(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)


def lose_patience_with(pid: int) -> None:
    """When this process has stopped: ask where the others are, and wait no longer."""
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    runtime = process.current("this program")
    watch = runtime.thread.loop.watch
    limit_waits(runtime, stall_warning_s=0.3)
    wait_for(lambda: watch._question > 0 and len(watch._answers) == wfbp.size() - 2)
    limit_waits(runtime, timeout_s=1.0)


def main() -> None:
    out, case = Path(sys.argv[1]), sys.argv[2]
    if case == "refused" and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        shm_memory.open_map = refuse
    wfbp.init()
    rank, last = wfbp.rank(), wfbp.size() - 1
    pids = wfbp.allgather_object(os.getpid())
    reducer = wfbp.GradientReducer([("w", np.zeros(NUMEL, np.float32))], schedule="single")
    step(reducer)
    assert reducer._reducer is not None
    before = reducer._reducer._buffers[0].result(0).view(np.float32)
    child = ""
    if rank != last and case == "stopped":
        threading.Thread(target=lose_patience_with, args=(pids[last],), daemon=True).start()
    if rank == last and case in DEEDS:
        held_up_within_a_copy(DEEDS[case])
    if rank == last and case == "forked":
        child = told_to_child(reducer)
    try:
        told: Any = {"values": np.unique(step(reducer)).tolist(), "child": child}
    except WfbpError as error:
        told = {"kind": type(error).__name__, "text": str(error)}
        if rank == 0:
            before[:] = -1  # what nobody waits for any more may be used
            os.kill(pids[last], signal.SIGCONT)
    report = out / f"rank{rank}.json"
    report.with_suffix(".part").write_text(json.dumps(told))
    report.with_suffix(".part").rename(report)
    # Else the job would end before that rank has gone on.
    wait_for((out / f"rank{last}.json").exists)
    if "kind" in told:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
