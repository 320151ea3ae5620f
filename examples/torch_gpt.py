"""Train a small character-level GPT on the source code of Python's standard library.

    pip install -e ".[mpich,torch]"
    wfbprun -n 2 examples/torch_gpt.py

The lines that make it data-parallel are marked with an arrow; all else is plain PyTorch.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import wfbp.torch as wfbp  # <-


def library_text(max_bytes: int) -> str:
    """The modules of the running Python's standard library, one after another."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return "".join(c for c in text[:max_bytes] if c == "\n" or (c.isascii() and c.isprintable()))


class Block(nn.Module):
    """Causal attention and a two-layer network, each added to its normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, vocab: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    options = arguments()
    wfbp.init()  # <-
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // wfbp.local_size()))

    text = library_text(options.max_bytes)
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[c] for c in text])
    tokens = tokens.chunk(wfbp.size())[wfbp.rank()]  # <- each rank reads its own part

    torch.manual_seed(0)
    model = GPT(len(characters), options.context, options.width, options.depth, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = wfbp.DistributedOptimizer(  # <-
        optimizer, named_parameters=model.named_parameters(), schedule=options.schedule
    )
    wfbp.broadcast_parameters(model.state_dict(), root_rank=0)  # <-
    wfbp.broadcast_optimizer_state(optimizer, root_rank=0)  # <-
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps + 1)

    random = torch.Generator().manual_seed(wfbp.rank())
    window = torch.arange(options.context + 1)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(options.steps):
        starts = torch.randint(len(tokens) - len(window), (options.batch, 1), generator=random)
        batch = tokens[starts + window]
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == options.steps - 1:
            losses.append(wfbp.allreduce(loss.detach()).item())  # <- mean over ranks
            if wfbp.rank() == 0:
                print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    seconds = time.perf_counter() - start
    if wfbp.rank() == 0:
        count = options.steps * options.batch * options.context * wfbp.size()
        Console().print(summary(losses, count / seconds, optimizer.report()))


def summary(losses: list[float], tokens_per_s: float, report: dict) -> Table:
    """What was learnt, and how the gradients travelled."""

    def milliseconds(key: str) -> str:
        return "-" if report.get(key) is None else f"{report[key] * 1e3:.1f} ms"

    plan = "one rank: nothing to exchange"
    if report:
        groups = f"{report['num_groups']} group" + "s" * (report["num_groups"] != 1)
        overlap = "during backward" if report["overlap"] else "after backward"
        plan = f"{report['schedule']}: {groups} {overlap}"
    ratio = report.get("ratio_to_lower_bound")
    table = Table(title=f"GPT on the standard library, {wfbp.size()} ranks", show_header=False)
    table.add_row("loss", f"{losses[0]:.3f} -> {losses[-1]:.3f}")
    table.add_row("tokens/s", f"{tokens_per_s:,.0f}")
    table.add_row("plan", plan)
    table.add_row("gradient", f"{report.get('total_bytes', 0) / 1e6:.1f} MB per step")
    table.add_row("iteration, predicted", milliseconds("predicted_iteration_s"))
    table.add_row("iteration, measured", milliseconds("measured_iteration_s"))
    table.add_row("exposed communication", milliseconds("exposed_s"))
    table.add_row("T/LB", "-" if ratio is None else f"{ratio:.3f} times the lower bound")
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=12, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=128, help="characters per window")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="of text")
    parser.add_argument("--schedule", default="auto", help="how gradients are grouped")
    return parser.parse_args()


if __name__ == "__main__":
    main()
