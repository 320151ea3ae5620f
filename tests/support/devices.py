"""Software devices of several ranks that are threads."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.fake_nccl import FakeNccl
from tests.support.local import LocalWorld
from tests.support.software_device import SoftwareDevice
from wfbp.comm.backend import Backend


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
        self.worlds: list[LocalWorld] = []
        self._made = [0] * size
        self.size = size
        self._lock = threading.Lock()
        self.of = [kind(seed + rank, most_s) for rank in range(size)]
        for rank, device in enumerate(self.of):
            if nccl:
                device.library = FakeNccl(device, lambda rank=rank: self.connect(rank))

    def connect(self, rank: int) -> Backend:
        """The rank's end of the next world that it asks for."""
        with self._lock:
            number = self._made[rank]
            self._made[rank] += 1
            if number == len(self.worlds):
                self.worlds.append(LocalWorld(self.size))
            return self.worlds[number].backend(rank)
