"""Rendezvous over MPI: rank, number of ranks, and a store, without address, port or variables."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import _env_rendezvous_handler

from wfbp.comm.mpi.start_notice import meets_by_mpi
from wfbp.errors import BackendError
from wfbp.launcher.hosts import interfaces
from wfbp.runtime import process

Found = Iterator[tuple[Store, int, int]]

_CONNECT_S = 2.0
_LOOPBACK = "127.0.0.1"


def by_environment(url: str, **options: Any) -> Found:
    """Serve ``env://``: over MPI if only an MPI launcher tells the rank."""
    handle = over_mpi if meets_by_mpi(url) else _env_rendezvous_handler
    return handle(url, **options)


def over_mpi(_: str, timeout: timedelta = timedelta(minutes=5), **__: Any) -> Found:
    """Serve ``wfbp://``."""
    process.start()
    runtime = process.current("init_process_group()")
    store, place = None, ""
    if runtime.rank == 0:
        # A fresh server, which all of this job's later groups share.
        store = TCPStore(_LOOPBACK, 0, None, True, timeout, wait_for_workers=False)
        place = json.dumps([store.port, list(interfaces())])
    port, addresses = json.loads(
        runtime.channel.exchange(place.encode(), "init_process_group()")[0]
    )
    if store is None:
        on_one_host = runtime.local_size == runtime.size
        host = _LOOPBACK if on_one_host else _reachable(addresses, port)
        store = TCPStore(host, port, None, False, timeout)
    yield store, runtime.rank, runtime.size
    raise BackendError("a rendezvous over MPI happens once; call init_process_group() again")


def _reachable(addresses: list[str], port: int) -> str:
    """The first of rank 0's addresses that accepts connections."""
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_S).close()
        except OSError:
            continue
        return address
    raise BackendError(
        f"rank 0 cannot be reached at port {port} of {', '.join(addresses) or 'any address'}, "
        "which torch.distributed needs for its store; open the ports between the hosts, or set "
        "MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE"
    )
