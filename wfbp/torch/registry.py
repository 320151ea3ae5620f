"""Which optimizers exchange gradients, and what they do before their runtime ends."""

from __future__ import annotations

import json
import logging
import weakref
from itertools import count
from typing import TYPE_CHECKING

from wfbp.errors import WfbpError
from wfbp.runtime import process
from wfbp.runtime.runtime import Runtime
from wfbp.torch import pending

if TYPE_CHECKING:
    from wfbp.torch.gradient_sync import OptimizerSync

log = logging.getLogger("wfbp")

owners: weakref.WeakValueDictionary[int, OptimizerSync] = weakref.WeakValueDictionary()
"""By a parameter's id, the object that exchanges its gradients, and keeps it alive.

(An attribute of the parameter would be pickled with it.)
"""
_in_use: weakref.WeakValueDictionary[int, OptimizerSync] = weakref.WeakValueDictionary()
"""All that have not let their parameters go, in the order of making."""
_made = count()


def add(sync: OptimizerSync) -> int:
    """Note a new one; returns its key."""
    key = next(_made)
    _in_use[key] = sync
    return key


def remove(key: int) -> None:
    """It has let its parameters go."""
    _in_use.pop(key, None)


def in_use(runtime: Runtime | None = None) -> list[OptimizerSync]:
    """Those of one runtime or of all, in the order of making."""
    return [s for s in list(_in_use.values()) if not s.successor and runtime in (None, s.runtime)]


def _finish(runtime: Runtime) -> None:
    """Before a runtime ends, bring parameters up to date, which is impossible afterwards."""
    if runtime is not process.current("shutdown()"):
        _leave_process_set(runtime)
        return
    for sync in set(owners.values()):
        sync.leave_buffers()
    for held in {owner for owner, _ in list(pending.under_way.values())}:
        is_known = runtime.thread.error is not None  # to the program, by any call since
        try:
            held.wait_all()
        except Exception as error:
            if not is_known or not isinstance(error, WfbpError):
                log.error("parameters are not up to date at the end: %s", error)
        held.release()
    for sync in set(owners.values()):
        sync.update.let_go()


process.before_end(_finish)


def _leave_process_set(runtime: Runtime) -> None:
    """Let its optimizers go, with whole parameters and state; collective among its ranks."""
    mine = {sync.number: sync for sync in in_use(runtime)}
    payloads = runtime.channel.exchange(json.dumps(list(mine)).encode(), "removing a process set")
    # One that is forgotten may still be there on a rank whose interpreter has not collected it.
    common = set.intersection(*(set(json.loads(numbers)) for numbers in payloads))
    for number, sync in mine.items():
        if number in common:
            sync.prepare_whole()
        sync.leave()
