"""The process group of ``torch.distributed``: its methods, as PyTorch calls them.

The methods of collectives are made from the table ``operations.METHODS``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import BackendConfig, _world

from wfbp.comm.backend import Finished
from wfbp.comm.mpi.group_exchange import GroupExchange
from wfbp.core.ranks import name_ranks
from wfbp.errors import StallError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.compiling import uncompiled_methods
from wfbp.torch.distributed.group_collectives import (
    METHODS,
    GroupCollective,
    each_call,
    parse_options,
)
from wfbp.torch.distributed.group_lane import GroupLane
from wfbp.torch.distributed.group_messages import GroupMessage
from wfbp.torch.distributed.work import GroupWork


class ProcessGroup(dist.ProcessGroup):
    """Collectives and messages of CPU tensors; tensors on other devices go to a group of the
    backend that the program named for these. Any thread may call the methods."""

    def __init__(
        self,
        runtime: Runtime,
        exchange: GroupExchange,
        key: str,
        timeout: timedelta,
        store: c10d.Store,
        close: Callable[[ProcessGroup], None],
    ) -> None:
        super().__init__(exchange.rank, exchange.size)  # type: ignore[call-arg]
        self.exchange, self.key = exchange, key
        self._runtime, self._timeout, self._close = runtime, timeout, close
        self._store = store  # with keys of this group alone, which all of its ranks share
        check_all = c10d.get_debug_level() == c10d.DebugLevel.DETAIL
        self.lane = GroupLane(runtime, exchange, key, check_all)
        self._coalesced: GroupWork | None = None
        self._others: dict[str, dist.ProcessGroup] = {}
        self._num_monitored = 0

    # What PyTorch asks of a group.

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802
        return "wfbp"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def get_group_store(self) -> c10d.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        if self not in _world.pg_backend_config:
            # It is being made. PyTorch 2.15 attaches its flight recorder to groups with devices,
            # which fails for groups without a backend in C++.
            return []
        return [torch.device(kind) for kind in self._backends()]

    def _backends(self) -> dict[str, str]:
        """The backend of each device, as the program named them."""
        named = _world.pg_backend_config.get(self, "wfbp")
        return {**BackendConfig(dist.Backend(named)).get_device_backend_map(), "cpu": "wfbp"}

    def _get_backend(self, device: Any) -> Any:
        """The group that serves tensors of a device; made at its first use by all ranks."""
        device = torch.device(device)
        if device.type == "cpu":
            return self
        if device.type not in self._others:
            backend = self._backends().get(device.type)
            if backend is None:
                raise ValueError(
                    f"a tensor is on {device}, but the backend wfbp moves tensors of the CPU; use "
                    'init_process_group("cpu:wfbp,cuda:nccl") for both'
                )
            self._others[device.type] = dist.new_group(
                dist.get_process_group_ranks(self),
                timeout=self._timeout,
                backend=backend,
                use_local_synchronization=True,
            )
        return self._others[device.type]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def split(
        self,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> dist.ProcessGroup | None:
        """The group of the ranks that contain this one, by their numbers in this group."""
        if not split_ranks or not all(
            ranks and len({*ranks}) == len(ranks) for ranks in split_ranks
        ):
            raise ValueError(
                f"split_ranks is {split_ranks}; expected non-empty lists without duplicates"
            )
        mine = next((ranks for ranks in split_ranks if self.rank() in ranks), None)
        if mine is None:
            return None
        made: dist.ProcessGroup = dist.new_group(
            [dist.get_global_rank(self, rank) for rank in sorted(mine)],
            timeout=timeout or self._timeout,
            group_desc=group_desc,
            use_local_synchronization=True,
        )
        return made

    def _set_sequence_number_for_group(self) -> None:
        pass  # operations are numbered anyway

    def shutdown(self) -> None:
        if self._runtime.thread.error is None:
            self._runtime.thread.call(
                lambda: Finished(self._close(self)), "destroying a process group", self
            )

    abort = shutdown

    # Collectives; the table has their names.

    def _collective(self, name: str, given: Sequence[Any], named: dict[str, Any]) -> Any:
        """Begin what a call of a collective asks for."""
        describe, kind_of_options, kinds = METHODS[name]
        arguments = given[: len(kinds)]
        options = parse_options(kind_of_options, given[len(kinds) :], named)
        group = self._get_backend(getattr(options, "device", None) or _device(arguments))
        if group is not self:
            return getattr(group, name)(*arguments, options)
        timeout = options.timeout if options.timeout > timedelta(0) else self._timeout
        timeout_s, thread = timeout.total_seconds(), self._runtime.thread
        items = [each_call(kind, each) for kind, each in zip(kinds, arguments, strict=True)]
        calls = []
        for tensors in zip(*items, strict=True) if items else [()]:
            call = GroupCollective(describe.__name__, self.exchange, options, thread, timeout_s)
            describe(call, *tensors)
            if tensors:  # the first ones are those of results
                call.results = [tensors[0]] if isinstance(tensors[0], torch.Tensor) else tensors[0]
            calls.append(call)
        return self._submit(calls, options.asyncOp)

    def begin(self, name: str, describe: Callable[[GroupCollective], None]) -> GroupWork:
        """Begin a collective that PyTorch does not know."""
        timeout_s, thread = self._timeout.total_seconds(), self._runtime.thread
        call = GroupCollective(name, self.exchange, None, thread, timeout_s)
        describe(call)
        return self._submit([call], wakes=True)

    def _submit(self, works: Sequence[GroupCollective | GroupMessage], wakes: bool) -> GroupWork:
        """Begin operations, and return what completes with them."""
        self._runtime.check()
        if self.lane.error is not None:
            raise self.lane.error
        thread = self._runtime.thread
        work: GroupWork
        if len(works) == 1:
            work = works[0]
        else:
            work = GroupWork(thread, self._timeout.total_seconds())
            for part in works:
                work.include(part)
        if self._coalesced is not None:
            self._coalesced.include(work)
        if len(works) != 1:  # after it was included, for there may be none
            work.complete()
        # If it does not wake the thread, the caller waits, and will do it.
        thread.post(partial(self.lane.submit, works), wakes)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if (group := self._get_backend(device)) is not self:
            group._start_coalescing(device)
        else:
            self._coalesced = GroupWork(self._runtime.thread, self._timeout.total_seconds())

    def _end_coalescing(self, device: torch.device) -> Any:
        if (group := self._get_backend(device)) is not self:
            return group._end_coalescing(device)
        work, self._coalesced = self._coalesced, None
        assert work is not None
        work.complete()
        return work

    def abandon_coalescing(self) -> None:
        """Begin no whole of the operations since the start; those that have begun go on."""
        self._coalesced = None
        for group in self._others.values():
            if isinstance(group, ProcessGroup):
                group.abandon_coalescing()

    def allgather_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """Gather several tensors; ``outputs`` has a list for each rank."""
        return self.allgather(
            [list(each) for each in zip(*outputs, strict=False)], inputs, *options
        )

    # Messages.

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        return self._message("send", tensors[0], peer, tag)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        return self._message("recv", tensors[0], peer, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Any:
        return self._message("recv_anysource", tensors[0], None, tag)

    def _message(self, kind: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Any:
        """Begin to send to a rank, or to receive from it (None: from any)."""
        if (group := self._get_backend(tensor.device)) is not self:
            place = () if peer is None else (peer,)
            return getattr(group, kind)([tensor], *place, tag)
        exchange, timeout_s = self.exchange, self._timeout.total_seconds()
        if peer is not None and not 0 <= peer < exchange.size:
            raise ValueError(f"{kind}: rank {peer} of a group of {exchange.size}")
        if not 0 <= tag <= exchange.largest_tag:
            raise ValueError(f"{kind}: tag {tag}; expected 0 to {exchange.largest_tag}")
        message = GroupMessage(
            kind, tensor, peer, tag, exchange, self._runtime, timeout_s, self.key
        )
        return self._submit([message], wakes=True)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier after which rank 0 names the ranks that did not come in time."""
        if isinstance(timeout, float | int):
            timeout = timedelta(seconds=timeout)
        limit_s = (self._timeout if timeout is None else timeout).total_seconds()
        rank, limit_ms, end_s = self.rank(), int(limit_s * 1000), time.monotonic() + limit_s
        if limit_s <= 0:
            raise StallError(f"Rank {rank} timed out in monitoredBarrier after {limit_ms} ms")
        self._num_monitored += 1
        barrier = f"monitored barrier {self._num_monitored}"
        if rank:
            self._store.set(f"{barrier}, rank {rank}", "")
        missing: list[int] = []
        for peer in [0] if rank else range(1, self.size()):
            left_s = max(end_s - time.monotonic(), 0.001)
            try:
                self._store.wait([f"{barrier}, rank {peer}"], timedelta(seconds=left_s))
            except RuntimeError:
                missing.append(peer)
                if not wait_all_ranks:
                    break
        if missing and rank:
            raise StallError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0, for {limit_ms} ms; rank 0 names the ranks "
                "that did not call it"
            )
        if missing:
            raise StallError(
                f"{name_ranks(missing).capitalize()} failed to pass monitoredBarrier in {limit_ms} "
                "ms; every rank of the group must call it"
            )
        if not rank:
            self._store.set(f"{barrier}, rank 0", "")


def _method(name: str) -> Callable[..., Any]:
    def method(self: ProcessGroup, *given: Any, **named: Any) -> Any:
        return self._collective(name, given, named)

    method.__name__ = name
    return method


for _name in METHODS:
    setattr(ProcessGroup, _name, _method(_name))
uncompiled_methods(ProcessGroup)


def _device(arguments: Sequence[Any]) -> torch.device:
    """The device of the first tensor."""
    for argument in arguments:
        first = argument
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            return first.device
    return torch.device("cpu")
