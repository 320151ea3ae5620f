"""One rank of the training benchmark: warm up, check that all train the same, time.

``mpirun -np 2 python -m tests.benchmarks.torch_worker SETTINGS.json``; the command
``python -m tests.benchmarks training`` starts it. All contestants live in one set of processes, and
only the one being timed works: the others hold memory and sleeping threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from tests.benchmarks.harness import (
    HALVES,
    NO_COMMUNICATION,
    Settings,
    check_link_carried,
    is_ddp,
    is_wfbp,
    run,
    time_blocks,
    warm_up,
    write_result,
)
from tests.benchmarks.machine import usage
from tests.benchmarks.torch_contestants import CONTESTANTS, MODELS, PER_TENSOR, Batch, Contestant

NUM_STEPS = 3
LEARNING_RATE = 0.01
TOLERANCE = 1e-5
"""Of the parameters' norm."""
TOLERANCE_OF_CHANGE = 1e-3
"""Of the norm of what the steps changed, which a wrong average would miss by far more."""
TOLERANCE_OF_HALVES = 3e-2
"""The same where gradients travel in 16 bits."""


def check_equality(
    comm: MPI.Intracomm,
    contestants: Sequence[Contestant],
    state: dict[str, Tensor],
    batches: Sequence[Batch],
) -> dict[str, float | None]:
    """Train a few steps from one state with each contestant and compare the parameters.

    16-bit gradients are compared after one step, because deep models amplify rounding from step to
    step. So are all contestants with more than two ranks, which sum in different orders.

    Args:
        comm: of all ranks; collective.
        contestants: one of them the reference, one all-reduce per tensor.
        state: of the model, to start from.
        batches: of this rank.

    Returns:
        Each contestant's difference from the reference, relative to the norm of the parameters,
        the largest of all ranks; None for the one that does not communicate.

    Raises:
        RuntimeError: one of them trains something else.
    """
    per_tensor = next(c for c in contestants if c.name == PER_TENSOR)
    references = {steps: _train(per_tensor, state, batches, steps) for steps in (1, NUM_STEPS)}
    start = torch.cat([state[n].flatten() for n, _ in contestants[0].model.named_parameters()])
    differences: dict[str, float | None] = {}
    for contestant in contestants:
        name = contestant.name
        if name == NO_COMMUNICATION:
            differences[name] = None
            continue
        rounds = name.endswith(HALVES)
        steps = 1 if rounds or comm.size > 2 else NUM_STEPS
        reference = references[steps]
        distance = float((_train(contestant, state, batches, steps) - reference).norm())
        of_all = comm.allreduce(distance / float(reference.norm()), MPI.MAX)
        of_change = comm.allreduce(distance / float((reference - start).norm()), MPI.MAX)
        # Written so that a NaN fails.
        most = TOLERANCE_OF_HALVES if rounds else TOLERANCE_OF_CHANGE
        if not (of_all <= TOLERANCE * most / TOLERANCE_OF_CHANGE and of_change <= most):
            raise RuntimeError(
                f"{name} trains something else than {PER_TENSOR}: after {steps} steps their "
                f"parameters differ by {of_all:.1e} of their norm (at most {TOLERANCE:.0e} is "
                f"expected) and {of_change:.1e} of their change ({most:.0e})"
            )
        differences[name] = of_all
    return differences


def _train(
    contestant: Contestant, state: dict[str, Tensor], batches: Sequence[Batch], num_steps: int
) -> Tensor:
    """All parameters after the steps, in one vector."""
    contestant.reset(state, LEARNING_RATE)
    for step in range(num_steps):
        contestant.step(batches[step % len(batches)])
    contestant.rest()
    return torch.cat([p.detach().flatten() for p in contestant.model.parameters()])


NUM_BATCHES = 4
TIMED_RATE = 1e-6
"""While timing: hundreds of iterations on a few batches must stay numerically tame."""


def main(words: Sequence[str]) -> None:
    """Run one model as the settings file says."""
    settings = Settings.load(words[0])
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()

    def say(text: str) -> None:
        if comm.rank == 0:
            print(f"{settings.model}: {text}", file=sys.stderr, flush=True)

    _start_libraries(comm, settings)
    bench = MODELS[settings.model]
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [bench.batch(generator) for _ in range(NUM_BATCHES)]
    contestants = [_make(name, settings.model) for name in settings.contestants]
    model = contestants[0].model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    processes = comm.allgather(os.getpid())
    foreign_cores = {}
    for contestant in contestants:
        contestant.reset(state, TIMED_RATE)
        load = usage(processes)
        steps = warm_up(comm, contestant, batches, settings, NUM_STEPS)
        foreign = foreign_cores[contestant.name] = load.foreign_cores(usage(processes))
        say(f"{contestant.name} ready after {steps} steps, foreign load {foreign:.2f} cores")
    differences = check_equality(comm, contestants, state, batches)
    say("parameters agree after the same steps from one state")
    for contestant in contestants:
        contestant.reset(state, TIMED_RATE)
    blocks = time_blocks(comm, contestants, batches, settings, say)
    gradients = [p.numel() * p.element_size() for p in model.parameters()]
    check_link_carried(blocks, sum(gradients))
    write_result(
        comm, settings, bench.title, gradients, contestants, differences, foreign_cores, blocks
    )
    _stop_libraries(comm, settings)


def _make(name: str, model_name: str) -> Contestant:
    torch.manual_seed(0)
    model = MODELS[model_name].build()
    sgd = torch.optim.SGD(model.parameters(), lr=TIMED_RATE, momentum=0.9)
    return CONTESTANTS[name](name, model, sgd)


def _start_libraries(comm: MPI.Intracomm, settings: Settings) -> None:
    """Start torch's process group and wfbp where a contestant needs them."""
    if any(is_ddp(name) for name in settings.contestants):
        meeting_place = Path(settings.result).with_suffix(".gloo").resolve()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting_place}", rank=comm.rank, world_size=comm.size
        )
    if any(is_wfbp(name) for name in settings.contestants):
        import wfbp.torch

        wfbp.torch.init()


def _stop_libraries(comm: MPI.Intracomm, settings: Settings) -> None:
    comm.Barrier()
    if any(is_wfbp(name) for name in settings.contestants):
        import wfbp.torch

        wfbp.torch.shutdown()
    if any(is_ddp(name) for name in settings.contestants):
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(main)
