"""The emulated link: what it launches, what it counts, and that it cleans up after itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.launcher import interpreter, needs_namespaces

SCRIPT = Path(__file__).parents[3] / "tools" / "link.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("link", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["link"] = module
    spec.loader.exec_module(module)
    return module


link = load()


def test_half_of_the_ranks_on_each_side() -> None:
    words = link.Link("x").mpi_command(Path("/l"), "mpiexec", 4)
    assert words[:4] == ["ip", "netns", "exec", "x-a"]
    assert words[words.index("-n") + 1] == "4"
    assert words[words.index("-ppn") + 1] == "2"
    assert words[words.index("-hosts") + 1] == "10.99.7.1,10.99.7.2"
    words = link.Link("x", num_hosts=3).mpi_command(Path("/l"), "mpiexec", 7)
    assert words[words.index("-ppn") + 1] == "3"
    assert words[words.index("-hosts") + 1] == "10.99.7.1,10.99.7.2,10.99.7.3"
    words = link.Link("x").mpi_command(Path("/l"), "mpiexec", 4, open_mpi=True)
    assert words[words.index("--host") + 1] == "10.99.7.1:2,10.99.7.2:2"
    assert words[words.index("plm_ssh_agent") + 1] == "/l"
    for count in (1, 5):
        with pytest.raises(link.LinkError, match="expected 2 to 4"):
            link.Link("x", num_hosts=count)


@pytest.mark.parametrize(
    ("own", "hosts", "shares"),
    [
        ({4, 5}, 2, ["4", "5"]),
        ({0, 1, 2, 3, 4}, 2, ["0,2,4", "1,3"]),
        ({0, 1}, 4, ["0", "1", "0", "1"]),
        ({7}, 3, ["7", "7", "7"]),
    ],
)
def test_hosts_share_the_cores(
    own: set[int], hosts: int, shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that saw cores of other hosts would expect to have one to spare."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
    made = link.Link("x", num_hosts=hosts)
    assert [made.cores(host) for host in range(hosts)] == shares
    words = made.mpi_command(Path("/l"), "mpiexec", hosts)
    assert words[words.index("taskset") : words.index("unshare")] == ["taskset", "-c", shares[0]]


def test_bytes_are_read_from_the_transmit_column() -> None:
    text = "  lo: 5 5 0 0 0 0 0 0 6 6 0 0 0 0 0 0\n wl0: 1 2 3 4 5 6 7 8 99 1 0 0 0 0 0 0\n"
    assert link.transmitted(text) == 99
    with pytest.raises(link.LinkError, match="wl0"):
        link.transmitted("  lo: 5 5 0 0 0 0 0 0 6 6 0 0 0 0 0 0\n")


@pytest.mark.parametrize("option", [[], ["-x"], ["-x", "-q"]])
def test_launcher_maps_a_host_to_its_namespace(tmp_path: Path, option: list[str]) -> None:
    (tmp_path / "ip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "launcher").write_text(link.Link("x").launcher_script())
    for name in ("ip", "launcher"):
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def launch(host: str) -> subprocess.CompletedProcess[str]:
        words = [str(tmp_path / "launcher"), *option, host, "proxy", "--port", "1"]
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    cores = link.Link("x").cores(1)
    told = f"netns exec x-b taskset -c {cores} "
    told += "unshare --uts /bin/sh -c hostname x-b; proxy --port 1\n"
    assert launch("10.99.7.2").stdout == told
    assert launch("elsewhere").returncode == 1


def test_refuses_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(link.LinkError, match="root"):
        link.require_root_and_tools()


@needs_namespaces
def test_up_carries_bytes_and_down_leaves_nothing() -> None:
    made = link.Link(f"wfbp-test-{os.getpid()}")
    made.up("1gbit")
    try:
        with pytest.raises(link.LinkError, match="exists already"):
            made.up("1gbit")
        first = made.sent_bytes()[0]
        receiver = (
            "import socket; s = socket.create_server(('', 5000)); print(flush=True)\n"
            "c = s.accept()[0]\nwhile c.recv(65536): pass"
        )
        sender = f"import socket; socket.create_connection(('{made.addresses[1]}', 5000))"
        listening = subprocess.Popen(
            [*link.inside(made.namespaces[1]), sys.executable, "-c", receiver],
            stdout=subprocess.PIPE,
        )
        with listening:
            assert listening.stdout is not None
            listening.stdout.readline()
            send = (sys.executable, "-c", sender + ".sendall(bytes(10**6))")
            link.command(*link.inside(made.namespaces[0]), *send)
            assert listening.wait(timeout=60) == 0
        assert made.sent_bytes()[0] - first > 10**6
    finally:
        made.down()
    assert not set(made.namespaces) & link.existing_namespaces()


MPI_PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
data = np.zeros(int(sys.argv[1]), np.uint8)
everybody = MPI.COMM_WORLD
for root in range(everybody.size):
    everybody.Bcast(data, root=root)
"""


@needs_namespaces
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("mpi", "options", "sent_bytes", "status"),
    [
        ("mpich", [], 1, 0),  # a small program
        ("mpich", ["--expect-bytes", "4000000"], 3_000_000, 1),
        ("mpich", ["--hosts", "4", "-np", "4", "--rate", "unlimited"], 3_000_000, 0),
        ("openmpi", ["--expect-bytes", "1000000"], 3_000_000, 0),
    ],
)
def test_a_run_fails_if_fewer_bytes_cross_than_expected(
    mpi: str, options: list[str], sent_bytes: int, status: int
) -> None:
    """Ranks that only start over the link put some bytes on it, too."""
    try:
        python = str(interpreter(mpi))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    words = [python, str(SCRIPT), "run", *options, "--", python, "-c", MPI_PROGRAM]
    done = subprocess.run(
        [*words, str(sent_bytes)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert ("the program sends less, or MPI" in done.stderr) == (status == 1)


@needs_namespaces
@pytest.mark.timeout(150)
def test_a_terminated_run_leaves_nothing() -> None:
    if shutil.which("mpiexec") is None and not Path(sys.executable).with_name("mpiexec").exists():
        pytest.skip("needs mpiexec")
    words = [sys.executable, str(SCRIPT), "run", "--rate", "1gbit", "--", "sleep", "50"]
    running = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    own = set(link.Link(f"wfbp{running.pid}").namespaces)  # other tests may have theirs
    while not own <= link.existing_namespaces() or not all(
        link.ip("netns", "pids", name) for name in own
    ):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=60) == 130
    assert not own & link.existing_namespaces()
