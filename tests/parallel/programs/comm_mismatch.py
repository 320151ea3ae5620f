"""Rank 0 reduces fewer elements than rank 1 sends: an error with MPI's own as its cause.

Open MPI may write what is too much all the same: there is room for it behind each buffer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.waiting import wait
from wfbp.core.types import Op
from wfbp.errors import BackendError

backend = MpiBackend()
data = np.ones(400_000, np.float32)
wait(backend.all_reduce(data, "float32", Op.SUM))  # memory for shards of this size is kept
if backend.rank == 0:
    data = data[:300_000]
work = backend.all_reduce(data, "float32", Op.SUM)
found: BackendError | None = None
try:
    wait(work, timeout_s=60)
except BackendError as error:
    found = error
if found is not None:
    assert isinstance(found.__cause__, MPI.Exception), repr(found.__cause__)
    Path(sys.argv[1], f"rank{backend.rank}").write_text(str(found))
    try:
        backend.all_reduce(np.ones(1, np.float32), "float32", Op.SUM).test()
    except BackendError:
        backend.abort(3)
wait(backend.all_gather_bytes(b""))  # only a rank that saw nothing comes here, and is ended
