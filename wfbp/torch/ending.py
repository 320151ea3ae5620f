"""The end of distributed optimizers: their runtime's, or their process set's.

``shutdown()`` brings parameters up to date, as far as ranks can still communicate, and leaves
``p.grad`` in memory that stays. A process set that is removed leaves whole parameters and state.
"""

from __future__ import annotations

import logging

from wfbp.errors import WfbpError
from wfbp.runtime import process
from wfbp.runtime.runtime import Runtime
from wfbp.torch import gradient_sync, pending

log = logging.getLogger("wfbp")


def in_use(runtime: Runtime | None = None) -> list[gradient_sync.OptimizerSync]:
    """Distributed optimizers that still exchange gradients, in the order they were made."""
    syncs = [sync for sync in set(gradient_sync.owners.values()) if runtime in (None, sync.runtime)]
    return sorted((s for s in syncs if not s.has_left), key=lambda sync: sync.made)


def _finish(runtime: Runtime) -> None:
    """Before a runtime ends, bring parameters up to date, which is impossible afterwards."""
    if runtime is not process.current("shutdown()"):
        _leave_process_set(runtime)
        return
    for held in {owner for owner, _ in list(pending.under_way.values())}:
        is_known = runtime.thread.error is not None  # to the program, by any call since
        try:
            held.wait_all()
        except Exception as error:
            if not is_known or not isinstance(error, WfbpError):
                log.error("parameters are not up to date at the end: %s", error)
        held.release()
    for sync in set(gradient_sync.owners.values()):
        sync.leave_buffers()
        sync.update.let_go()


def _leave_process_set(runtime: Runtime) -> None:
    """Let its optimizers go, with whole parameters and state; collective among its ranks."""
    mine = {sync.number: sync for sync in in_use(runtime)}
    numbers = runtime.channel.exchange_values(list(mine), "removing a process set")
    # One that is forgotten may still be there on a rank whose interpreter has not collected it.
    common = set.intersection(*map(set, numbers))
    for number, sync in mine.items():
        if number in common:
            sync.prepare_whole()
        sync.leave()


process.before_end(_finish)
