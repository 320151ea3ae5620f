"""A backend is closed and forgotten while a duplicate's messages are under way.

What MPI still writes to must be there, though nobody refers to it. In other memory it would do
damage that need not show: so the memory itself is looked for too.
"""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import numpy as np
from mpi4py import MPI

from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.waiting import wait
from wfbp.core.types import Op

backend = MpiBackend()
rank = backend.rank
lane = backend.duplicate()
data = np.ones(1_000_000, np.float32)
wait(lane.all_reduce(data, "float32", Op.SUM))
lane.all_reduce(data, "float32", Op.SUM)
kept = weakref.ref(lane._channel.active[0].work)
backend.close()
del backend, lane, data
gc.collect()
MPI.COMM_WORLD.Barrier()  # the other rank's messages arrive
assert kept() is not None
Path(sys.argv[1], f"rank{rank}").write_text("fine")
