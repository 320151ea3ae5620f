"""A job in which one rank fails, leaves or stops, in the way that the arguments say.

Usage: mpirun -n N python faults.py OUT CASE RANK. Rank RANK does the deed; the others go on until
they notice. What a surviving rank catches is reported and raised again, as a program without
handling would do.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import wfbp
from tests.support.ranks import limit_waits
from wfbp.runtime import process

FOREVER_S = 300.0


def steps(count: int, then: Callable[[], None] | None = None) -> None:
    """Training on arrays; ``then`` comes before the last step."""
    specs = [(f"t{k}", np.zeros(50 + k, np.float32)) for k in range(6)]
    reducer = wfbp.GradientReducer(specs, schedule="layerwise")
    for step in range(count):
        if step == count - 1 and then is not None:
            then()
        for k in range(len(specs)):
            reducer.mark_ready(k, np.ones(50 + k, np.float32))
        reducer.wait()


def fail() -> None:
    raise ValueError("the data of this rank is broken")


def leave() -> None:
    sys.exit(0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(FOREVER_S)


def nothing() -> None: ...


def interrupted() -> None:
    """This rank sleeps; and the one before it, which waits, is interrupted from the keyboard."""
    sleep()


def is_interrupted() -> None:
    """When this rank waits."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = process.current("this program").thread.loop
    begun = loop.num_waits

    def interrupt() -> None:
        while loop.num_waits == begun or not loop.num_waiting:
            time.sleep(0.01)
        time.sleep(0.3)
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def is_impatient() -> None:
    """From now on; ranks may take longer to start."""
    limit_waits(process.current("this program"), stall_warning_s=0.7, timeout_s=3.0)


def while_others_step(deed: Callable[[], None]) -> None:
    steps(4, deed)


def while_others_reduce(deed: Callable[[], None]) -> None:
    wfbp.allreduce(np.ones(3), name="first")
    deed()
    wfbp.allreduce(np.ones(3), name="second")


def while_others_wrap(deed: Callable[[], None]) -> None:
    deed()
    steps(4)


def while_others_compute(deed: Callable[[], None]) -> None:
    steps(4)
    deed()
    deadline = time.monotonic() + FOREVER_S
    while time.monotonic() < deadline:
        sum(range(1000))


def while_others_compute_by_torch(deed: Callable[[], None]) -> None:
    import torch

    steps(4)
    deed()
    deadline = time.monotonic() + FOREVER_S
    while time.monotonic() < deadline:
        torch.randn(400, 400) @ torch.randn(400, 400)


def while_others_sleep(deed: Callable[[], None]) -> None:
    steps(4)
    deed()
    time.sleep(FOREVER_S)


def while_others_finish(deed: Callable[[], None]) -> None:
    steps(4)
    deed()


def in_a_thread(deed: Callable[[], None]) -> None:
    """Training in a thread of its own; the main thread waits for it."""
    trainer = threading.Thread(target=steps, args=(4, deed))
    trainer.start()
    trainer.join()


def beside_training(deed: Callable[[], None]) -> None:
    """A thread that has nothing to do with training."""
    helper = threading.Thread(target=deed)
    helper.start()
    helper.join()
    steps(4)


def with_torch(deed: Callable[[], None]) -> None:
    import torch

    import wfbp.torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), schedule="layerwise"
    )
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        if step == 4:
            deed()
        loss.backward()
        optimizer.step()


def while_others_call_a_method(deed: Callable[[], None]) -> None:
    """A method of the optimizer's own, which averages gradients that one rank does not have."""
    import torch

    import wfbp.torch

    class Own(torch.optim.SGD):
        def swap(self) -> None: ...

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    optimizer = wfbp.torch.DistributedOptimizer(Own(model.parameters(), lr=0.1))
    deed()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.swap()


def while_others_join(deed: Callable[[], None]) -> None:
    """With two optimizers, of which each waits in a thread of its own."""
    import torch

    import wfbp.torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4) for _ in "ab"]
    optimizers = [
        wfbp.torch.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
        for layer in layers
    ]
    deed()
    wfbp.torch.join()
    assert optimizers


def behind_a_decoupled_step(deed: Callable[[], None]) -> None:
    """While parameters travel."""
    import torch

    import wfbp.torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.Linear(40, 2))
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), schedule="ps_layerwise"
    )
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if step == 4:
            assert optimizer._wfbp_sync.update.pending
            deed()


def exit_by_3() -> None:
    sys.exit(3)


DEEDS = {
    "exit": exit_by_3,
    "fail": fail,
    "leave": leave,
    "die": die,
    "sleep": sleep,
    "interrupted": interrupted,
}
PLACES = {
    "step": while_others_step,
    "reduce": while_others_reduce,
    "wrap": while_others_wrap,
    "compute": while_others_compute,
    "busy-torch": while_others_compute_by_torch,
    "sleep": while_others_sleep,
    "finish": while_others_finish,
    "torch": with_torch,
    "method": while_others_call_a_method,
    "join": while_others_join,
    "decoupled": behind_a_decoupled_step,
    "thread": in_a_thread,
    "beside": beside_training,
}


def main() -> None:
    out, deed, place, who = sys.argv[1:]
    logging.getLogger().addHandler(logging.StreamHandler())
    wfbp.init()
    mine = who == "all" or wfbp.rank() == int(who)
    others = {"interrupted": is_interrupted, "sleep": is_impatient}.get(deed, nothing)
    try:
        PLACES[place](DEEDS[deed] if mine else others)
    except Exception as error:
        caught = {"kind": type(error).__name__, "text": str(error)}
        Path(out, f"rank{wfbp.rank()}.json").write_text(json.dumps(caught))
        raise


if __name__ == "__main__":
    main()
