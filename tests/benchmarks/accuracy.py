"""Losses after training with fewer bytes per gradient, beside plain training with the same seeds.

    python tools/link.py run --rate 10gbit -np 2 -- python -m tests.benchmarks accuracy

A GPT on text (AdamW, clipping) and a convolutional network on digits (SGD with momentum), for some
seeds. On one host nothing is encoded. ``--local-steps 30`` adds training by local steps, which
exchange each of four fragments every so many steps, in 4 bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import wfbp.torch as wfbp
from examples.torch_digits import digits, network
from examples.torch_gpt import GPT, library_text
from tests.benchmarks.jobs import names
from wfbp.cli.tables import print_table
from wfbp.core.types import COMPRESSIONS

CONTEXT, WIDTH, DEPTH = 64, 128, 2
LR = 2e-3
LOCAL = "local steps"
Evaluate = Callable[[nn.Module], float]
Batches = Iterator[tuple[Tensor, Tensor]]


def text_task(seed: int, batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches, Evaluate]:
    """Characters of Python's standard library; the loss is that of its last tenth."""
    text = library_text(1_000_000)
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[c] for c in text])
    train, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    window = torch.arange(CONTEXT + 1)

    def drawn(source: Tensor, random: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(source) - len(window), (count, 1), generator=random)
        windows = source[starts + window]
        return windows[:, :-1], windows[:, 1:]

    def batches() -> Batches:
        random = torch.Generator().manual_seed(1000 * seed + wfbp.rank())
        while True:
            yield drawn(train, random, batch)

    def evaluate(model: nn.Module) -> float:
        inputs, targets = drawn(held_out, torch.Generator().manual_seed(5), 256)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()

    torch.manual_seed(seed)
    model = GPT(len(characters), CONTEXT, WIDTH, DEPTH, heads=4)
    return model, torch.optim.AdamW(model.parameters(), lr=LR), batches(), evaluate


def digits_task(
    seed: int, batch: int
) -> tuple[nn.Module, torch.optim.Optimizer, Batches, Evaluate]:
    """Handwritten digits; the loss is that of the images of the test."""
    train_x, train_y, test_x, test_y = digits()

    def batches() -> Batches:
        random = torch.Generator().manual_seed(1000 * seed + wfbp.rank())
        while True:
            chosen = torch.randint(len(train_x), (batch,), generator=random)
            yield train_x[chosen], train_y[chosen]

    def evaluate(model: nn.Module) -> float:
        return functional.cross_entropy(model(test_x), test_y).item()

    torch.manual_seed(seed)
    model = network()
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batches(), evaluate


TASKS = {"text": text_task, "digits": digits_task}


def trained(task: str, compression: str, seed: int, steps: int, every: int) -> tuple[float, float]:
    """The loss after some steps, which are local if ``compression`` is so, and seconds per step."""
    model, optimizer, batches, evaluate = TASKS[task](seed, 8)
    local = None
    clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    if compression == LOCAL:
        local = wfbp.LocalSteps(optimizer, model.named_parameters(), every=every)
    else:
        optimizer = wfbp.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=compression, schedule="oasr"
        )
        clip = optimizer.clip_grad_norm_
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = time.perf_counter()
    for _ in range(steps):
        inputs, targets = next(batches)
        output = model(inputs)
        loss = functional.cross_entropy(output.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        clip(1.0)
        optimizer.step()
        decay.step()
    step_s = (time.perf_counter() - start) / steps
    if local is not None:
        local.synchronize()
    elif compression == "int8" and "int8" not in optimizer.report()["sent_as"]:
        raise SystemExit("nothing was encoded: start ranks on several hosts, as tools/link.py does")
    with torch.no_grad():
        return evaluate(model), step_s


def main(argv: Sequence[str]) -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", type=names(TASKS), default=list(TASKS))
    parser.add_argument("--compressions", type=names(COMPRESSIONS), default=["bf16", "int8"])
    parser.add_argument("--local-steps", type=int, default=0, help="from one exchange to the next")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(argv)
    by_local_steps = [LOCAL] if options.local_steps else []
    torch.set_num_threads(1)
    wfbp.init()
    for task in options.tasks:
        results = {
            name: [
                trained(task, name, seed, options.steps, options.local_steps)
                for seed in range(options.seeds)
            ]
            for name in dict.fromkeys(["none", *options.compressions, *by_local_steps])
        }
        losses = {name: [loss for loss, _ in found] for name, found in results.items()}
        rows = []
        for name, found in losses.items():
            step_s = statistics.median(seconds for _, seconds in results[name])
            over = [a / b - 1 for a, b in zip(found, losses["none"], strict=True)]
            rows.append(
                [
                    name,
                    f"{statistics.mean(found):.4f}",
                    " ".join(f"{loss:.4f}" for loss in found),
                    f"{statistics.mean(over):+.2%}",
                    " ".join(f"{each:+.2%}" for each in over),
                    f"{1e3 * step_s:.1f}",
                ]
            )
        if wfbp.rank() == 0:
            spread = max(losses["none"]) / min(losses["none"]) - 1
            columns = ["gradients", "mean loss", "by seed", "over plain", "by seed", "ms per step"]
            title = f"{task}, {wfbp.size()} ranks; plain seeds differ by {spread:.1%}"
            print_table(title, columns, rows)
    wfbp.shutdown()
