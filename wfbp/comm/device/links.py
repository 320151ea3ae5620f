"""Connects the devices of one runtime's ranks: by NCCL if every rank can, else through the host."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from functools import partial
from typing import Any

from wfbp.comm.backend import Finished, HostBackend
from wfbp.comm.device.device import Device
from wfbp.comm.device.device_backend import DeviceBackend
from wfbp.comm.device.device_memory import DeviceMemory
from wfbp.comm.device.launch_order import LaunchOrder
from wfbp.comm.device.nccl import NcclBackend
from wfbp.comm.device.staged import StagedBackend
from wfbp.comm.locations import Call, Owner
from wfbp.comm.waiting import Check, exchange_values
from wfbp.errors import BackendError, StallError

CONNECTING = "connecting devices"

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable that allows several ranks on one GPU."""

SHARING_VERSION = 23000
"""The first NCCL that has it, as ``ncclGetVersion`` tells versions."""

log = logging.getLogger("wfbp")


class DeviceLinks:
    """The device backends of one runtime, and their launch orders. Used under the progress lock."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._orders: dict[int, LaunchOrder] = {}  # by device
        self.backends: dict[tuple[int, int], DeviceBackend] = {}
        """By lane and device, in order of making, the same on every rank."""

    def connect_lane(self, number: int, device: Device, host: HostBackend) -> DeviceBackend:
        """Connect the devices of a lane's ranks; collective."""
        owner = self._owner
        device.where, timeout_s = owner.where, owner.config.timeout_s
        check = partial(owner.check_measurement, CONNECTING)
        backend = connect(device, host, timeout_s, check)
        if isinstance(backend, NcclBackend):
            order = self._orders.get(id(device)) or self._make_order(id(device), host.rank)
            backend.lane = order.admit(host, timeout_s, check)
            backend.order = order
        self.backends[number, id(device)] = backend
        return backend

    def _make_order(self, device: int, rank: int) -> LaunchOrder:
        members, loop = self._owner.members, self._owner.thread.loop
        kind = f"launches {members.number}.{len(self._orders)}"  # the same on every rank
        order = self._orders[device] = LaunchOrder(
            rank, lambda turns: loop.send_notice(kind, turns, members.ranks), loop.advance_lanes
        )
        loop.handle_notices(kind, lambda _, turns, __: order.hear(turns))
        return order

    def close(self, lanes: Collection[int] | None = None) -> None:
        """Close what belongs to these lanes, or everything; collective."""
        for (number, _), backend in self.backends.items():
            if lanes is None or number in lanes:
                backend.close()

    def give_up(self) -> None:
        """Stop waiting for other ranks."""
        for backend in self.backends.values():
            backend.give_up()


class OnDevice:
    """The place of tensors on a device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, owner: Owner, backend: HostBackend, call: Call) -> DeviceMemory:
        """The memory of a lane there; collective."""
        number, device = owner.number_of(backend), self.device
        links = next((each for each in owner.attached if isinstance(each, DeviceLinks)), None)
        if links is None:
            owner.attached.append(links := DeviceLinks(owner))
        connected = links.backends.get((number, id(device)))
        if connected is None:
            connect_lane = partial(links.connect_lane, number, device, backend)
            connected = call(lambda _: Finished(connect_lane()), CONNECTING)
        return DeviceMemory(connected, backend, owner.check)


def connect(
    device: Device, host: HostBackend, timeout_s: float | None = None, check: Check | None = None
) -> DeviceBackend:
    """Connect devices by the same kind of backend on all ranks; collective and blocking. Duplicates
    ``host``. If the backend is staged, one rank per host logs the reason once."""
    backend, reason = _connect_by_nccl(device, host, timeout_s, check)
    if backend is not None:
        return backend
    if host.local_rank == 0 and device.logged_reason != reason:  # else for another optimizer
        device.logged_reason = reason
        log.warning(
            "gradients on %s travel through the host's memory, which is slower than NCCL: %s",
            device.name,
            reason,
        )
    return StagedBackend(device, host.duplicate())


def _connect_by_nccl(
    device: Device, host: HostBackend, timeout_s: float | None, check: Check | None
) -> tuple[NcclBackend | None, str]:
    """An NCCL backend on every rank; or None on every rank, and the reason."""
    library, problem = None, ""
    try:
        library = device.nccl()
    except ImportError as error:
        problem = str(error)
    mine: Any = {
        "device": device.identity,
        "host": os.environ.get("NCCL_HOSTID"),  # tests pretend to have several hosts
        "shares": library is not None and _lets_ranks_share(library),
        "problem": problem,
    }
    if reason := why_no_nccl(exchange_values(host, mine, timeout_s=timeout_s, check=check)):
        return None, reason
    backend, mine = None, ("", "")
    try:
        backend = NcclBackend(device, host.duplicate(), library, timeout_s, check)
    except BackendError as error:
        mine = "failed", str(error)
    except StallError as error:  # because another rank failed
        mine = "stalled", str(error)
    outcomes = exchange_values(host, mine, check=check)
    _, problem = min((each for each in outcomes if each[0]), default=("", ""))
    if backend is not None and problem:
        backend.give_up()
        backend = None
    return backend, problem


def why_no_nccl(ranks: list[dict[str, Any]]) -> str:
    """The reason why NCCL cannot serve these ranks; empty if it can."""
    for rank, status in enumerate(ranks):
        if status["problem"]:
            return f"rank {rank}: {status['problem']}"
    if all(status["shares"] for status in ranks):
        return ""
    # NCCL takes ranks with different host ids for ranks on different hosts.
    first: dict[tuple[str, str | None], int] = {}
    for rank, status in enumerate(ranks):
        other = first.setdefault((status["device"], status["host"]), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} share a GPU ({SHARING}=1 on every rank lets NCCL 2.30 "
                "and newer try)"
            )
    return ""


def _lets_ranks_share(library: Any) -> bool:
    """Whether NCCL accepts several ranks of one communicator on a GPU; it reads a C integer."""
    try:
        allowed = bool(int(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0"), 0))
    except ValueError:
        allowed = False
    return allowed and bool(library.get_version() >= SHARING_VERSION)
