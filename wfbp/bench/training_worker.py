"""One rank of the training benchmark: warm up, check equality, time.

``mpirun -np 2 python -m wfbp.bench.training_worker SETTINGS.json``; the command
``python -m wfbp.bench training`` starts it. All contestants live in one set of processes, and
only the one being timed works: the others hold memory and sleeping threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from mpi4py import MPI

from wfbp.bench.load import usage
from wfbp.bench.models import MODELS
from wfbp.bench.training_contestants import CONTESTANTS, Contestant, is_ddp, is_wfbp
from wfbp.bench.training_equality import NUM_STEPS, check_equality
from wfbp.bench.training_ranks import run, warm_up, write_result
from wfbp.bench.training_settings import Settings
from wfbp.bench.training_timing import check_link_carried, time_blocks

NUM_BATCHES = 4
LEARNING_RATE = 1e-6
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
        contestant.reset(state, LEARNING_RATE)
        load = usage(processes)
        steps = warm_up(comm, contestant, batches, settings, NUM_STEPS)
        foreign = foreign_cores[contestant.name] = load.foreign_cores(usage(processes))
        say(f"{contestant.name} ready after {steps} steps, foreign load {foreign:.2f} cores")
    differences = check_equality(comm, contestants, state, batches)
    say(f"parameters agree after {NUM_STEPS} steps from one state")
    for contestant in contestants:
        contestant.reset(state, LEARNING_RATE)
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
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
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
