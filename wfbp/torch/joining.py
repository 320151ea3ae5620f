"""Training on data of different length: ranks that have no more of it join.

A rank that has joined takes part in the steps of the others without gradients. With several
optimizers it uses one thread for each, because the others may step them in any order. In each of
these steps it asks for the exchange at the step's end, so all ranks know who has joined. They then
have whole gradients and step whole parameters, so that no rank waits for a shard of a joined one.
The first step with all ranks joined is the last one. Then the ranks that joined first get the
parameters and the state of the last.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

from wfbp.runtime import process, signals
from wfbp.torch import ending, state


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
    if ending.in_use():
        gc.collect()  # what is forgotten on all ranks must be on this one, too
    thread = process.current("join()").thread
    # Those of an earlier runtime may still be held, by a traceback for example.
    syncs = [sync for sync in ending.in_use() if sync.runtime.thread is thread]

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
