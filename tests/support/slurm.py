"""A Slurm of one node, on this machine alone: its own key, sockets, ports and folders."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel")
START_S = 100.0
CONFIG = """\
ClusterName=wfbp
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
CompleteWait=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running Slurm.

    Args:
        folder: with its configuration and logs.
    """

    folder: Path

    def run(self, *words: object, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        return subprocess.run(
            [str(word) for word in words],
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def batch(self, log: Path, *words: object, timeout_s: float = 100.0) -> str:
        """Submit a batch job and wait for its end; what it printed."""
        done = self.run("sbatch", "--parsable", "-o", log, *words)
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + timeout_s
        # (`sbatch --wait` looks every ten seconds, and less often later.)
        while self.run("squeue", "--noheader", "-j", done.stdout.strip()).stdout:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)
        return log.read_text()

    def cancel_jobs(self) -> None:
        """End the jobs that a failed test has left: they would outlive the daemons."""
        deadline = time.monotonic() + 20
        self.run("scancel", "--user=root")
        while self.run("squeue", "--noheader").stdout and time.monotonic() < deadline:
            time.sleep(0.2)

    def logs(self) -> str:
        """What the daemons said, for the message of a test that fails."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in files)


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    gone = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(gone)} not installed (Debian: slurm-wlm, munge)" if gone else ""


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons, wait until the node takes jobs, and stop them in the end."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)  # munged wants no folder on its path that others may write to
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = _free_ports(2)
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            controller_port=ports[0],
            node_port=ports[1],
            cores=os.cpu_count(),
        )
    )
    here = Cluster(folder)
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file")
    ]
    munge += [f"--{name}={folder}/munge.{name}" for name in ("log-file", "seed-file")]
    with ExitStack() as stack:
        for words in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            stack.enter_context(_daemon(words, folder))
            if words is munge:
                _wait_for(lambda: (folder / "munge.socket").exists(), here)
        _wait_for(lambda: "idle" in here.run("sinfo", "--noheader", "-o", "%T").stdout, here)
        try:
            yield here
        finally:
            here.cancel_jobs()


@contextmanager
def _daemon(words: list[str], folder: Path) -> Iterator[None]:
    with (
        (folder / f"{words[0]}-output.log").open("w") as log,
        subprocess.Popen(
            words,
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(condition: object, here: Cluster) -> None:
    assert callable(condition)
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, here.logs()
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Below those that systems give to programs which ask for any, as jobs beside this one do."""
    found: list[int] = []
    for port in random.sample(range(12_000, 30_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports are free")
