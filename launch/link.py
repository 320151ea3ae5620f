#!/usr/bin/env python3
"""A real slow link on one machine: two network namespaces joined by a rate-limited veth pair.

    link.py run --rate 1gbit -np 2 -- python train.py    an MPI job whose ranks meet over the link
    link.py up --rate 1gbit ; ... ; link.py down         the link alone, for other programs

Half of the ranks live in each namespace. ``run`` makes a link of its own, removes it however it
ends, and fails where fewer bytes crossed it than ``--expect-bytes``: MPI libraries like to find
shared memory behind one's back, and then the link carries nothing but the start of the job while
the program runs well.
Needs root, iproute2 and an MPICH whose ``ofi`` module is built in (the wheel's is).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERFACE = "wl0"
SUBNET = "10.99.{}.{}"
BURST = "256kb"
LATENCY = "50ms"
EXPECTED_BYTES = 1_000_000  # more than starting a job takes, less than a benchmark sends


class LinkError(RuntimeError):
    """The link could not be made, or did not carry what it should have."""


@dataclass(frozen=True)
class Link:
    """Two namespaces, one address in each.

    Args:
        name: prefix of the namespaces' names.
        subnet: third byte of the addresses; two links at once need two subnets only for
            people's sake, since namespaces do not see each other.
    """

    name: str
    subnet: int = 7

    @property
    def namespaces(self) -> tuple[str, str]:
        return f"{self.name}-a", f"{self.name}-b"

    @property
    def addresses(self) -> tuple[str, str]:
        return SUBNET.format(self.subnet, 1), SUBNET.format(self.subnet, 2)

    def up(self, rate: str) -> None:
        """Make the link; on failure nothing is left behind."""
        first, second = self.namespaces
        taken = sorted(set(self.namespaces) & existing_namespaces())
        if taken:
            raise LinkError(f"{', '.join(taken)} exists already: link.py down --name {self.name}")
        try:
            for namespace in self.namespaces:
                ip("netns", "add", namespace)
            veth = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
            ip("link", "add", INTERFACE, "netns", first, *veth)
            for namespace, address in zip(self.namespaces, self.addresses, strict=True):
                ip("-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
                ip("-n", namespace, "link", "set", "lo", "up")
                ip("-n", namespace, "link", "set", INTERFACE, "up")
                limit = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
                shaper = ("tc", "qdisc", "add", "dev", INTERFACE, "root", *limit)
                command(*inside(namespace), *shaper)
            self.wait_for_carrier()
        except LinkError:
            self.down()
            raise

    def wait_for_carrier(self, timeout_s: float = 10.0) -> None:
        """Wait until both ends report a carrier: the kernel takes up to a second to say so, and
        until then MPICH binds to the loopback interface and fails."""
        deadline = time.monotonic() + timeout_s
        for namespace in self.namespaces:
            while "state UP" not in (seen := ip("-n", namespace, "link", "show", INTERFACE)):
                if time.monotonic() > deadline:
                    raise LinkError(f"no carrier in {namespace} after {timeout_s} s: {seen}")
                time.sleep(0.02)

    def down(self) -> None:
        """End what still runs inside, and remove the namespaces that exist."""
        for namespace in set(self.namespaces) & existing_namespaces():
            for process in ip("netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "delete", namespace)

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that each side has put on the link so far."""
        first, second = (
            transmitted(command(*inside(namespace), "cat", "/proc/net/dev"))
            for namespace in self.namespaces
        )
        return first, second

    def mpi_command(self, launcher: Path, mpiexec: str, ranks: int) -> list[str]:
        """The start of an ``mpiexec`` command line that puts half of the ranks on each side."""
        options = ["-hosts", ",".join(self.addresses), "-iface", INTERFACE]
        options += ["-launcher", "ssh", "-launcher-exec", str(launcher)]
        options += ["-n", str(ranks), "-ppn", str(max(1, -(-ranks // 2)))]
        return [*inside(self.namespaces[0]), mpiexec, *options]

    def environment(self) -> dict[str, str]:
        """Variables that keep MPICH, gloo and NCCL on the link."""
        return {
            # MPICH's default (UCX) reaches the other side through host memory.
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.addresses[0],
        }

    def launcher_script(self) -> str:
        """What hydra calls instead of ssh: ``LAUNCHER [-x] HOST COMMAND...``."""
        cases = "\n".join(
            f"  {address}) namespace={namespace} ;;"
            for address, namespace in zip(self.addresses, self.namespaces, strict=True)
        )
        return (
            '#!/bin/sh\nif [ "$1" = -x ]; then shift; fi\nhost=$1\nshift\n'
            f'case "$host" in\n{cases}\n  *) echo "no namespace for $host" >&2; exit 1 ;;\nesac\n'
            'exec ip netns exec "$namespace" /bin/sh -c "$*"\n'
        )


def command(*words: str) -> str:
    """The output of a command.

    Raises:
        LinkError: it failed; the message has what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"{shlex.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def ip(*words: str) -> str:
    """The output of an ``ip`` command."""
    return command("ip", *words)


def inside(namespace: str) -> tuple[str, ...]:
    """The words that run what follows inside a namespace."""
    return "ip", "netns", "exec", namespace


def existing_namespaces() -> set[str]:
    """Names of the namespaces that exist now."""
    return {line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()}


def transmitted(net_dev: str) -> int:
    """Bytes sent by the link's interface in the text of ``/proc/net/dev``."""
    for line in net_dev.splitlines():
        label, _, counters = line.partition(":")
        if label.strip() == INTERFACE:
            return int(counters.split()[8])
    raise LinkError(f"no interface {INTERFACE!r} in the namespace: is the link up?")


def require_root_and_tools() -> None:
    """Refuse early, with the reason.

    Raises:
        LinkError: not root, or a program is missing.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root: run as root")


def find_mpiexec() -> str:
    """The ``mpiexec`` beside this Python, else the one on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise LinkError("mpiexec not found: pip install mpich")
    return found


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Turn the signals that end a job into an exception, so that clean-up runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run(rate: str, ranks: int, program: Sequence[str], expect_bytes: int) -> int:
    """Run an MPI program over a link of its own; its exit status.

    Raises:
        LinkError: no link, or fewer than ``expect_bytes`` crossed it in either direction.
    """
    mpiexec = find_mpiexec()
    link = Link(f"wfbp{os.getpid()}")
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="wfbp-link-") as directory:
        launcher = Path(directory) / "launcher"
        launcher.write_text(link.launcher_script())
        launcher.chmod(0o755)
        try:
            link.up(rate)
            words = [*link.mpi_command(launcher, mpiexec, ranks), *program]
            status = subprocess.run(
                words, env=os.environ | link.environment(), check=False
            ).returncode
            sent = link.sent_bytes()
        finally:
            link.down()
    print(f"link: {sent[0]} and {sent[1]} bytes crossed at {rate}", file=sys.stderr)
    if status == 0 and min(sent) < expect_bytes:
        raise LinkError(
            f"{sent[0]} and {sent[1]} bytes crossed the link, expected at least {expect_bytes} "
            "each way: the ranks spoke to each other by another road"
        )
    return status


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("up", "down", "run"):
        sub = actions.add_parser(action)
        if action != "run":
            sub.add_argument("--name", default="wfbp", help="prefix of the namespaces")
        if action != "down":
            sub.add_argument("--rate", default="1gbit", help="of each direction, as tc writes it")
        if action == "run":
            sub.add_argument("-np", type=int, default=2, help="number of ranks")
            told = "each way, at least (default: %(default)s)"
            sub.add_argument("--expect-bytes", type=int, default=EXPECTED_BYTES, help=told)
            sub.add_argument("program", nargs=argparse.REMAINDER, help="-- program arguments")
    parsed = parser.parse_args(words)
    if parsed.action == "run":
        if parsed.program[:1] == ["--"]:
            parsed.program = parsed.program[1:]
        if not parsed.program:
            parser.error("run needs a program after --")
    return parsed


def main() -> int:
    """Exit status 0, the program's own, or 1 with the reason on standard error."""
    options = arguments()
    try:
        require_root_and_tools()
        if options.action == "up":
            link = Link(options.name)
            link.up(options.rate)
            for namespace, address in zip(link.namespaces, link.addresses, strict=True):
                print(f"{address} in namespace {namespace}, interface {INTERFACE}")
        elif options.action == "down":
            Link(options.name).down()
        else:
            return run(options.rate, options.np, options.program, options.expect_bytes)
    except LinkError as error:
        print(f"link.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"link.py: stopped by {stop or 'SIGINT'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
