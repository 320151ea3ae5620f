"""Runs a function on every rank of an MPI job within a Ray cluster, without ssh.

Ray places an actor for each rank (placement group); the first actor starts ``mpirun``. ``mpirun``
reaches other nodes by an agent, instead of ssh, that passes its command to the actor on that node.
All nodes need wfbp at the same path.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from wfbp.errors import BackendError
from wfbp.launcher.commands import LaunchSpec, mpirun_command
from wfbp.launcher.function import LAST_LINES, call, results
from wfbp.launcher.hosts import Host
from wfbp.launcher.mpi import Vendor, find_mpi
from wfbp.launcher.rank import RANK, number

__all__ = ["run"]

T = TypeVar("T")


def run(
    function: Callable[..., T],
    *arguments: Any,
    num_ranks: int,
    cpus_per_rank: float = 1.0,
    gpus_per_rank: float = 0.0,
    strategy: str = "PACK",
    timeout_s: float = 120.0,
) -> list[T]:
    """Call a function on every rank of a job whose ranks Ray places.

    cloudpickle sends function and arguments. Ranks have their actors' environment, GPUs and
    ``runtime_env``, and the driver's working directory if the node has it. Ray shows the ranks'
    output as that of actors.

    Args:
        function: calls ``wfbp.init()`` and trains.
        arguments: of the function, the same on every rank.
        num_ranks: number of ranks.
        cpus_per_rank: cores that Ray reserves for each; Ray sets ``OMP_NUM_THREADS`` to them.
        gpus_per_rank: GPUs that each rank reserves and sees.
        strategy: of Ray's placement group: ``PACK`` fills nodes, ``SPREAD`` uses many of them.
        timeout_s: seconds until Ray must have placed all ranks.

    Returns:
        The function's results, by rank.

    Raises:
        ImportError: Ray is not installed.
        ValueError: ``num_ranks`` is below 1.
        WfbpError: the function failed on a rank; its error is the cause.
        BackendError: Ray cannot place all ranks, or the job could not be started.

    Example:
        >>> run(lambda text: text.upper(), "a", num_ranks=2)  # doctest: +SKIP
        ['A', 'A']
    """
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise ImportError("wfbp.integrations.ray needs Ray: pip install 'wfbp[ray]'") from error
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks were asked for; expected at least 1")
    if not ray.is_initialized():
        ray.init()
    needs = {"CPU": cpus_per_rank, "GPU": gpus_per_rank}
    needs = {name: amount for name, amount in needs.items() if amount}
    group = placement_group([needs or {"CPU": 0.001}] * num_ranks, strategy=strategy)
    actor = ray.remote(max_concurrency=3)(_Place)  # launch(), execute() and stop()
    places: list[Any] = []
    try:
        try:
            ray.get(group.ready(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            each = " and ".join(f"{count:g} {kind}" for kind, count in needs.items())
            raise BackendError(
                f"Ray had no place for {num_ranks} ranks of {each} each within {timeout_s:g} s; "
                f"free in the cluster are {ray.available_resources()}: add nodes, wait until "
                "others end (timeout_s), or ask for less"
            ) from None
        places = [
            actor.options(
                num_cpus=cpus_per_rank,
                num_gpus=gpus_per_rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            ).remote()
            for bundle in range(num_ranks)
        ]
        return _run(ray, places, cloudpickle.dumps((function, arguments, {})))
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get([place.stop.remote() for place in places])
        for place in places:
            ray.kill(place)
        remove_placement_group(group)


def _run(ray: Any, places: Sequence[Any], task: bytes) -> list[Any]:
    """Start a job in places given by Ray, and return the results of its ranks."""
    by_node: dict[str, list[Any]] = {}
    host_names = {}
    for place, (node, name) in zip(places, ray.get([p.node.remote() for p in places]), strict=True):
        by_node.setdefault(node, []).append(place)
        host_names[node] = name
    ranks = [place for there in by_node.values() for place in there]  # nodes are filled in order
    # The same path on all nodes, whose TMPDIR may differ; short, because it has a socket.
    folder = f"/tmp/wfbp-ray-{uuid.uuid4().hex}"
    directory = os.getcwd()
    ray.get([p.prepare.remote(folder, rank, directory, task) for rank, p in enumerate(ranks)])
    hosts = {node: len(there) for node, there in by_node.items()}
    firsts = {node: there[0] for node, there in by_node.items()}
    status, output = ray.get(ranks[0].launch.remote(hosts, firsts, host_names))
    outcomes = [cloudpickle.loads(o) for o in ray.get([p.outcome.remote() for p in ranks])]
    return results(outcomes, status, output)


def check_host_names(host_names: Mapping[str, str], vendor: Vendor) -> None:
    """Raise ``BackendError`` if Open MPI would confuse two nodes of the same host name."""
    for name in set(host_names.values()) if vendor is Vendor.OPEN_MPI else ():
        nodes = [node for node, of_node in host_names.items() if of_node == name]
        if len(nodes) > 1:
            raise BackendError(
                f"nodes {' and '.join(nodes)} are both named {name!r}: Open MPI takes them for one "
                "host, and its collectives fail; give each node its own host name, or "
                "install MPICH (pip install 'wfbp[mpich]')"
            )


class _Place:
    """The actor of one rank; the first on its node starts MPI's processes there.

    The driver and the launching actor (``execute``) call it on up to three threads at once. Only
    ``launch`` writes ``_mpirun``; ``stop`` reads it.
    """

    _mpirun: subprocess.Popen[str] | None = None
    _folder = ""
    _rank = 0

    def __repr__(self) -> str:
        return "wfbp"  # in front of what ranks print

    def node(self) -> tuple[str, str]:
        """The node's address in Ray, and its host name."""
        import ray

        return ray.util.get_node_ip_address(), socket.gethostname()

    def prepare(self, folder: str, rank: int, directory: str, task: bytes) -> None:
        """Write the rank's input to a folder of its node."""
        self._folder, self._rank = folder, rank
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.path.isdir(directory):
            directory = os.getcwd()  # the driver's is not on this node
        setting = (directory, sys.path, dict(os.environ), task)
        Path(folder, f"{rank}.task").write_bytes(cloudpickle.dumps(setting))

    def launch(
        self, hosts: Mapping[str, int], firsts: Mapping[str, Any], host_names: Mapping[str, str]
    ) -> tuple[int, str]:
        """Run the job; returns ``mpirun``'s status and last lines. Mappings are by node."""
        agent = write_agent(Path(self._folder))
        mpi = find_mpi()
        check_host_names(host_names, mpi.vendor)
        # Nodes reach this one by Ray's address for it. Only here a socket waits for the agent.
        own = (
            ("--prtemca", "plm_ssh_no_tree_spawn", "1")
            if mpi.vendor is Vendor.OPEN_MPI
            else ("-localhost", next(iter(hosts)))
        )
        job = LaunchSpec(
            sum(hosts.values()),
            (sys.executable, "-m", __spec__.name, "rank", self._folder),
            tuple(Host(name, slots) for name, slots in hosts.items()),
            remote_shell=agent,
            options=own,
        )
        words, variables = mpirun_command(job, mpi, os.environ, os.geteuid() == 0)
        with Listener(os.path.join(self._folder, "socket"), "AF_UNIX") as listener:
            threading.Thread(target=_serve, args=(listener, firsts), daemon=True).start()
            with subprocess.Popen(
                words,
                cwd=self._folder,  # MPI changes to it on every node
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            ) as self._mpirun:
                assert self._mpirun.stderr is not None
                last: deque[str] = deque(maxlen=LAST_LINES)
                for line in self._mpirun.stderr:
                    sys.stderr.write(line)
                    last.append(line)
        return self._mpirun.returncode, "".join(last)

    def execute(self, command: str) -> tuple[int, str]:
        """Run one of MPI's commands on this node; returns its status and output."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return done.returncode, done.stdout

    def outcome(self) -> bytes:
        """The rank's result: ``("returned", value)``, ``("raised", error, text)`` or None."""
        file = Path(self._folder, f"{self._rank}.outcome")
        return file.read_bytes() if file.exists() else cloudpickle.dumps(None)

    def stop(self) -> None:
        """End the job, if it still runs, and remove its folder."""
        if self._mpirun is not None and self._mpirun.poll() is None:
            self._mpirun.terminate()
        shutil.rmtree(self._folder or os.devnull, ignore_errors=True)


