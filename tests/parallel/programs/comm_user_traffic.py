"""A user's own MPI calls beside the backend: neither may see the other's messages."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
from mpi4py import MPI

from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.waiting import wait
from wfbp.core.types import Op

world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_ARE_FATAL)
caught = np.full(4, -1, np.int64)
listening = world.Irecv(caught, MPI.ANY_SOURCE, MPI.ANY_TAG)  # would catch any stray message
backend = MpiBackend()
sums: list[float] = []


def communicate() -> None:
    for turn in range(50):
        data = np.full(100_000, backend.rank + turn, np.float32)
        wait(backend.all_reduce(data, "float32", Op.SUM), timeout_s=60)
        sums.append(float(data[0]))
        for rank in set(range(backend.size)) - {backend.rank}:
            backend.send_notice(rank, b"%d" % turn)
        backend.poll_notices()


thread = threading.Thread(target=communicate)
thread.start()
for _ in range(50):  # at the same time, from the main thread
    assert world.allreduce(1) == world.size
thread.join()
base = sum(range(world.size))
assert sums == [base + world.size * turn for turn in range(50)]
assert not listening.Test()
world.Barrier()
world.Send(np.arange(4), (world.rank + 1) % world.size, tag=9)
listening.Wait()
assert caught.tolist() == [0, 1, 2, 3]
assert world.Get_errhandler() == MPI.ERRORS_ARE_FATAL
wait(backend.all_gather_bytes(b""), timeout_s=60)
backend.close()
Path(sys.argv[1], f"rank{world.rank}").write_text("fine")
