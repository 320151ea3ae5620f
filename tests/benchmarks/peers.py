"""``python -m tests.benchmarks peers``: wfbp, DDP, Horovod and plain MPI, for the front page.

Runs ``wfbp bench training`` with one thread per rank: several models, in shared memory and over
links of several rates (network namespaces, so it needs root). By default there are two ranks on two
hosts. Prints a table in Markdown and draws the picture of the front page. Horovod
competes if it is installed. Results in the file of ``--json`` are kept and drawn too, so that
models can be measured one after another. ``--redraw`` measures nothing: it draws the table of a
page again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tests.benchmarks.jobs import names
from tests.benchmarks.training import measure, medians, save
from wfbp.core.types import COMPRESSIONS

LINKS = {
    "none": "shared memory",
    "unlimited": "unlimited",
    "25gbit": "25 Gbit/s",
    "10gbit": "10 Gbit/s",
    "1gbit": "1 Gbit/s",
}
USUAL_LINKS = ["none", "10gbit", "1gbit"]
MODELS = {
    "mlp": "MLP, 60 layers",
    "gpt": "GPT, 6 layers",
    "densenet": "DenseNet-121",
    "resnet50": "ResNet-50",
    "lstm": "LSTM, 2 layers",
}
USUAL_MODELS = ["mlp", "gpt", "densenet"]
CONTESTANTS = {
    "wfbp-auto": "wfbp",
    "ddp": "DDP",
    "ddp-best": "DDP, best buckets",
    "horovod": "Horovod",
    "mpi-per-tensor": "MPI per tensor",
    "mpi-flat": "MPI at once",
}
"""In the order of table and picture."""
PLAIN_MPI = ("mpi-per-tensor", "mpi-flat")
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "peers.svg"
NOT_MEASURED = "not available"


def main(words: Sequence[str]) -> int:
    """Run each model over each link; exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks peers", description=__doc__)
    parser.add_argument("--models", type=names(MODELS), default=USUAL_MODELS)
    parser.add_argument("--links", type=names(LINKS), default=USUAL_LINKS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=2, help="that the ranks are on, over a link")
    parser.add_argument("--rounds", type=int, default=5, help="of all contestants, interleaved")
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none", help="of wfbp")
    parser.add_argument("--json", type=Path, help="file of all samples; what is there is kept")
    parser.add_argument("--table", type=Path, help="file for the table, in Markdown")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="SVG (default: %(default)s)")
    parser.add_argument("--redraw", type=Path, metavar="PAGE", help="draw the table of this page")
    options = parser.parse_args(words)
    if options.redraw:
        options.picture.write_text(picture(drawn(rows_of_page(options.redraw.read_text()))))
        return 0
    for file in filter(None, (options.table, options.picture)):
        file.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
        if compressions(results) - {options.compression}:
            parser.error(f"{options.json} has results of another compression: choose another file")
    contestants = ["none", *CONTESTANTS]
    if find_spec("horovod") is None:
        contestants.remove("horovod")
        print("Horovod is not installed: its cells say so", file=sys.stderr)
    for model in options.models:
        for link in options.links:
            print(f"{MODELS[model]}, {LINKS[link]}", file=sys.stderr, flush=True)
            known = "small_gpt" if model == "gpt" else model
            job = (link, options.ranks, options.hosts)
            how = options.compression
            result = measure(known, contestants, options.rounds, *job, compression=how)
            if result is None:
                return 1
            results.setdefault(link, {})[model] = result
            if options.json:
                save(options.json, results)
    table = "\n".join(markdown(results))
    print(table)
    if options.table:
        options.table.write_text(table + "\n")
    measured = drawn(list(rows(results)))
    if measured and (options.compression == "none" or options.picture != PICTURE):
        options.picture.write_text(picture(measured))
    return 0


def compressions(results: dict[str, Any]) -> set[str]:
    """How wfbp sent gradients in these measurements."""
    found = (result for models in results.values() for result in models.values())
    return {result.get("compression", "none") for result in found}


def milliseconds(result: dict[str, Any], key: str = "seconds") -> dict[str, float]:
    """Medians of each contestant that ran; ``ddp-best`` is the best of all bucket sizes."""
    found = {name: 1e3 * seconds for name, seconds in medians(result, key).items()}
    found["ddp-best"] = found[best_ddp(result)]
    return found


