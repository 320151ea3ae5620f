"""``program.py`` with gradients on a software device, through the handlers for CUDA.

JAX computes on the host, which plays XLA's stream; what the lane does happens later, on streams
that are threads. Usage: as of ``program.py``, and NCCL or STAGED behind it.
"""

from __future__ import annotations

import sys

from tests.parallel.programs.jax import program
from tests.support.fake_nccl import FakeNccl
from tests.support.software_xla import SoftwareXla, stand_in
from wfbp.comm import cost_probe
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.jax import gradient_exchange, xla_handlers
from wfbp.jax.xla_device import GpuPrograms


def main() -> None:
    cost_probe.LONGEST_STREAM = 2
    device = SoftwareXla(seed=len(sys.argv), most_s=2e-4)
    if sys.argv.pop() == "NCCL":
        device.library = FakeNccl(device, MpiBackend)
    module = stand_in()
    xla_handlers._built = lambda: module
    gradient_exchange.find_programs = lambda handlers: GpuPrograms(handlers, device)
    program.check.main()
    device.drain()
    assert device.calls["pack"] > 20
    assert device.calls["unpack"] > 20


if __name__ == "__main__":
    main()
