"""How the ranks of process groups meet: a rendezvous over MPI, and the making of each group."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
import uuid
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import _env_rendezvous_handler

from wfbp.comm.mpi.group_exchange import GroupExchange
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.core.ranks import name_ranks
from wfbp.errors import BackendError, StallError, WfbpError
from wfbp.launcher.hosts import interfaces
from wfbp.launcher.rank import contradiction, meets_by_mpi
from wfbp.runtime import launched, process
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.group_lane import NOTICE
from wfbp.torch.distributed.process_group import ProcessGroup
from wfbp.torch.distributed.work import future_waits

_NUM_TAGS = 1 << 15
_LOOK_S = 1e-3

_CONNECT_S, _ACCEPT_S = 2.0, 0.02
_STORE_S = 300.0
"""How long a store may take to answer, whatever the timeout of the group's operations."""
_LOOPBACK = "127.0.0.1"

Found = Iterator[tuple[Store, int, int]]

_groups: Groups | None = None

_served: list[Store] = []
"""Rank 0's last store, which other ranks may still read after rank 0 has destroyed its groups."""


def by_environment(url: str, **options: Any) -> Found:
    """Serve ``env://``: over MPI if only an MPI launcher tells the rank."""
    launched.rendezvous_used = True
    if not meets_by_mpi(url):
        found: Found = _env_rendezvous_handler(url, **options)
        return found
    if problem := contradiction(os.environ):
        raise ValueError(problem)
    return over_mpi(url, **options)