def best_ddp(result: dict[str, Any]) -> str:
    """The fastest of DDP's contestants."""
    found = medians(result)
    return min((n for n in found if n.startswith("ddp")), key=lambda name: found[name])


def best_mpi(times: dict[str, float]) -> float:
    """Of a row's times, that of the faster program of plain MPI."""
    return min(times[name] for name in PLAIN_MPI if name in times)


def predicted(result: dict[str, Any]) -> float | None:
    """Milliseconds that wfbp predicts for the plan that it has chosen."""
    seconds = result.get("reports", {}).get("wfbp-auto", {}).get("predicted_iteration_s")
    return 1e3 * seconds if seconds else None


def ratio(result: dict[str, Any]) -> str:
    """wfbp's time over that of the best DDP: the ratio of medians, quartiles over rounds."""
    ours, theirs = result["seconds"]["wfbp-auto"], result["seconds"][best_ddp(result)]
    whole = median(ours) / median(theirs)
    if len(ours) < 2:
        return f"{whole:.2f}"
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(pairs, n=4, method="inclusive")
    return f"{whole:.2f} ({low:.2f}-{high:.2f})"


class Row(NamedTuple):
    """One measurement, a row of the table.

    ``link`` and ``model`` are keys of :data:`LINKS` and :data:`MODELS`. ``times`` and ``cpu`` are
    milliseconds by contestant, of those that ran. ``ratio`` is wfbp's time over that of the best
    DDP, with quartiles. ``predicted`` is the time in milliseconds that wfbp expects of its plan.
    """

    link: str
    model: str
    times: dict[str, float]
    cpu: dict[str, float]
    ratio: str
    predicted: float | None = None


def rows(results: dict[str, Any]) -> Iterator[Row]:
    """The measurements in the order of table and picture."""
    for link in LINKS:
        for model in MODELS:
            if model in results.get(link, {}):
                result = results[link][model]
                times, cpu = milliseconds(result), milliseconds(result, "cpu_seconds")
                yield Row(link, model, times, cpu, ratio(result), predicted(result))


def rows_of_page(text: str) -> list[Row]:
    """The rows of the table that :func:`markdown` wrote into a page, without CPU times."""
    text = text.partition("<!-- table peers -->")[2].partition("<!-- end peers -->")[0] or text
    found = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if cells[1:2] == ["alone"]:  # the headings
            contestants = {title: name for name, title in CONTESTANTS.items()}
            names = ["none", *(contestants[cell] for cell in cells if cell in contestants)]
        keys = {
            f"{LINKS[link]}: {MODELS[model]}": (link, model) for link in LINKS for model in MODELS
        }
        if cells[0] in keys:
            numbers = zip(names, cells[1:], strict=False)
            times = {name: float(cell) for name, cell in numbers if cell != NOT_MEASURED}
            found.append(Row(*keys[cells[0]], times, {}, cells[1 + len(names)]))
    return found


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """The lines of the table."""
    ratios = ["wfbp / best DDP", "wfbp / best MPI"]
    headings = ["", "alone", *CONTESTANTS.values(), *ratios, "predicted", "CPU"]
    yield f"| {' | '.join(headings)} |"
    yield "|---" + "|---:" * (len(headings) - 1) + "|"
    for link, model, times, cpu, over_ddp, predicted_ms in rows(results):
        cells = [f"{LINKS[link]}: {MODELS[model]}", f"{times['none']:.0f}"]
        fastest = min(time for name, time in times.items() if name != "none")
        for name in CONTESTANTS:
            text = f"{times[name]:.0f}" if name in times else NOT_MEASURED
            cells.append(f"**{text}**" if times.get(name) == fastest else text)
        cells += [over_ddp, f"{times['wfbp-auto'] / best_mpi(times):.2f}"]
        cells.append(f"{predicted_ms:.0f}" if predicted_ms else "-")
        cells.append(f"{cpu['wfbp-auto']:.0f} / {cpu['ddp-best']:.0f}")
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        "Milliseconds per step and rank, medians of interleaved rounds; the fastest is bold. "
        "*Alone* trains without communication. *Best buckets* is DDP's fastest of 1, 5, 25 and "
        "100 MiB; its ratio has quartiles over rounds. *Predicted* is wfbp's forecast for its "
        "plan. *CPU* is the CPU time of all threads, of wfbp / best DDP."
        + "".join(f" wfbp sends {name}." for name in compressions(results) - {"none"})
    )


