"""One rank of the training part of the GPU benchmark: warm up, check equality, time.

``mpirun -np N python -m tests.benchmarks.gpu_worker SETTINGS.json cuda``; the command
``python -m tests.benchmarks gpu`` starts it. All ranks use the one GPU, so two of them share it.
NCCL refuses that where it recognises the host, so each rank gives another one; their traffic then
goes through sockets, for all contestants alike.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mpi4py import MPI

from tests.benchmarks.gpu import TIMED, Training
from tests.benchmarks.harness import Settings, is_ddp, is_wfbp, run, warm_up
from tests.benchmarks.torch_contestants import (
    CONTESTANTS,
    GPT,
    MODELS,
    PER_TENSOR,
    Batch,
    BenchModel,
    Contestant,
    mlp,
    resnet50,
)
from tests.benchmarks.torch_worker import NUM_STEPS, check_equality

NUM_BATCHES = 4
LEARNING_RATE = 1e-6
"""While timing: hundreds of iterations on a few batches must stay numerically tame."""
MIN_BLOCK_S = 0.5


def _images(generator: torch.Generator) -> Batch:
    return (
        torch.randn(64, 3, 224, 224, generator=generator),
        torch.randint(1000, (64,), generator=generator),
    )


def _tokens(generator: torch.Generator) -> Batch:
    text = torch.randint(50304, (8, 1025), generator=generator)
    return text[:, :-1], text[:, 1:]


def _vectors(generator: torch.Generator) -> Batch:
    return torch.randn(4, 16, generator=generator), torch.randint(16, (4,), generator=generator)


GPU_MODELS = {
    "resnet50": BenchModel("resnet50", "ResNet-50 224x224, batch 64", resnet50, _images),
    "gpt": BenchModel(
        "gpt",
        "GPT 12 x 768, T 1024, vocab 50304 untied, batch 8",
        lambda: GPT(12, 768, 12, 1024, 50304),
        _tokens,
    ),
    "resnet50-small": MODELS["resnet50"],
    "gpt-small": MODELS["gpt"],
    "mlp-tiny": BenchModel("mlp-tiny", "MLP 4 x 16, batch 4", lambda: mlp(4, 16), _vectors),
}
"""Models of the size that a GPU is given; small ones where ranks share it; one to rehearse with."""


def main(words: Sequence[str]) -> None:
    """Run one model as the settings file says, on ``cuda`` or, to rehearse, on ``cpu``."""
    settings, device = Settings.load(words[0]), torch.device(words[1])
    comm = MPI.COMM_WORLD.Dup()
    _prepare(comm, device)

    def say(text: str) -> None:
        if comm.rank == 0:
            print(f"{settings.model}, {comm.size} ranks: {text}", file=sys.stderr, flush=True)

    _start_libraries(comm, settings, device)
    bench = GPU_MODELS[settings.model]
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [_on(device, bench.batch(generator)) for _ in range(NUM_BATCHES)]
    contestants = [_make(name, bench, device) for name in settings.contestants]
    state = {name: value.clone() for name, value in contestants[0].model.state_dict().items()}
    for contestant in contestants:
        contestant.reset(state, LEARNING_RATE)
        steps = warm_up(comm, contestant, batches, settings, NUM_STEPS)
        say(f"{contestant.name} ready after {steps} steps")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # not every kernel has such a variant
        torch.use_deterministic_algorithms(True, warn_only=True)
        differences = check_equality(comm, contestants, state, batches)
        torch.use_deterministic_algorithms(False)
    say(f"parameters agree after {NUM_STEPS} steps from one state")
    timed = [contestant for contestant in contestants if contestant.name in TIMED]
    for contestant in timed:
        contestant.reset(state, LEARNING_RATE)
    rounds = time_rounds(comm, timed, batches, settings.iterations, _wait_for(device))
    gradients = [p.numel() * p.element_size() for p in contestants[0].model.parameters()]
    result = Training(
        model=settings.model,
        title=bench.title,
        num_tensors=len(gradients),
        num_bytes=sum(gradients),
        num_ranks=comm.size,
        step_s={name: tuple(values) for name, values in rounds.items()},
        differences=differences,
        reports={c.name: c.report() for c in contestants if is_wfbp(c.name)},
    )
    if comm.rank == 0:
        Path(settings.result).write_text(json.dumps(result.to_json()))
    _stop_libraries(comm, settings)


def time_rounds(
    comm: MPI.Intracomm,
    contestants: Sequence[Contestant],
    batches: Sequence[Batch],
    rounds: int,
    wait: Callable[[], None],
) -> dict[str, list[float]]:
    """Seconds per step in a block of every contestant per round; collective.

    Args:
        comm: of all ranks.
        contestants: warmed up.
        batches: of this rank.
        rounds: of one block per contestant, in an order shuffled anew each round.
        wait: for the device.

    Returns:
        By contestant, one value per round, the slowest rank's.
    """
    start = time.perf_counter()
    contestants[0].step(batches[0])
    wait()
    slowest: float = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    length = max(2, math.ceil(MIN_BLOCK_S / slowest))
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    order = list(contestants)
    shuffle = random.Random(0).shuffle  # the same order on all ranks
    for _ in range(rounds):
        shuffle(order)
        for contestant in order:
            for step in range(max(2, length // 10)):
                contestant.step(batches[step % len(batches)])
            wait()
            comm.Barrier()
            start = time.perf_counter()
            for step in range(length):
                contestant.step(batches[step % len(batches)])
            wait()
            seconds = (time.perf_counter() - start) / length
            samples[contestant.name].append(comm.allreduce(seconds, MPI.MAX))
            contestant.rest()
    return samples


def host_reference(name: str, model: torch.nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """What all must equal: one blocking all-reduce per gradient after backward, on the host."""

    def exchange() -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            on_host = gradient.cpu()
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, on_host.numpy())
            gradient.copy_(on_host.div_(MPI.COMM_WORLD.size))

    return Contestant(name, model, sgd, model, sgd, exchange)


def _prepare(comm: MPI.Intracomm, device: torch.device) -> None:
    """Before any context is made."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or its sums change from run to run
    if device.type != "cuda":
        torch.set_num_threads(1)
        return
    if comm.size > 1:
        os.environ["NCCL_HOSTID"] = f"wfbp-bench-{comm.rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")


def _start_libraries(comm: MPI.Intracomm, settings: Settings, device: torch.device) -> None:
    meeting_place = Path(settings.result).with_suffix(".group").resolve()
    if any(is_ddp(name) for name in settings.contestants):
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{meeting_place}",
            rank=comm.rank,
            world_size=comm.size,
        )
    import wfbp.torch

    wfbp.torch.init()


def _stop_libraries(comm: MPI.Intracomm, settings: Settings) -> None:
    import wfbp.torch

    comm.Barrier()
    wfbp.torch.shutdown()
    if any(is_ddp(name) for name in settings.contestants):
        torch.distributed.destroy_process_group()


def _make(name: str, bench: BenchModel, device: torch.device) -> Contestant:
    torch.manual_seed(0)
    model = bench.build().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    maker = host_reference if name == PER_TENSOR else CONTESTANTS[name]
    return maker(name, model, sgd)


def _on(device: torch.device, batch: Batch) -> Batch:
    data, classes = batch
    return data.to(device), classes.to(device)


def _wait_for(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return torch.cuda.synchronize
    return lambda: None


if __name__ == "__main__":
    run(main)
