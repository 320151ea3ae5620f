"""``python -m tests.benchmarks gpu``: packing and training on one CUDA device.

Three parts. *pack*: filling and emptying fusion buffers, against a copy of the same bytes. *one*:
what wrapping an optimizer costs a single rank that exchanges with itself by NCCL, against the bare
optimizer and against PyTorch DDP, which does the same. *two*: two ranks that share the device;
every schedule must train what a plain all-reduce on the host trains, and steps are timed against
DDP, whose ranks share it in the same way. Sharing a device is for correctness: its times say
nothing about two devices.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks.harness import AUTO, NO_COMMUNICATION, Target
from tests.benchmarks.machine import print_table, run_job
from tests.benchmarks.pack import Mix, resnet50_sizes
from wfbp.core.plan import layout
from wfbp.core.types import item_bytes
from wfbp.cuda.pack import CudaKernels, DevicePackTable

if TYPE_CHECKING:
    from tests.benchmarks.harness import Target


ROUND_MS = 2.0

COPY = "device copy, one piece"
PACK = "wfbp, pack"
UNPACK = "wfbp, unpack"

LARGE = Mix("100 MB in 160 tensors", (625_000,) * 160)
TINY = Mix("107 tiny tensors", tuple(size for size in resnet50_sizes() if size <= 8192))
MIXES = (LARGE, Mix("ResNet-50, 161 tensors", tuple(resnet50_sizes())), TINY)


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call over the rounds.

    Args:
        mix: name of what was packed.
        nbytes: its bytes.
        way: who packed it.
        median_us: of the rounds.
        spread_us: between the first and the third quartile.
        of_copy: the way's time over the copy's, median of the rounds' ratios.
    """

    mix: str
    nbytes: int
    way: str
    median_us: float
    spread_us: float
    of_copy: float


def measure(rounds: int) -> list[Timing]:
    """Check and time every way to pack every mix, on the current device."""
    import cupy

    kernels = CudaKernels()
    timings = []
    for mix in MIXES:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            samples = _time(cupy, _ways(cupy, kernels, mix, stream), stream, rounds)
        for way, values in samples.items():
            first, median, third = statistics.quantiles(values, n=4)
            of_copy = statistics.median(
                value / copy for value, copy in zip(values, samples[COPY], strict=True)
            )
            timings.append(Timing(mix.name, sum(mix.sizes), way, median, third - first, of_copy))
    return timings


