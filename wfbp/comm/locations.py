"""The place of a lane's tensors: the host, or a device (``comm.device.links``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol

from wfbp.comm.backend import HostBackend, Work
from wfbp.comm.memory import Memory
from wfbp.config import Config


class Attachment(ABC):
    """An object that a runtime keeps, for the memory of its lanes, until it ends."""

    @abstractmethod
    def close(self, lanes: Collection[int] | None = None) -> None:
        """Close what belongs to these lanes, or everything; collective."""

    @abstractmethod
    def give_up(self) -> None:
        """Stop waiting for other ranks."""


class Owner(Protocol):
    """The runtime that memory is made for."""

    config: Config
    where: str
    thread: Any
    attached: list[Attachment]

    def check(self) -> None:
        """Raise the error that has ended the runtime, if any."""

    def check_measurement(self, label: str, waited_s: float) -> None:
        """Raise if waiting for other ranks is hopeless."""

    def number_of(self, lane_backend: HostBackend) -> int:
        """The number of a lane's backend, the same on every rank."""


Call = Callable[[Callable[[Any], Work[Any]], str], Any]
"""Runs one collective on a channel's backend, with a label."""

Location = Callable[[Owner, HostBackend, Call], Memory]
"""The place of a lane's tensors: makes the lane's memory on this backend; a collective."""


def in_host_memory(owner: Owner, backend: HostBackend, call: Call) -> Memory:
    """The location of tensors in the host's memory."""
    return Memory(backend, owner.config.zero_copy_min_bytes)