BARS = {
    "wfbp-auto": ("wfbp", "#1f6feb"),
    "ddp": ("DDP, default buckets", "#8b949e"),
    "horovod": ("Horovod", "#d4a72c"),
    "mpi-best": ("plain MPI, the faster of two", "#b08bd6"),
}
"""Name and colour of each bar; the line at 1 is DDP with its best buckets."""
ALONE = "#cf222e"
WIDTH, LEFT, RIGHT, TOP = 640, 44, 10, 66
PLOT = 170
"""Height of the axis."""
HEIGHT = TOP + PLOT + 62


def drawn(measured: Sequence[Row]) -> list[Row]:
    """The rows that a picture has room for; none unless all of the usual ones are there."""
    usual = [r for r in measured if r.link in USUAL_LINKS and r.model in USUAL_MODELS]
    return usual if len(usual) == len(USUAL_LINKS) * len(USUAL_MODELS) else []


def picture(measured: Sequence[Row]) -> str:
    """Bars of each contestant's time over that of DDP with its best buckets, by link and model."""
    ratios = [
        {name: t / row.times["ddp-best"] for name, t in row.times.items()}
        | {"mpi-best": best_mpi(row.times) / row.times["ddp-best"]}
        for row in measured
    ]
    tallest = max(1.0, *(row[name] for row in ratios for name in BARS if name in row)) * 1.05
    scale, base = PLOT / tallest, TOP + PLOT
    step = (WIDTH - LEFT - RIGHT) / len(measured)
    bar = min(16.0, (step - 14) / len(BARS))
    body = [_text(12, 20, "Time per step over DDP with its best bucket size", "start", True)]
    body.append(_text(WIDTH - RIGHT, 20, "lower is faster", "end"))
    x = 12.0
    for name, colour in BARS.values():
        body.append(f'<rect x="{x:.1f}" y="32" width="11" height="11" fill="{colour}"/>')
        body.append(_text(x + 15, 42, name, "start"))
        x += 34 + 6.2 * len(name)
    body.append(f'<path d="M{x:.1f} 38h14" stroke="{ALONE}" stroke-width="2"/>')
    body.append(_text(x + 18, 42, "no communication", "start"))
    for tick in (0.0, 0.5, 1.0, 1.5, 2.0):
        if tick <= tallest:
            y = base - tick * scale
            dash = ' stroke-dasharray="2 4"' if tick not in (0.0, 1.0) else ""
            body.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#8c959f"{dash}/>')
            body.append(_text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    body.append(_text(LEFT - 6, base + 34, "wfbp", "end", True, BARS["wfbp-auto"][1]))
    links = [row.link for row in measured]
    for link in dict.fromkeys(links):
        first, count = links.index(link), links.count(link)
        body.append(_text(LEFT + (first + count / 2) * step, base + 54, LINKS[link], bold=True))
        if first:
            x = LEFT + first * step
            body.append(f'<path d="M{x:.1f} {TOP}V{base + 58}" stroke="#d0d7de"/>')
    for place, (row, over) in enumerate(zip(measured, ratios, strict=True)):
        middle = LEFT + (place + 0.5) * step
        body.append(_text(middle, base + 17, re.split("[,-]", MODELS[row.model])[0]))
        label = row.ratio.partition(" ")[0]
        body.append(_text(middle, base + 34, label, bold=True, colour=BARS["wfbp-auto"][1]))
        left = middle - len(BARS) / 2 * bar
        for number, (name, (_, colour)) in enumerate(BARS.items()):
            height = over.get(name, 0) * scale
            size = f'width="{bar - 1.5:.1f}" height="{height:.1f}"'
            corner = f'x="{left + number * bar:.1f}" y="{base - height:.1f}"'
            body.append(f'<rect {corner} {size} fill="{colour}"/>')
        alone = f"M{left - 2:.1f} {base - over['none'] * scale:.1f}h{len(BARS) * bar + 2:.1f}"
        body.append(f'<path d="{alone}" stroke="{ALONE}" stroke-width="2"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        "<title>Time per step of wfbp, DDP, Horovod and plain MPI</title>"
        "<style>text{font-family:system-ui,sans-serif;font-size:12px}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>' + "\n".join(body) + "</svg>\n"
    )


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "middle",
    bold: bool = False,
    colour: str = "#24292f",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}{weight}>{escape(text)}</text>"
