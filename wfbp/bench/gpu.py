"""``python -m wfbp.bench gpu``: packing and training on one CUDA device.

Three parts. *pack*: filling and emptying fusion buffers, against a copy of the same bytes. *one*:
what wrapping an optimizer costs a single rank, against the bare optimizer and against PyTorch DDP
on NCCL. *two*: two ranks that share the device; every schedule must train what a plain all-reduce
on the host trains, and steps are timed against DDP, whose ranks share it in the same way. Sharing
a device is for correctness: its times say nothing about two devices.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from wfbp.bench import child
from wfbp.bench.tables import print_table

if TYPE_CHECKING:
    from wfbp.bench.gpu_pack import Timing
    from wfbp.bench.gpu_targets import Training
    from wfbp.bench.training_targets import Target

PARTS = ("pack", "one", "two")
MODELS = ("resnet50", "gpt")
REHEARSED = "mlp-tiny"
TIMEOUT_S = 1800
PACKAGES = ("wfbp", "torch", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def main(words: Sequence[str]) -> int:
    """Run the parts, print tables and targets; exit status 1 where it could not."""
    options = arguments(words)
    missing = "" if options.rehearse else lacking()
    if missing:
        print(f"wfbp.bench gpu: {missing}", file=sys.stderr)
        return 1
    from wfbp.bench import gpu_pack, gpu_targets

    timings: list[Timing] = []
    trainings: list[Training] = []
    if "pack" in options.parts and not options.rehearse:
        timings = gpu_pack.measure(options.rounds)
        show_timings(timings)
    for part, num_ranks in (("one", 1), ("two", 2)):
        for model in options.models if part in options.parts else ():
            training = train(model, num_ranks, options)
            if training is None:
                return 1
            trainings.append(training)
            show_training(training)
    targets: list[Target] = []
    if not options.rehearse:
        targets += gpu_targets.pack_targets(timings) if timings else ()
        targets += gpu_targets.training_targets(trainings)
        show_targets(targets)
    if options.json:
        document = {
            "benchmark": "gpu",
            "machine": {} if options.rehearse else machine(),
            "pack": [asdict(timing) for timing in timings],
            "training": [training.to_json() for training in trainings],
            "targets": [{**asdict(target), "verdict": target.verdict} for target in targets],
        }
        Path(options.json).write_text(json.dumps(document, indent=2))
    return 0


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m wfbp.bench gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=30, help="per contestant (default: 30)")
    parser.add_argument("--json", help="file for all that was measured")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="train a tiny model on the CPU instead: shows that the ranks start and agree",
    )
    options = parser.parse_args(words)
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}: expected at least 2")
    if options.rehearse:
        options.models = [REHEARSED]
    return options


def lacking() -> str:
    """What is missing for a run on a GPU; empty where nothing is."""
    for package in ("cupy", "torch"):
        if find_spec(package) is None:
            return f"{package} is not installed: pip install 'wfbp[cuda12,torch]' (or cuda13)"
    import cupy
    import torch

    if not cupy.cuda.is_available():
        return "CuPy finds no CUDA device; this benchmark needs one"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device: install a build of it for CUDA"
    return ""


def train(model: str, num_ranks: int, options: argparse.Namespace) -> Training | None:
    """Start the ranks for one model; None where they failed (they have said why)."""
    from wfbp.bench.gpu_targets import TIMED, Training
    from wfbp.bench.training import launch_command, rank_environment
    from wfbp.bench.training_contestants import (
        CONTESTANTS,
        NO_COMMUNICATION,
        PER_TENSOR,
        is_wfbp,
    )
    from wfbp.bench.training_settings import Settings

    if num_ranks == 1:
        contestants = [PER_TENSOR, *TIMED]
    else:
        timed = [name for name in TIMED if name != NO_COMMUNICATION]
        schedules = [name for name in CONTESTANTS if is_wfbp(name) and name not in timed]
        contestants = [PER_TENSOR, *timed, *schedules]
        model = model if options.rehearse else f"{model}-small"
    with tempfile.TemporaryDirectory(prefix="wfbp-bench-") as directory:
        result, file = Path(directory, "result.json"), Path(directory, "settings.json")
        Settings(
            model=model,
            contestants=tuple(contestants),
            iterations=options.rounds,
            patience=1.0,
            max_foreign_cores=1.0,
            warm_up_steps=400,
            link="none",
            interface="",
            result=str(result),
        ).save(file)
        device = "cpu" if options.rehearse else "cuda"
        program = [sys.executable, "-m", "wfbp.bench.gpu_worker", str(file), device]
        command = [*launch_command("none", num_ranks), *program]
        status = child.run(command, rank_environment(), TIMEOUT_S)
        if status or not result.exists():
            told = shlex.join(command)
            print(f"{model}: failed with status {status}: {told}", file=sys.stderr)
            return None
        return Training.from_json(json.loads(result.read_text()))


def machine() -> dict[str, str]:
    """What it was measured on."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    found = {
        "gpu": properties["name"].decode(),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "cuda": str(cupy.cuda.runtime.runtimeGetVersion()),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def show_timings(timings: Sequence[Timing]) -> None:
    """A table per mix."""
    for mix in dict.fromkeys(timing.mix for timing in timings):
        mine = [timing for timing in timings if timing.mix == mix]
        print_table(
            f"{mix}, {mine[0].nbytes / 1e6:.2f} MB",
            ("way", "median us", "spread", "GB/s", "of copy's time"),
            [
                (
                    timing.way,
                    f"{timing.median_us:.1f}",
                    f"{timing.spread_us:.1f}",
                    f"{timing.nbytes / timing.median_us / 1e3:.0f}",
                    f"{timing.of_copy:.2f}",
                )
                for timing in mine
            ],
        )


def show_training(training: Training) -> None:
    """A table of a model's contestants."""
    from wfbp.bench.gpu_targets import DDP
    from wfbp.bench.training_contestants import NO_COMMUNICATION

    rows = []
    for name, difference in training.differences.items():
        steps = training.step_s.get(name)
        time = "-" if steps is None else f"{1e3 * statistics.median(steps):.2f}"
        ratios = [training.ratio(name, other) for other in (NO_COMMUNICATION, DDP)]
        shown = ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        rows.append((name, time, *shown, "-" if difference is None else f"{difference:.0e}"))
    ranks = "one rank" if training.num_ranks == 1 else f"{training.num_ranks} ranks on one device"
    print_table(
        f"{training.title}: {training.num_tensors} tensors, {training.num_bytes / 1e6:.1f} MB, "
        f"{ranks}",
        ("contestant", "median ms", "of bare", "of DDP", "difference"),
        rows,
    )


def show_targets(targets: Sequence[Target]) -> None:
    """What was promised, and what came of it."""
    print_table(
        "targets",
        ("where", "what", "measured", "limit", "verdict"),
        [(t.model, t.what, f"{t.value:.3f}", f"{t.limit:.3f}", t.verdict) for t in targets],
    )