def over_mpi(url: str, timeout: timedelta = timedelta(minutes=5), **__: Any) -> Found:
    """Serve ``wfbp://``; ranks have MPI's numbers, unless the program gives others."""
    process.start()
    runtime = process.current("init_process_group()")
    asked = {key: value for key, value in parse_qsl(urlsplit(url).query) if value != "-1"}
    # A fresh server, which all of this job's later groups share.
    listener = socket.create_server(("", 0), backlog=runtime.size) if runtime.rank == 0 else None
    own_place: Any = None
    if listener is not None:
        on_one_host = runtime.local_size == runtime.size
        addresses = [_LOOPBACK] if on_one_host else _addresses()
        own_place = listener.getsockname()[1], addresses, uuid.uuid4().hex
    exchange = partial(runtime.channel.exchange_values, label="init_process_group()")
    port, addresses, token = exchange(own_place)[0]
    with _telling(listener, token):
        reached = exchange(_reachable(addresses, port, token) if runtime.rank else _LOOPBACK)
    exchange(None)  # the listener is the store's from now on
    if not all(reached):
        missing = [rank for rank, address in enumerate(reached) if not address]
        raise BackendError(
            f"{runtime.where}: rank 0 cannot be reached from {name_ranks(missing)} at port {port} "
            f"of {', '.join(addresses) or 'any address'}, which torch.distributed needs for its "
            "store; open the ports between the hosts, or set MASTER_ADDR, MASTER_PORT, RANK and "
            "WORLD_SIZE"
        )
    store = TCPStore(
        reached[runtime.rank],
        port,
        None,
        listener is not None,
        max(timeout, timedelta(seconds=_STORE_S)),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    if runtime.rank == 0:
        _served[:] = [store]
        if _served.clear not in runtime.at_end:
            runtime.at_end.append(_served.clear)
    rank, size = asked.get("rank", runtime.rank), asked.get("world_size", runtime.size)
    yield store, int(rank), int(size)
    raise BackendError("a rendezvous over MPI happens once; call init_process_group() again")


def _addresses() -> list[str]:
    """This host's addresses for other hosts, on which a loopback address is another server's."""
    return [each for each in interfaces() if not ipaddress.ip_address(each).is_loopback]


@contextmanager
def _telling(listener: socket.socket | None, token: str) -> Iterator[None]:
    """Tell everyone who connects the token, meanwhile."""
    if listener is None:
        yield
        return
    listener.settimeout(_ACCEPT_S)
    over = threading.Event()

    def tell() -> None:
        while not over.is_set():
            with suppress(OSError), listener.accept()[0] as peer:
                peer.sendall(token.encode())

    thread = threading.Thread(target=tell, name="wfbp-token", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        listener.setblocking(True)


def _reachable(addresses: Sequence[str], port: int, token: str) -> str:
    """The first of rank 0's addresses where a server knows the token; empty if none does."""
    for address in addresses:
        with suppress(OSError), socket.create_connection((address, port), _CONNECT_S) as peer:
            if peer.makefile("rb").read(len(token)) == token.encode():
                return address
    return ""


def create(options: Any, _: object = None) -> ProcessGroup:
    """Make a process group for ``init_process_group`` and ``new_group``."""
    global _groups
    process.start()
    runtime = process.current("init_process_group()")
    if _groups is None or _groups.runtime is not runtime:
        _groups = Groups(runtime)
    return _groups.make(options)


class Groups:
    """The process groups of one runtime.

    Any training thread may call :meth:`make`; the rest runs under the progress lock.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        backend = runtime.backend
        if not isinstance(backend, MpiBackend):
            raise BackendError(
                f"{runtime.where}: process groups need MPI, but the runtime was started with "
                f"{type(backend).__name__}; call wfbp.init() without a backend"
            )
        self._backend, self._loop = backend, runtime.thread.loop
        # The runtime's number of each rank of PyTorch.
        self._numbers: Sequence[int] = range(runtime.size)
        self._times_numbered = 0
        self._prefix = ""
        """Of keys in stores: a program may pass one store to several runtimes."""
        self._made: Counter[tuple[int, ...]] = Counter()
        self._open: dict[str, ProcessGroup] = {}
        # Communicators of groups that were destroyed, by their ranks.
        self._idle: defaultdict[tuple[int, ...], dict[str, GroupExchange]] = defaultdict(dict)
        self._loop.handle_notices(NOTICE, self._hear)
        self._loop.is_awaited = future_waits.is_blocked

    def make(self, options: Any) -> ProcessGroup:
        """Make the group that PyTorch describes; one without ranks has all of them."""
        members = list(options.global_ranks_in_group)
        if not members:
            self._number_ranks(options.group_rank, options.group_size)
            members = list(range(options.group_size))
        ranks = tuple(self._numbers[member] for member in members)
        self._made[ranks] += 1
        who = "all ranks" if ranks == tuple(self._numbers) else f"ranks {list(ranks)}"
        key = f"process group {self._times_numbered}.{self._made[ranks]} of {who}"
        # Not by PyTorch's name of the group: it counts this rank's other groups.
        shared = options.store._underlying_non_prefix_store
        store = PrefixStore(f"{self._prefix}/{key}/", shared)
        # All ranks have just met for the first group, so none of them is late.
        limit_s = options.timeout.total_seconds() if options.global_ranks_in_group else _STORE_S
        patience, own = timedelta(seconds=_STORE_S), shared.timeout
        shared.set_timeout(max(own, patience))
        try:
            exchange = self._exchange(key, ranks, limit_s, store)
        finally:
            shared.set_timeout(own)
        group = ProcessGroup(self.runtime, exchange, key, options.timeout, store, self._close)
        self._open[key] = group
        return group

    def _number_ranks(self, rank: int, size: int) -> None:
        """Learn which rank of the runtime each rank of PyTorch is; collective."""
        runtime = self.runtime
        told = [rank, size, uuid.uuid4().hex]
        ranks = runtime.channel.exchange_values(told, "init_process_group()")
        numbers, sizes, prefixes = zip(*ranks, strict=True)
        if {*sizes} != {runtime.size}:  # on every rank: others would wait for this one
            given = sizes[0] if len({*sizes}) == 1 else list(sizes)
            raise ValueError(
                f"{runtime.where}: expected a process group of the {runtime.size} ranks of MPI, "
                f"found {given}. Start the program by mpirun -n {max(sizes)} python PROGRAM, "
                "without torchrun; or, for some of the ranks, call wfbp.init(comm=[...]) before"
            )
        if sorted(numbers) != list(range(size)):
            raise ValueError(
                f"{runtime.where}: the ranks given to init_process_group are {list(numbers)}; "
                f"expected each of 0 to {size - 1} once"
            )
        self._numbers = [numbers.index(number) for number in range(size)]
        self._prefix = prefixes[0]
        self._times_numbered += 1
        self._made.clear()

    def _exchange(
        self, key: str, ranks: tuple[int, ...], timeout_s: float, store: Store
    ) -> GroupExchange:
        """The communicators of a group, once all of its ranks want it: new ones, or those of a
        group that all of them have destroyed, if no message to it is under way."""
        idle = {key: (old.position, old.undelivered) for key, old in self._idle[ranks].items()}
        names, end_s = [str(rank) for rank in ranks], time.monotonic() + timeout_s
        store.set(str(self.runtime.rank), json.dumps(idle))
        while not store.check(names):
            self.runtime.check()
            missing = [rank for rank in ranks if not store.check([str(rank)])]
            has_left = [rank for rank in missing if rank in self._loop.watch.left]
            if has_left or time.monotonic() > end_s:
                break
            time.sleep(_LOOK_S)
        # One decision for all ranks: a rank that went on alone would wait in MPI without a limit.
        outcome = "made" if store.check(names) else "given up"
        if store.compare_set("outcome", "", outcome) != b"made":
            late = [rank for rank in ranks if not store.check([str(rank)])]
            why = f"rank {', '.join(map(str, late))} did not" if late else "this rank did later"
            raise StallError(
                f"{self.runtime.where}: {key} was not made, because {why} call new_group within "
                f"{timeout_s:g} s of the others. All of its ranks must create a group, in the same "
                "order relative to other groups of these ranks; or raise its timeout"
            )
        offers = [json.loads(store.get(name)) for name in names]
        for old, (position, _) in sorted(offers[0].items()):
            states = [offer.get(old, (None, 0)) for offer in offers]
            # Of a message that was never received, the next group must not receive it.
            if all(found == position for found, _ in states) and sum(n for _, n in states) == 0:
                return self._idle[ranks].pop(old)
        # Short, since all ranks are here; the communication thread is not held up.
        return self._backend.among(ranks, zlib.crc32(key.encode()) % _NUM_TAGS, key)

    # Under the progress lock.

    def _close(self, group: ProcessGroup) -> None:
        """End a group on this rank."""
        lane = group.lane
        if self._open.pop(group.key, None) is not None and lane.error is None and not lane.busy:
            self._idle[group.exchange.ranks][group.key] = group.exchange
        where = f"{self.runtime.where}: {group.key}"
        lane.fail(WfbpError(f"{where}: the process group was destroyed or aborted; make a new one"))

    def _hear(self, _: int, notice: dict[str, Any], __: bytes) -> None:
        if (group := self._open.get(notice["group"])) is not None:
            group.lane.hear(notice)
