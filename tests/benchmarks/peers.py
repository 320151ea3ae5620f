"""``python -m tests.benchmarks peers``: wfbp, DDP, Horovod and plain MPI, for the front page.

Runs ``wfbp bench training`` on two ranks with one thread each: several models, in shared memory and
over links of 10 and 1 Gbit/s (network namespaces, so it needs root). Prints a table in Markdown and
draws the picture of the front page. Horovod competes if it is installed. Results in the file of
``--json`` are kept and drawn too, so that models can be measured one after another.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from xml.sax.saxutils import escape

import torch

from tests.benchmarks import torch_contestants
from tests.benchmarks.harness import environment
from tests.benchmarks.torch_contestants import GPT, Batch
from tests.benchmarks.training import launch_command, names, rank_environment

FORMAT = "wfbp-bench-peers/1"
LINKS = {"none": "shared memory", "10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s"}
MODELS = {
    "mlp": "MLP, 60 layers",
    "gpt": "GPT, 6 layers",
    "densenet": "DenseNet-121",
    "resnet50": "ResNet-50",
}
USUAL_MODELS = ["mlp", "gpt", "densenet"]
CONTESTANTS = {
    "wfbp-auto": "wfbp",
    "ddp": "DDP",
    "ddp-best": "DDP, best buckets",
    "horovod": "Horovod",
    "mpi-per-tensor": "MPI after backward",
}
"""In the order of table and picture."""
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "peers.svg"
NOT_MEASURED = "not available"


class WithLoss(torch.nn.Module):
    """A model of the training benchmark as ``wfbp bench training`` calls it."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return torch_contestants.loss(self.body, (batch[0], batch[1]))


Made = tuple[WithLoss, Callable[[int], Batch]]


def _bench(name: str) -> Made:
    bench = torch_contestants.MODELS[name]
    return WithLoss(bench.build()), lambda seed: bench.batch(torch.Generator().manual_seed(seed))


def mlp() -> Made:
    return _bench("mlp")


def resnet50() -> Made:
    return _bench("resnet50")


def densenet() -> Made:
    return _bench("densenet")


def gpt() -> Made:
    """Small enough that all of it takes minutes: 5.3 million parameters."""

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(1024, (4, 129), generator=generator)
        return text[:, :-1], text[:, 1:]

    return WithLoss(GPT(depth=6, width=256, heads=4, vocab=1024)), batch


def main(words: Sequence[str]) -> int:
    """Run each model over each link; exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks peers", description=__doc__)
    parser.add_argument("--models", type=names(MODELS), default=USUAL_MODELS)
    parser.add_argument("--links", type=names(LINKS), default=list(LINKS))
    parser.add_argument("--rounds", type=int, default=5, help="of all contestants, interleaved")
    parser.add_argument("--json", type=Path, help="file of all samples; what is there is kept")
    parser.add_argument("--table", type=Path, help="file for the table, in Markdown")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="SVG (default: %(default)s)")
    options = parser.parse_args(words)
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    if find_spec("horovod") is None:
        print("Horovod is not installed: its cells say so", file=sys.stderr)
    for model in options.models:
        for link in options.links:
            result = measure(model, link, options.rounds)
            if result is None:
                return 1
            results.setdefault(link, {})[model] = result
            if options.json:
                document = {"format": FORMAT, "environment": environment(), "results": results}
                options.json.write_text(json.dumps(document))
    table = "\n".join(markdown(results))
    print(table)
    if options.table:
        options.table.write_text(table + "\n")
    options.picture.write_text(picture(results))
    return 0


def measure(model: str, link: str, rounds: int) -> dict[str, Any] | None:
    """What ``wfbp bench training --json`` writes; None if it failed, having said why."""
    here = [n for n in CONTESTANTS if n != "horovod" or find_spec("horovod") is not None]
    words = ["--model", f"{__name__}:{model}", "--contestants", ",".join(["none", *here])]
    program = [sys.executable, "-m", "wfbp", "bench", "training", *words]
    command = [*launch_command(link, 2), *program, "--rounds", str(rounds), "--json"]
    print(f"{MODELS[model]}, {LINKS[link]}", file=sys.stderr, flush=True)
    # Fewer steps per candidate than usual, so that slow models are ready sooner.
    variables = {"WFBP_TRIAL_STEPS": "2", **rank_environment()}
    if link != "none":
        variables.pop("GLOO_SOCKET_IFNAME")  # the link sets it
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"failed with status {done.returncode}: {shlex.join(command)}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def medians(result: dict[str, Any], key: str = "seconds") -> dict[str, float]:
    """Milliseconds of each contestant that ran; ``ddp-best`` is the best of all bucket sizes."""
    found = {name: 1e3 * median(times) for name, times in result[key].items()}
    found["ddp-best"] = found[best_ddp(result)]
    return found


def best_ddp(result: dict[str, Any]) -> str:
    """The fastest of DDP's contestants."""
    ddps = {n: median(times) for n, times in result["seconds"].items() if n.startswith("ddp")}
    return min(ddps, key=lambda name: ddps[name])


def ratio(result: dict[str, Any]) -> str:
    """wfbp's time over that of the best DDP: the ratio of medians, quartiles over rounds."""
    ours, theirs = result["seconds"]["wfbp-auto"], result["seconds"][best_ddp(result)]
    whole = median(ours) / median(theirs)
    if len(ours) < 2:
        return f"{whole:.2f}"
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(pairs, n=4, method="inclusive")
    return f"{whole:.2f} ({low:.2f}-{high:.2f})"


