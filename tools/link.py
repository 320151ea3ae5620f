#!/usr/bin/env python3
"""Real slow links on one machine: network namespaces as hosts, joined by rate-limited veth pairs.

    link.py run --rate 1gbit -np 2 -- python train.py    an MPI job whose ranks meet over the link
    link.py run --hosts 4 -np 4 -- python train.py       four hosts, joined by a switch
    link.py up --rate 1gbit ; ... ; link.py down         the link alone, for other programs

Each namespace has as many of the ranks. Two are joined by one link. Three or four are joined to a
switch (a bridge in a further namespace) by links of that rate. ``run`` makes its own links, removes
them however it ends, and prints how many bytes each host has sent. With ``--expect-bytes`` it fails
if a host has sent fewer. Benchmarks use this, since an MPI library that finds shared memory leaves
the link idle while the program runs well. ``--rate unlimited`` sets no limit.

Needs root, iproute2, util-linux, and MPICH whose ``ofi`` module is built in (the wheel's is) or
Open MPI 5: whichever ``mpiexec`` is beside the Python that runs this.
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
MOST_HOSTS = 4
BURST = "256kb"
LATENCY = "50ms"
UNLIMITED = "unlimited"


class LinkError(RuntimeError):
    """The link could not be made, or did not carry what it should have."""


@dataclass(frozen=True)
class Link:
    """Some namespaces, one address in each.

    Args:
        name: prefix of the namespaces' names.
        subnet: third byte of the addresses; two links at once need two subnets only for
            people's sake, since namespaces do not see each other.
        num_hosts: how many namespaces, from 2 to 4.
    """

    name: str
    subnet: int = 7
    num_hosts: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.num_hosts <= MOST_HOSTS:
            raise LinkError(f"{self.num_hosts} hosts were asked for; expected 2 to {MOST_HOSTS}")

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{letter}" for letter in "abcd"[: self.num_hosts])

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(SUBNET.format(self.subnet, host + 1) for host in range(self.num_hosts))

    @property
    def switch(self) -> str:
        """The namespace of the switch between more than two hosts."""
        return f"{self.name}-switch"

    def up(self, rate: str) -> None:
        """Make the links; on failure nothing is left behind."""
        own = {*self.namespaces, *([self.switch] if self.num_hosts > 2 else [])}
        taken = sorted(own & existing_namespaces())
        if taken:
            raise LinkError(f"{', '.join(taken)} exists already: link.py down --name {self.name}")
        try:
            for namespace in sorted(own):
                ip("netns", "add", namespace)
            if self.num_hosts == 2:
                first, second = self.namespaces
                join(first, INTERFACE, second, INTERFACE)
            else:
                self._plug_into_switch(rate)
            for namespace, address in zip(self.namespaces, self.addresses, strict=True):
                ip("-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
                ip("-n", namespace, "link", "set", "lo", "up")
                ip("-n", namespace, "link", "set", INTERFACE, "up")
                limit_rate(namespace, INTERFACE, rate)
            self.wait_for_carrier()
        except LinkError:
            self.down()
            raise

    def _plug_into_switch(self, rate: str) -> None:
        """Give each host a link to one bridge, whose ports send at the rate of a link, too."""
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        for number, namespace in enumerate(self.namespaces):
            port = f"port{number}"
            join(namespace, INTERFACE, self.switch, port)
            ip("-n", self.switch, "link", "set", port, "master", "switch", "up")
            limit_rate(self.switch, port, rate)
        ip("-n", self.switch, "link", "set", "switch", "up")

    def wait_for_carrier(self, timeout_s: float = 10.0) -> None:
        """Wait until all ends report a carrier: the kernel takes up to a second to say so, and
        until then MPICH binds to the loopback interface and fails."""
        deadline = time.monotonic() + timeout_s
        for namespace in self.namespaces:
            while "state UP" not in (seen := ip("-n", namespace, "link", "show", INTERFACE)):
                if time.monotonic() > deadline:
                    raise LinkError(f"no carrier in {namespace} after {timeout_s} s: {seen}")
                time.sleep(0.02)

    def down(self) -> None:
        """End what still runs inside, and remove the namespaces that exist."""
        # Of a link that `up` made, also where `down` does not know how many hosts it has.
        possible = {f"{self.name}-{letter}" for letter in "abcd"} | {self.switch}
        for namespace in possible & existing_namespaces():
            for process in ip("netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "delete", namespace)

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each host has put on its link so far."""
        return tuple(
            transmitted(command(*inside(namespace), "cat", "/proc/net/dev"))
            for namespace in self.namespaces
        )

    def mpi_command(
        self, launcher: Path, mpiexec: str, ranks: int, open_mpi: bool = False
    ) -> list[str]:
        """The start of an ``mpiexec`` command line that gives each host as many of the ranks."""
        ranks_per_host = max(1, -(-ranks // self.num_hosts))
        if open_mpi:
            hosts = ",".join(f"{address}:{ranks_per_host}" for address in self.addresses)
            options = ["--host", hosts, "--allow-run-as-root", "--bind-to", "none"]
            options += ["--prtemca", "plm_ssh_agent", str(launcher)]
            options += ["--prtemca", "prte_if_include", INTERFACE, "-n", str(ranks)]
        else:
            options = ["-hosts", ",".join(self.addresses), "-iface", INTERFACE]
            options += ["-launcher", "ssh", "-launcher-exec", str(launcher)]
            options += ["-n", str(ranks), "-ppn", str(ranks_per_host)]
        start = with_hostname(self.namespaces[0], self.cores(0))
        return [*inside(self.namespaces[0]), *start, mpiexec, *options]

    def environment(self) -> dict[str, str]:
        """Variables that keep MPI libraries, gloo and NCCL on the link."""
        return {
            # MPICH's default (UCX) reaches the other side through host memory.
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": INTERFACE,
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.addresses[0],
        }

    def cores(self, host: int) -> str:
        """The cores of a host, as ``taskset`` takes them: its share, at least one."""
        own = sorted(os.sched_getaffinity(0))
        return ",".join(map(str, own[host % len(own) :: self.num_hosts]))

    def launcher_script(self) -> str:
        """The program that replaces ssh: ``LAUNCHER [OPTION...] HOST COMMAND...``."""
        cases = "\n".join(
            f"  {address}) namespace={namespace} cores={self.cores(host)} ;;"
            for host, (address, namespace) in enumerate(
                zip(self.addresses, self.namespaces, strict=True)
            )
        )
        return (
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\n'
            f'case "$host" in\n{cases}\n  *) echo "no namespace for $host" >&2; exit 1 ;;\nesac\n'
            'exec ip netns exec "$namespace" taskset -c "$cores" '
            'unshare --uts /bin/sh -c "hostname $namespace; $*"\n'
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


def join(first: str, interface: str, second: str, other: str) -> None:
    """A cable from an interface of one namespace to one of another."""
    veth = ("type", "veth", "peer", "name", other, "netns", second)
    ip("link", "add", interface, "netns", first, *veth)


def limit_rate(namespace: str, interface: str, rate: str) -> None:
    """Let an interface send no faster than this, or as fast as it can if ``unlimited``."""
    if rate == UNLIMITED:
        return
    limit = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
    command(*inside(namespace), "tc", "qdisc", "add", "dev", interface, "root", *limit)


def ip(*words: str) -> str:
    """The output of an ``ip`` command."""
    return command("ip", *words)


def inside(namespace: str) -> tuple[str, ...]:
    """The words that run what follows inside a namespace."""
    return "ip", "netns", "exec", namespace


def with_hostname(namespace: str, cores: str) -> tuple[str, ...]:
    """The words that run what follows on its host's cores, with the name of its host: Open MPI uses
    shared memory among processes whose hosts have the same name."""
    return (
        "taskset",
        "-c",
        cores,
        "unshare",
        "--uts",
        "/bin/sh",
        "-c",
        f'hostname {namespace} && exec "$@"',
        "sh",
    )


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


def run(
    rate: str, ranks: int, program: Sequence[str], expect_bytes: int, num_hosts: int = 2
) -> int:
    """Run an MPI program over links of its own; its exit status.

    Raises:
        LinkError: no links, or some host has sent fewer than ``expect_bytes``.
    """
    mpiexec = find_mpiexec()
    link = Link(f"wfbp{os.getpid()}", num_hosts=num_hosts)
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="wfbp-link-") as directory:
        launcher = Path(directory) / "launcher"
        launcher.write_text(link.launcher_script())
        launcher.chmod(0o755)
        try:
            link.up(rate)
            open_mpi = "Open MPI" in command(mpiexec, "--version")
            words = [*link.mpi_command(launcher, mpiexec, ranks, open_mpi), *program]
            status = subprocess.run(
                words, env=os.environ | link.environment(), check=False
            ).returncode
            sent = link.sent_bytes()
        finally:
            link.down()
    told = f"{', '.join(map(str, sent[:-1]))} and {sent[-1]} bytes"
    print(f"link: {told} crossed at {rate}", file=sys.stderr)
    if status == 0 and min(sent) < expect_bytes:
        raise LinkError(
            f"{told} crossed the link, expected at least {expect_bytes} each way "
            "(--expect-bytes): the program sends less, or MPI has used shared memory"
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
            told = "namespaces that are joined (default: %(default)s)"
            counts = range(2, MOST_HOSTS + 1)
            sub.add_argument("--hosts", type=int, choices=counts, default=2, help=told)
            sub.add_argument("--rate", default="1gbit", help="of each direction, as tc writes it")
        if action == "run":
            sub.add_argument("-np", type=int, default=2, help="number of ranks")
            told = "fail if a host has sent fewer"
            sub.add_argument("--expect-bytes", type=int, default=0, help=told)
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
            link = Link(options.name, num_hosts=options.hosts)
            link.up(options.rate)
            for namespace, address in zip(link.namespaces, link.addresses, strict=True):
                print(f"{address} in namespace {namespace}, interface {INTERFACE}")
        elif options.action == "down":
            Link(options.name).down()
        else:
            sent = options.program, options.expect_bytes
            return run(options.rate, options.np, *sent, options.hosts)
    except LinkError as error:
        print(f"link.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"link.py: stopped by {str(stop) or 'SIGINT'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
