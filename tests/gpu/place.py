"""The place of the programs here: GPU 0, which the ranks share, or a software device.

Both programs take ``OUT LIBRARY [--software] [--schedules NAME ...]``, where LIBRARY is NCCL or
STAGED. They end with status 1 if a difference is too large.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from tests.support.fake_nccl import FakeNccl
from wfbp.comm import cost_probe
from wfbp.comm.device.links import DeviceLinks
from wfbp.comm.device.nccl import NcclBackend
from wfbp.comm.device.staged import StagedBackend
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.config import Config
from wfbp.runtime import process

BACKENDS = {"NCCL": NcclBackend, "STAGED": StagedBackend}
LIMIT = 1e-4
"""The largest relative difference that rounding explains."""

CONFIG = Config(
    warmup_steps=1,
    profile_steps=2,
    trial_steps=1,
    probe_budget_s=0.1,
    timeout_s=45.0,  # less than a part of run_all.py may take: so the error tells where it hangs
    exchange_alone=True,
)


@dataclass(frozen=True, slots=True)
class Options:
    out: Path
    library: str
    software: bool
    schedules: tuple[str, ...]


def options(schedules: Sequence[str]) -> Options:
    """Read the command line, and prepare NCCL for two ranks on one GPU. ``schedules``: all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("library", choices=tuple(BACKENDS))
    parser.add_argument("--software", action="store_true", help="a device made of threads")
    parser.add_argument("--schedules", nargs="+", choices=schedules, default=schedules)
    given = parser.parse_args()
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if given.library == "NCCL":  # else NCCL refuses two ranks on one GPU
        os.environ["NCCL_HOSTID"] = f"wfbp-test-{MPI.COMM_WORLD.rank}"
    return Options(given.out, given.library, given.software, tuple(given.schedules))


def software_device(kind: type[Any], library: str) -> Any:
    """A software device of this class; its NCCL sends messages by MPI."""
    cost_probe.LONGEST_STREAM = 2
    device = kind(seed=1, most_s=2e-4)
    if library == "NCCL":
        device.library = FakeNccl(device, MpiBackend)
    return device


def conclude(out: Path, library: str, differences: dict[str, float]) -> None:
    """Write and judge the differences; check that gradients used the wanted backend."""
    rank = MPI.COMM_WORLD.rank
    attached = process.current("this program").attached
    links = [each for each in attached if isinstance(each, DeviceLinks)]
    used = {type(backend) for each in links for backend in each.backends.values()}
    assert used == {BACKENDS[library]}, f"rank {rank}: expected {library}, gradients used {used}"
    (out / f"rank{rank}.json").write_text(json.dumps(differences))
    wrong = {name: each for name, each in differences.items() if not each <= LIMIT}
    if wrong:
        sys.exit(f"rank {rank}: too large differences: {wrong}")
    if rank == 0:
        worst = max(differences, key=differences.__getitem__)
        print(
            f"{len(differences)} checks over {library}; largest difference "
            f"{differences[worst]:.1e} ({worst})"
        )
