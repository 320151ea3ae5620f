"""Software devices of several ranks that are threads."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.fake_nccl import FakeNccl
from tests.support.software_device import SoftwareDevice
from wfbp.comm.backend import Backend
from wfbp.comm.local import LocalWorld


class Devices:
    """One software device per rank, connected by a library that stands for NCCL, or by none."""

    def __init__(
        self,
        size: int,
        nccl: bool,
        seed: int = 0,
        most_s: float = 3e-4,
        kind: type[Any] = SoftwareDevice,
    ) -> None:
        self._worlds: list[LocalWorld] = []
        self._made = [0] * size
        self._size = size
        self._lock = threading.Lock()
        self.of = [kind(seed + rank, most_s) for rank in range(size)]
        for rank, device in enumerate(self.of):
            if nccl:
                device.library = FakeNccl(device, lambda rank=rank: self._connect(rank))

    def _connect(self, rank: int) -> Backend:
        with self._lock:
            number = self._made[rank]
            self._made[rank] += 1
            if number == len(self._worlds):
                self._worlds.append(LocalWorld(self._size))
            return self._worlds[number].backend(rank)