def _ways(
    cupy: Any, kernels: CudaKernels, mix: Mix, stream: Any
) -> dict[str, Callable[[], object]]:
    """Ways to fill or empty a buffer on a stream, each checked."""
    offsets, nbytes = layout(mix.sizes)
    # Numbers come from the host: CuPy's own would need more of the CUDA toolkit than we do.
    random = np.random.default_rng(0)
    values = [random.standard_normal(size // 4, np.float32) for size in mix.sizes]
    sources = [cupy.asarray(each) for each in values]
    addresses = tuple(source.data.ptr for source in sources)
    buffer, whole = cupy.zeros(nbytes, np.uint8), cupy.zeros(nbytes, np.uint8)

    def table(dtype: str) -> DevicePackTable:
        narrow = 4 // item_bytes(dtype)
        filled = DevicePackTable(
            kernels,
            buffer.data.ptr,
            nbytes,
            offsets,
            [size // narrow for size in mix.sizes],
            dtype,
            stream.ptr,
            "float32",
        )
        filled.pointers[:] = addresses
        return filled

    def pointed(filled: DevicePackTable, act: Callable[[], object]) -> Callable[[], object]:
        """As in a step whose gradients lie elsewhere than those of the step before."""

        def run() -> None:
            filled.pointers[:] = np.fromiter(addresses, np.int64, len(addresses))
            act()

        return run

    packing, casting = table("float32"), table("bfloat16")
    packing.pack()
    for source in sources:
        source.fill(0)
    packing.unpack()
    for source, expected in zip(sources, values, strict=True):
        if not np.array_equal(cupy.asnumpy(source), expected):
            raise RuntimeError(f"{mix.name}: what was packed and unpacked is not what it was")
    kind = cupy.cuda.runtime.memcpyDeviceToDevice
    to, origin = buffer.data.ptr, whole.data.ptr
    return {
        COPY: lambda: cupy.cuda.runtime.memcpyAsync(to, origin, nbytes, kind, stream.ptr),
        PACK: pointed(packing, packing.pack),
        UNPACK: pointed(packing, packing.unpack),
        "wfbp, pack, same addresses": packing.pack,
        "wfbp, pack, scaled by 0.5": lambda: packing.pack(0.5),
        "wfbp, pack, to bfloat16": casting.pack,
        "wfbp, unpack, from bfloat16": casting.unpack,
        **_torch_ways(sources, buffer, offsets, mix, stream),
    }


def _torch_ways(
    sources: list[Any], buffer: Any, offsets: tuple[int, ...], mix: Mix, stream: Any
) -> dict[str, Callable[[], object]]:
    """What PyTorch offers for the same."""
    import torch

    slots = [
        torch.as_tensor(buffer[offset : offset + size].view(np.float32), device="cuda")
        for offset, size in zip(offsets, mix.sizes, strict=True)
    ]
    tensors = [torch.as_tensor(source, device="cuda") for source in sources]
    on_stream = torch.cuda.ExternalStream(stream.ptr)  # type: ignore[no-untyped-call]

    def foreach_copy() -> None:
        with torch.cuda.stream(on_stream):
            torch._foreach_copy_(slots, tensors)

    return {"torch._foreach_copy_": foreach_copy}


def _time(
    cupy: Any, ways: dict[str, Callable[[], object]], stream: Any, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per call of every way in every round."""

    def microseconds(way: Callable[[], object], calls: int) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for _ in range(calls):
            way()
        end.record(stream)
        end.synchronize()
        return 1e3 * float(cupy.cuda.get_elapsed_time(start, end)) / calls

    calls = {}
    for name, way in ways.items():
        way()
        calls[name] = max(1, math.ceil(1e3 * ROUND_MS / microseconds(way, 5)))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            samples[name].append(microseconds(way, calls[name]))
    return samples


DDP = "ddp-25"
TIMED = (NO_COMMUNICATION, DDP, AUTO)
"""Contestants whose steps are timed; the others are only compared."""

ENOUGH_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Training:
    """One model, trained by every contestant.

    Args:
        model: its name.
        title: for tables.
        num_tensors: of its gradient.
        num_bytes: of its gradient.
        num_ranks: that trained together, all on one device.
        step_s: by contestant, seconds per step in each round.
        differences: of parameters from the reference's, by contestant, relative to their norm.
        reports: what wfbp's optimizers know of themselves, by contestant.
    """

    model: str
    title: str
    num_tensors: int
    num_bytes: int
    num_ranks: int
    step_s: dict[str, tuple[float, ...]]
    differences: dict[str, float | None]
    reports: dict[str, dict[str, Any]]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Training:
        """From what :meth:`to_json` made."""
        rounds = {name: tuple(values) for name, values in data["step_s"].items()}
        return cls(**{**data, "step_s": rounds})

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    def ratio(self, name: str, other: str) -> float | None:
        """A contestant's step over another's, median of the rounds; None where one is absent."""
        if name not in self.step_s or other not in self.step_s:
            return None
        pairs = zip(self.step_s[name], self.step_s[other], strict=True)
        return statistics.median(mine / its for mine, its in pairs)


def pack_targets(timings: Sequence[Timing]) -> Iterator[Target]:
    """Bandwidth of large groups, and time of small ones."""
    found = {(timing.mix, timing.way): timing for timing in timings}
    for way in (PACK, UNPACK):
        large, tiny = found[LARGE.name, way], found[TINY.name, way]
        yield Target(LARGE.name, f"{way}: over {COPY}", large.of_copy, 1 / 0.85, True)
        yield Target(TINY.name, f"{way}: microseconds", tiny.median_us, 10.0, True)


def training_targets(runs: Sequence[Training]) -> Iterator[Target]:
    """What wrapping costs; and that nothing is slower than DDP."""
    for run in runs:
        where = f"{run.model}, {run.num_ranks} rank{'s' if run.num_ranks > 1 else ''}"
        judged = [("auto over DDP", run.ratio(AUTO, DDP), 1.0)]
        if run.num_ranks == 1:
            bare = run.ratio(AUTO, NO_COMMUNICATION)
            judged.append(("auto over the bare optimizer", bare, 1.01))
        for what, value, limit in judged:
            if value is not None:
                decided = len(run.step_s[AUTO]) >= ENOUGH_ROUNDS
                yield Target(where, what, value, limit, decided)


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
        print(f"tests.benchmarks gpu: {missing}", file=sys.stderr)
        return 1

    timings: list[Timing] = []
    trainings: list[Training] = []
    if "pack" in options.parts and not options.rehearse:
        timings = measure(options.rounds)
        show_timings(timings)
        write(options, timings, trainings)
    failed = False
    for part, num_ranks in (("one", 1), ("two", 2)):
        for model in options.models if part in options.parts else ():
            training = train(model, num_ranks, options)
            if training is None:
                failed = True
                continue
            trainings.append(training)
            show_training(training)
            write(options, timings, trainings)
    if options.rehearse:
        print("a rehearsal judges nothing")
    else:
        targets = targets_of(timings, trainings)
        show_targets(targets)
        print(verdicts(targets))
    return int(failed)


def targets_of(timings: Sequence[Timing], trainings: Sequence[Training]) -> list[Target]:
    """What was promised of all that was measured."""
    return [*(pack_targets(timings) if timings else ()), *training_targets(trainings)]


def verdicts(targets: Sequence[Target]) -> str:
    """All targets in one line, those that are not met by name.

    Example:
        >>> verdicts([Target("gpt", "auto over DDP", 1.02, 1.0, True)])
        'targets: 0 of 1 met; gpt: auto over DDP 1.020, limit 1.000: missed'
    """
    rest = [target for target in targets if target.verdict != "met"]
    named = [f"{t.model}: {t.what} {t.value:.3f}, limit {t.limit:.3f}: {t.verdict}" for t in rest]
    met = f"targets: {len(targets) - len(rest)} of {len(targets)} met"
    return "; ".join([met, *named])


def write(
    options: argparse.Namespace, timings: Sequence[Timing], trainings: Sequence[Training]
) -> None:
    """Keep what has been measured until now, if there is a file for it."""
    if not options.json:
        return
    targets = [] if options.rehearse else targets_of(timings, trainings)
    document = {
        "benchmark": "gpu",
        "machine": {} if options.rehearse else machine(),
        "pack": [asdict(timing) for timing in timings],
        "training": [training.to_json() for training in trainings],
        "targets": [{**asdict(target), "verdict": target.verdict} for target in targets],
    }
    Path(options.json).write_text(json.dumps(document, indent=2))


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=30, help="per contestant (default: 30)")
    parser.add_argument("--json", help="file for all that was measured, written after each part")
    parser.add_argument(
        "--timed-only",
        action="store_true",
        help="two ranks: only what is timed, not every schedule",
    )
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
    from tests.benchmarks.harness import NO_COMMUNICATION, Settings, is_wfbp
    from tests.benchmarks.torch_contestants import CONTESTANTS, PER_TENSOR
    from tests.benchmarks.training import launch_command, rank_environment

    if num_ranks == 1:
        contestants = [PER_TENSOR, *TIMED]
    else:
        timed = [name for name in TIMED if name != NO_COMMUNICATION]
        schedules = [name for name in CONTESTANTS if is_wfbp(name) and name not in timed]
        contestants = [PER_TENSOR, *timed, *(() if options.timed_only else schedules)]
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
        program = [sys.executable, "-m", "tests.benchmarks.gpu_worker", str(file), device]
        command = [*launch_command("none", num_ranks), *program]
        own = {"WFBP_EXCHANGE_ALONE": "1"}  # else a single rank would exchange nothing
        if options.rehearse:
            own["WFBP_TRIAL_STEPS"] = "1"
        status = run_job(command, rank_environment() | own, TIMEOUT_S)
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
    from tests.benchmarks.harness import NO_COMMUNICATION

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
