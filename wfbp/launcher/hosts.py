"""Hosts and their slots: from the command line, a hostfile, or a batch system's allocation."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_RANKS = 2**24
"""More ranks than any machine has."""


def count(place: str, text: str, most: int = MOST_RANKS) -> int:
    """A number from outside, up to ``most``; ``ValueError`` names its place."""
    # By length first: int() raises an error of its own above 4,300 digits.
    if not text.isdecimal() or len(text) > 20 or int(text) > most:
        raise ValueError(f"{place}: expected a number of at most {most}, found {text[:40]!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    slots: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", self.name):
            raise ValueError(f"{self.name!r} is not a host name")
        if not 1 <= self.slots <= MOST_RANKS:
            raise ValueError(
                f"host {self.name} has {self.slots} slots; expected at least 1 and at most "
                f"{MOST_RANKS}"
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"

    @property
    def is_local(self) -> bool:
        own = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0])


def interfaces() -> dict[str, str]:
    """Names of this host's network interfaces that are up, by IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found[socket.inet_ntoa(reply[20:24])] = name
    return found


MPI_HOSTFILE = "mpirun's default host file"
"""The system of an allocation if only MPI's own variable names a host file."""

_HOST_FILES = {
    "PBS_NODEFILE": "PBS",
    "LSB_DJOB_HOSTFILE": "LSF",
    "PE_HOSTFILE": "Grid Engine",
    # Set by an administrator, or by the MPI operator of Kubernetes.
    "HYDRA_HOST_FILE": MPI_HOSTFILE,
    "I_MPI_HYDRA_HOST_FILE": MPI_HOSTFILE,
    "OMPI_MCA_orte_default_hostfile": MPI_HOSTFILE,
    "PRTE_MCA_prte_default_hostfile": MPI_HOSTFILE,
}
"""Variables that name a host file, and the batch system that sets them."""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts of ``-H a:4,b:4``; slots of repeated hosts add up. ``ValueError`` for other texts."""
    slots = Counter[str]()
    for part in map(str.strip, text.split(",")):
        name, colon, number = part.rpartition(":")
        if not colon:
            name, number = part, "1"
        if not number.isdecimal() or not name:
            raise ValueError(f"{part!r} in {text!r} is not HOST or HOST:SLOTS")
        slots[name] += Host(name, count(f"slots of {name}", number)).slots
    return tuple(Host(name, number) for name, number in slots.items())


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Hosts, one a line: ``a``, ``a:4``, ``a slots=4`` or ``a 4 QUEUE``; else ``ValueError``."""
    try:
        lines = Path(path).read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text file: it should name a host in each line") from None
    parts: list[str] = []
    for number, line in enumerate(lines, 1):
        name, rest = [*line.partition("#")[0].split(maxsplit=1), "", ""][:2]
        if not name:
            continue
        try:
            # A word of its own: Open MPI's `max-slots=8` is another number.
            slots = re.search(r"(?<!\S)slots\s*=\s*(\S+)", rest) or re.match(r"(\d+)(?!\S)", rest)
            if rest and not slots:
                raise ValueError(f"{rest.strip()!r} is not slots=N")
            parts += map(str, parse_hosts(f"{name}:{slots[1]}" if slots else name))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not parts:
        raise ValueError(f"{path} names no host")
    return parse_hosts(",".join(parts))


def choose_master(hosts: Sequence[Host]) -> str:
    """A HOST:PORT for rank 0's store of torch.distributed; the port is free here."""
    name = hosts[0].name if hosts else "localhost"
    if all(host.is_local for host in hosts):
        name = "127.0.0.1"
    elif hosts[0].is_local:
        name = socket.gethostname() if name in ("localhost", "127.0.0.1", "::1") else name
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{name}:{probe.getsockname()[1]}"


def allocation(environment: Mapping[str, str]) -> tuple[str, tuple[Host, ...]]:
    """The batch system that this job runs under, and the hosts that it granted.

    Outside of one both are empty. ``ValueError`` if the hosts are unreadable.
    """
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        return "Slurm", _slurm(nodes, environment)
    for variable, system in _HOST_FILES.items():
        path = environment.get(variable)
        if path and (system != MPI_HOSTFILE or Path(path).exists()):
            return system, read_hostfile(path)
    return "", ()


_MOST_NODES = 2**20


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node: "4(x2),3" is [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None or len(counts) > _MOST_NODES:
            raise ValueError(f"{text[:40]!r} is not a list of Slurm's tasks per node")
        place = f"tasks per node in {text[:40]!r}"
        counts += [count(place, match[1])] * count(place, match[2] or "1", _MOST_NODES)
    return counts


def _slurm(nodes: str, environment: Mapping[str, str]) -> tuple[Host, ...]:
    names = nodes.split(",")
    if "[" in nodes:  # such as n[01-02,05],login
        words = ["scontrol", "show", "hostnames", nodes]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30.0)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(
                f"Slurm's scontrol does not expand the node list {nodes!r} ({error}); name the "
                "hosts by -H or --hostfile"
            ) from None
        names = done.stdout.split()
    # Without a number of tasks Slurm grants processors, and starts one task for each by default.
    text = environment.get("SLURM_TASKS_PER_NODE") or environment.get("SLURM_JOB_CPUS_PER_NODE")
    counts = expand_counts(text) if text else [1] * len(names)
    if len(counts) != len(names):
        raise ValueError(
            f"Slurm names {len(names)} nodes in {nodes!r}, and numbers of tasks for {len(counts)} "
            f"in {text!r}"
        )
    return tuple(map(Host, names, counts))
