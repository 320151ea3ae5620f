"""The end of distributed optimizers, and training on data of different length.

``shutdown()`` brings parameters up to date, as far as ranks can still communicate, and leaves
``p.grad`` in memory that stays. A process set that is removed leaves whole parameters and state.

A rank that has no more data joins: it takes part in the steps of the others without gradients. With
several optimizers it uses one thread for each, because the others may step them in any order. In
each of these steps it asks for the exchange at the step's end, so all ranks know who has joined.
They then have whole gradients and step whole parameters, so that no rank waits for a shard of a
joined one. The first step with all ranks joined is the last one. Then the ranks that joined first
get the parameters and the state of the last.
"""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor

from wfbp.errors import WfbpError
from wfbp.runtime import process, signals
from wfbp.runtime.runtime import Runtime
from wfbp.torch import gradient_sync, pending, state

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


@signals.deferred
def join() -> int:
    """Announce that this rank has no more data, and wait until all ranks have called this.

    Until then this rank contributes zeros to every ``allreduce`` of the others and to the steps of
    their distributed optimizers, whose averages are still divided by the number of all ranks. At
    the end it gets the parameters and the optimizer state of the ranks that stepped last. Its own
    gradients are forgotten. While a rank has joined, the others may
    step, clip, synchronize and reduce by ``allreduce``; other collectives are an error.

    Returns:
        The rank that called it last, the same on every rank.

    Raises:
        WfbpError: ranks disagree, failed, or did not answer in time.

    Example:
        >>> import wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.join() == wfbp.size() - 1
        True
    """
    operations = process.operations("join()")
    if process.size() == 1:
        return operations.join()
    if in_use():
        gc.collect()  # what is forgotten on all ranks must be on this one, too
    thread = process.current("join()").thread
    # Those of an earlier runtime may still be held, by a traceback for example.
    syncs = [sync for sync in in_use() if sync.runtime.thread is thread]

    def follow() -> None:
        with ThreadPoolExecutor(len(syncs) or 1, "wfbp-join") as executor:
            others = [executor.submit(sync.join, operations.note_progress) for sync in syncs[1:]]
            for sync in syncs[:1]:
                sync.join(operations.note_progress)  # here, where a signal's handler can end it
            for future in others:
                future.result()

    last = operations.join(follow)
    for sync in syncs:
        root, sync.last_active = sync.last_active, None
        if root is not None:
            state.share(sync.runtime, sync.optimizer, sync.named, root)
    return last


process.before_end(_finish)
