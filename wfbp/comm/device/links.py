"""The device backends of one runtime, and their launch orders."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from wfbp.comm.backend import HostBackend
from wfbp.comm.device.backend import DeviceBackend
from wfbp.comm.device.connection import connect, connect_by_nccl
from wfbp.comm.device.device import Device
from wfbp.comm.device.launch_order import LaunchOrder
from wfbp.comm.device.nccl import NcclBackend
from wfbp.comm.waiting import wait
from wfbp.config import Config

CONNECTING = "connecting devices"

_OPERATIONS = -1
"""Lane number of the device backend of named operations."""


class DeviceLinks:
    """Connects the devices of one runtime's ranks. Used under the progress lock. ``check`` receives
    a label and the seconds waited, and raises if waiting is hopeless."""

    def __init__(
        self,
        config: Config,
        where: str,
        check: Callable[[str, float], None],
        advance_lanes: Callable[[], None],
    ) -> None:
        self._config = config
        self._where = where
        self._check = partial(check, CONNECTING)
        self._advance_lanes = advance_lanes
        self._orders: dict[int, LaunchOrder] = {}  # by device
        self.backends: dict[tuple[int, int], DeviceBackend] = {}
        """By lane and device, in order of making, the same on every rank."""

    def connect_lane(self, number: int, device: Device, host: HostBackend) -> DeviceBackend:
        """Connect the devices of a lane's ranks; collective."""
        device.annotates, device.where = self._config.nvtx, self._where
        backend = connect(device, host, self._config.timeout_s, self._check)
        if isinstance(backend, NcclBackend):
            self._admit(backend, host)
        self.backends[number, id(device)] = backend
        return backend

    def launch_order(self, device: Device) -> LaunchOrder | None:
        """The order of this runtime's lanes on a device; None without NCCL there."""
        return self._orders.get(id(device))

    def connect_operations(
        self, device: Device, host: HostBackend
    ) -> tuple[DeviceBackend | None, int, str]:
        """Connect named operations on a device, with ``host`` for them alone; collective. Returns
        the backend or None, its lane's number, and the reason if it will always be None."""
        timeout_s = self._config.timeout_s
        order = self._orders.get(id(device))
        place = list(self._orders).index(id(device)) if order is not None else -1
        # Of a single lane, which is in no order yet, and whose program may be in mid-step.
        launched = [] if order is None or order.orders else list(order.launched)
        mine = json.dumps([place, launched]).encode()
        payloads = wait(host.all_gather_bytes(mine), timeout_s=timeout_s, check=self._check)
        ranks = [json.loads(payload) for payload in payloads]
        if any(of != place for of, _ in ranks):
            return None, -1, "ranks have tensors on the devices of different optimizers"
        if any(of != launched for _, of in ranks):
            return None, -1, ""
        device.annotates, device.where = self._config.nvtx, self._where
        backend, problem = connect_by_nccl(device, host, timeout_s, self._check)
        if backend is None:
            return None, -1, problem
        self.backends[_OPERATIONS, id(device)] = backend
        return backend, self._admit(backend, host), ""

    def close(self, lanes: set[int] | None = None) -> None:
        """Close the backends, or those of some lanes, and the orders; collective."""
        for (number, _), backend in self.backends.items():
            if lanes is None or number in lanes:
                backend.close()
        for order in self._orders.values():
            order.close()

    def give_up(self) -> None:
        """Stop waiting for other ranks."""
        for backend in self.backends.values():
            backend.give_up()

    def _admit(self, backend: NcclBackend, host: HostBackend) -> int:
        """Add this backend to its device's launch order."""
        key = id(backend.device)
        if key not in self._orders:
            self._orders[key] = LaunchOrder(host.rank, host.size, self._advance_lanes)
        return self._orders[key].admit(backend, host, self._config.timeout_s, self._check)