def rows(results: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Link, model and result of each measurement, in the order of table and picture."""
    for link in LINKS:
        for model in MODELS:
            if model in results.get(link, {}):
                yield link, model, results[link][model]


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """The lines of the table."""
    headings = ["", "alone", *CONTESTANTS.values(), "wfbp / best DDP", "waiting", "CPU"]
    yield f"| {' | '.join(headings)} |"
    yield "|---" + "|---:" * (len(headings) - 1) + "|"
    for link, model, result in rows(results):
        times, cpu = medians(result), medians(result, "cpu_seconds")
        cells = [f"{LINKS[link]}: {MODELS[model]}", f"{times['none']:.0f}"]
        fastest = min(time for name, time in times.items() if name != "none")
        for name in CONTESTANTS:
            text = f"{times[name]:.0f}" if name in times else NOT_MEASURED
            cells.append(f"**{text}**" if times.get(name) == fastest else text)
        waits = [max(0.0, times[name] - times["none"]) for name in ("wfbp-auto", "ddp-best")]
        cells.append(ratio(result))
        cells.append(f"{waits[0]:.0f} / {waits[1]:.0f}")
        cells.append(f"{cpu['wfbp-auto']:.0f} / {cpu['ddp-best']:.0f}")
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        "Milliseconds per step and rank, medians of interleaved rounds; the fastest is bold. "
        "*Alone* trains without communication. *Best buckets* is DDP's fastest of 1, 5, 25 and "
        "100 MiB; the ratio has its quartiles over rounds. *Waiting* is the time beyond *alone*, "
        "*CPU* the CPU time of all threads, each of wfbp / best DDP."
    )


COLOURS = ("#1f6feb", "#8b949e", "#57606a", "#d4a72c", "#b08bd6")
WIDTH, HEIGHT, LEFT, TOP = 760, 292, 44, 46
PLOT = 176
"""Height of the tallest bar's axis."""


def picture(results: dict[str, Any]) -> str:
    """Bars of each contestant's time over DDP's with its defaults, in a panel for each link."""
    measured = list(rows(results))
    ratios = [{n: t / medians(r)["ddp"] for n, t in medians(r).items()} for _, _, r in measured]
    tallest = max(1.0, *(row[n] for row in ratios for n in CONTESTANTS if n in row)) * 1.08
    scale = PLOT / tallest
    step = (WIDTH - LEFT - 8) / len(measured)
    bar = min(16.0, (step - 14) / len(CONTESTANTS))
    body = []
    for tick in (0.0, 0.5, 1.0, 1.5, 2.0):
        if tick <= tallest:
            y = TOP + PLOT - tick * scale
            dash = "" if tick == 1.0 else ' stroke-dasharray="2 4"'
            body.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 8}" stroke="#8c959f"{dash}/>')
            body.append(_text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    links = [link for link, _, _ in measured]
    for link in dict.fromkeys(links):
        first, count = links.index(link), links.count(link)
        body.append(
            _text(LEFT + (first + count / 2) * step, TOP + PLOT + 34, LINKS[link], bold=True)
        )
        if first:
            x = LEFT + first * step
            body.append(f'<path d="M{x:.1f} {TOP}V{TOP + PLOT + 38}" stroke="#d0d7de"/>')
    for place, ((_, model, _), row) in enumerate(zip(measured, ratios, strict=True)):
        middle = LEFT + (place + 0.5) * step
        body.append(_text(middle, TOP + PLOT + 16, MODELS[model].partition(",")[0]))
        for number, (name, colour) in enumerate(zip(CONTESTANTS, COLOURS, strict=True)):
            x, height = middle + (number - len(CONTESTANTS) / 2) * bar, row.get(name, 0) * scale
            size = f'width="{bar - 1.5:.1f}" height="{height:.1f}"'
            body.append(f'<rect x="{x:.1f}" y="{TOP + PLOT - height:.1f}" {size} fill="{colour}"/>')
            if name == "wfbp-auto":
                place_of = f"translate({x + bar / 2 + 3:.1f} {TOP + PLOT - 6}) rotate(-90)"
                body.append(
                    f'<text transform="{place_of}" style="fill:#ffffff">{row[name]:.2f}</text>'
                )
        alone = TOP + PLOT - row["none"] * scale
        span = (
            f"M{middle - len(CONTESTANTS) * bar / 2:.1f} {alone:.1f}h{len(CONTESTANTS) * bar:.1f}"
        )
        body.append(f'<path d="{span}" stroke="#cf222e" stroke-width="1.5"/>')
    body.append(
        _text(
            8,
            16,
            "Time per step relative to DDP with its defaults (lower is faster)",
            "start",
            True,
        )
    )
    x = float(LEFT)
    for name, colour in zip(CONTESTANTS.values(), COLOURS, strict=True):
        body.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{colour}"/>')
        body.append(_text(x + 14, 33, name, "start"))
        x += 34 + 6.3 * len(name)
    body.append(f'<path d="M{x} 29h12" stroke="#cf222e" stroke-width="1.5"/>')
    body.append(_text(x + 16, 33, "no communication", "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT - 20}" role="img">'
        "<title>Time per step of wfbp, DDP, Horovod and plain MPI</title>"
        "<style>text{font:11px system-ui,sans-serif;fill:#24292f}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT - 20}" fill="#ffffff"/>'
        + "\n".join(body)
        + "</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
