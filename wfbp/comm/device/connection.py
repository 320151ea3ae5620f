"""How buffers of devices travel: by NCCL where every rank can, else staged through the host."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from wfbp.comm.backend import Backend
from wfbp.comm.device.backend import DeviceBackend
from wfbp.comm.device.device import Device
from wfbp.comm.device.nccl import NcclBackend
from wfbp.comm.device.nccl_library import REMEDY, describe, loaded_libraries
from wfbp.comm.device.staged import StagedBackend
from wfbp.comm.waiting import Check, wait
from wfbp.errors import BackendError, StallError

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable that allows several ranks on one GPU (2.30 and later)."""

HOST_ID = "NCCL_HOSTID"
"""NCCL's variable by which ranks can pretend to be on different hosts, for tests."""

log = logging.getLogger("wfbp")


def connect(
    device: Device,
    host: Backend,
    timeout_s: float | None = None,
    check: Check | None = None,
    parent: NcclBackend | None = None,
) -> DeviceBackend:
    """Connect the ranks' devices; collective and blocking.

    Args:
        device: this rank's.
        host: over all ranks; it is duplicated.
        timeout_s: how long that may take.
        check: called while it does; what it raises ends it.
        parent: made before for the same ranks and devices; its resources are shared where nothing
            of it is under way on any rank.

    Returns:
        A backend of the same kind on every rank. Where it is staged, one rank per host logs why,
        once for a device and reason.
    """
    backend, reason = connect_by_nccl(device, host, timeout_s, check, parent)
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


def connect_by_nccl(
    device: Device,
    host: Backend,
    timeout_s: float | None = None,
    check: Check | None = None,
    parent: NcclBackend | None = None,
) -> tuple[NcclBackend | None, str]:
    """A backend by NCCL on every rank, or on none, and why; arguments as of :func:`connect`."""
    library: Any = None
    problem = ""
    try:
        library = device.nccl()
    except ImportError as error:
        problem = str(error)
    mine = {
        "device": device.identity,
        "shares": SHARING in os.environ or HOST_ID in os.environ,
        "problem": problem,
        "splits": parent is not None and parent.splits(),
    }
    payloads = wait(
        host.all_gather_bytes(json.dumps(mine).encode()), timeout_s=timeout_s, check=check
    )
    ranks = [json.loads(each) for each in payloads]
    reason = nccl_obstacle(ranks)
    if not reason:
        shared = parent if all(rank["splits"] for rank in ranks) else None
        backend, reason = _join(device, host, library, timeout_s, check, shared)
        if backend is not None:
            _tell_library(library.get_version(), host)
            return backend, ""
    return None, reason


def _tell_library(version: int, host: Backend) -> None:
    """Log which NCCL that is, once per host."""
    text, problem = describe(version, loaded_libraries())
    if host.local_rank == 0:
        log.info("rank %d of %d: %s", host.rank, host.size, text)
        if problem:
            log.warning("rank %d of %d: %s; %s", host.rank, host.size, problem, REMEDY)


def _join(
    device: Device,
    host: Backend,
    library: Any,
    timeout_s: float | None,
    check: Check | None,
    parent: NcclBackend | None,
) -> tuple[NcclBackend | None, str]:
    """A backend by NCCL where all ranks could join, else why one of them could not."""
    backend, mine = None, ("", "")
    try:
        backend = NcclBackend(device, host.duplicate(), library, timeout_s, check, parent)
    except BackendError as error:
        mine = "failed", str(error)
    except StallError as error:  # because another rank did
        mine = "stalled", str(error)
    payloads = wait(host.all_gather_bytes(json.dumps(mine).encode()), check=check)
    _, problem = min((each for each in map(json.loads, payloads) if each[0]), default=("", ""))
    if problem and backend is not None:
        backend.discard()
        backend = None
    return backend, problem


def nccl_obstacle(ranks: list[dict[str, Any]]) -> str:
    """Why NCCL cannot serve these ranks; empty where it can.

    >>> nccl_obstacle([{"device": "a", "shares": False, "problem": ""}] * 2)
    'ranks 0 and 1 share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1 lets NCCL 2.30 try)'
    """
    for rank, status in enumerate(ranks):
        if status["problem"]:
            return f"rank {rank}: {status['problem']}"
    first: dict[str, int] = {}
    for rank, status in enumerate(ranks):
        other = first.setdefault(status["device"], rank)
        if other != rank and not status["shares"]:
            return f"ranks {other} and {rank} share a GPU ({SHARING}=1 lets NCCL 2.30 try)"
    return ""