def write_agent(folder: Path) -> str:
    """Write the program that ``mpirun`` calls instead of ssh; returns its path."""
    agent = folder / "agent"
    words = (sys.executable, "-m", __spec__.name, "agent", str(folder))
    agent.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    agent.chmod(0o700)
    return str(agent)


def _serve(listener: Listener, firsts: Mapping[str, Any]) -> None:
    """Pass the commands of agents to the actors of their nodes, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), firsts), daemon=True).start()


def _answer(agent: Connection, firsts: Mapping[str, Any]) -> None:
    import ray

    with agent, contextlib.suppress(EOFError, BrokenPipeError):
        node, command = agent.recv()
        try:
            agent.send(ray.get(firsts[node].execute.remote(command)))
        except (KeyError, ray.exceptions.RayError) as error:
            agent.send((1, f"wfbp: node {node} cannot be reached through Ray: {error!r}\n"))


def _agent(folder: str, words: Sequence[str]) -> int:
    """``mpirun`` calls this like ssh: a host, and the words of a command for its shell."""
    node, *command = words[1:] if words[0] == "-x" else words
    with Client(os.path.join(folder, "socket"), "AF_UNIX") as place:
        place.send((node, " ".join(command)))
        status, output = place.recv()
    sys.stderr.write(output)
    return int(status)


def _rank(folder: str) -> None:
    """One rank: call the function in its actor's environment, and write its result."""
    file = Path(folder, f"{number(RANK, os.environ)}.task")
    directory, path, variables, task = cloudpickle.loads(file.read_bytes())
    os.chdir(directory)
    sys.path[:] = path
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # MPI may have brought those of the first node
    of_rank = dict(os.environ)
    os.environ |= variables | of_rank
    call(task, file.with_suffix(".outcome"))


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        sys.exit(_agent(sys.argv[2], sys.argv[3:]))
    _rank(sys.argv[2])
