"""The place of a lane's tensors: the host, or a device (``comm.device.links``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from wfbp.comm.backend import HostBackend, Work
from wfbp.comm.memory import Memory
from wfbp.config import Config

if TYPE_CHECKING:
    from wfbp.comm.device.links import DeviceLinks


T = TypeVar("T")


class Owner(Protocol):
    """The runtime that memory is made for."""

    config: Config
    where: str
    thread: Any
    members: Any
    attached: list[DeviceLinks]

    def check(self) -> None:
        """Raise the error that has ended the runtime, if any."""

    def check_measurement(self, label: str, waited_s: float) -> None:
        """Raise if waiting for other ranks is hopeless."""

    def number_of(self, lane_backend: HostBackend) -> int:
        """The number of a lane's backend, the same on every rank."""


class Call(Protocol):
    """Runs one collective on a channel's backend, with a label."""

    def __call__(self, start: Callable[[HostBackend], Work[T]], label: str, /) -> T: ...


Location = Callable[[Owner, HostBackend, Call], Memory]
"""The place of a lane's tensors: makes the lane's memory on this backend; a collective."""


def in_host_memory(owner: Owner, backend: HostBackend, call: Call) -> Memory:
    """The location of tensors in the host's memory."""
    return Memory(backend, owner.config.zero_copy_min_bytes)
