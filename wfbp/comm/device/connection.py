"""Connects devices: by NCCL if every rank can, else staged through the host."""

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
"""NCCL's variable that allows several ranks on one GPU (2.30 and later)."""

HOST_ID = "NCCL_HOSTID"
"""NCCL's variable with which ranks can pretend to be on different hosts, for tests."""

log = logging.getLogger("wfbp")


def connect(
    device: Device, host: Backend, timeout_s: float | None = None, check: Check | None = None
) -> DeviceBackend:
    """Connect devices by the same kind of backend on all ranks; collective and blocking. Duplicates
    ``host``. If the backend is staged, one rank per host logs the reason once."""
    backend, reason = connect_by_nccl(device, host, timeout_s, check)
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
    device: Device, host: Backend, timeout_s: float | None = None, check: Check | None = None
) -> tuple[NcclBackend | None, str]:
    """An NCCL backend on every rank; or None on every rank, and the reason."""
    library, problem = None, ""
    try:
        library = device.nccl()
    except ImportError as error:
        problem = str(error)
    mine: Any = {
        "device": device.identity,
        "shares": SHARING in os.environ or HOST_ID in os.environ,
        "problem": problem,
    }
    payloads = wait(
        host.all_gather_bytes(json.dumps(mine).encode()), timeout_s=timeout_s, check=check
    )
    reason = why_no_nccl([json.loads(payload) for payload in payloads])
    if reason:
        return None, reason
    backend, mine = None, ("", "")
    try:
        backend = NcclBackend(device, host.duplicate(), library, timeout_s, check)
    except BackendError as error:
        mine = "failed", str(error)
    except StallError as error:  # because another rank failed
        mine = "stalled", str(error)
    payloads = wait(host.all_gather_bytes(json.dumps(mine).encode()), check=check)
    _, problem = min((each for each in map(json.loads, payloads) if each[0]), default=("", ""))
    if backend is None or problem:
        if backend is not None:
            backend.give_up()
        return None, problem
    text, doubt = describe(backend.version, loaded_libraries())
    if host.local_rank == 0:
        log.info("rank %d of %d: %s", host.rank, host.size, text)
        if doubt:
            log.warning("rank %d of %d: %s; %s", host.rank, host.size, doubt, REMEDY)
    return backend, ""


def why_no_nccl(ranks: list[dict[str, Any]]) -> str:
    """The reason why NCCL cannot serve these ranks; empty if it can."""
    for rank, status in enumerate(ranks):
        if status["problem"]:
            return f"rank {rank}: {status['problem']}"
    first: dict[str, int] = {}
    for rank, status in enumerate(ranks):
        other = first.setdefault(status["device"], rank)
        if other != rank and not status["shares"]:
            return f"ranks {other} and {rank} share a GPU ({SHARING}=1 lets NCCL 2.30 try)"
    return ""
