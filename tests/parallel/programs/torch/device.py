"""``equality.py`` with gradients on a software device: the whole runtime under real MPI.

PyTorch computes on the host, which plays the consumer's stream; what the lane does happens later,
on streams that are threads. Usage: as of ``equality.py``, and NCCL or STAGED behind it.
"""

from __future__ import annotations

import sys

from tests.parallel.programs.torch import equality
from tests.support.fake_nccl import FakeNccl
from tests.support.software_device import SoftwareDevice
from wfbp.comm import probe
from wfbp.comm.mpi.backend import MpiBackend
from wfbp.torch import gradient_sync

OPTIMIZERS = ("adamw",)


def main() -> None:
    probe.LONGEST_STREAM = 2
    device = SoftwareDevice(seed=len(sys.argv), most_s=2e-4)
    if sys.argv.pop() == "NCCL":
        device.library = FakeNccl(device, MpiBackend)
    gradient_sync.device_of = lambda *_: device  # type: ignore[assignment]
    equality.OPTIMIZERS = {n: equality.OPTIMIZERS[n] for n in OPTIMIZERS}
    equality.main()
    device.drain()
    assert device.calls["pack"] > 100


if __name__ == "__main__":
    main()
