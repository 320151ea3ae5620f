"""One rank of the JAX benchmark: warm up, check equality, time.

``mpirun -np 2 python -m tests.benchmarks.jax_worker SETTINGS.json``; the command
``python -m tests.benchmarks jax`` starts it. All contestants live in one set of processes, and
only the one being timed works.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import wfbp.jax as wfbp
from tests.benchmarks.harness import (
    Settings,
    check_link_carried,
    run,
    time_blocks,
    warm_up,
    write_result,
)
from tests.benchmarks.jax_contestants import (
    CONTESTANTS,
    FLAT,
    GLOO,
    MODELS,
    NO_COMMUNICATION,
    Batch,
    Contestant,
    Params,
)
from tests.benchmarks.machine import usage
from tests.benchmarks.torch_worker import (
    LEARNING_RATE,
    NUM_STEPS,
    TOLERANCE,
    TOLERANCE_OF_CHANGE,
)

NUM_BATCHES = 4
TIMED_RATE = 1e-6
_ADDRESS_OF_INTERFACE = 0x8915


def main(words: Sequence[str]) -> None:
    """Run one model as the settings file says."""
    settings = Settings.load(words[0])
    comm = MPI.COMM_WORLD.Dup()

    def say(text: str) -> None:
        if comm.rank == 0:
            print(f"{settings.model}: {text}", file=sys.stderr, flush=True)

    if GLOO in settings.contestants:
        _start_gloo(comm, settings.interface)
    wfbp.init()
    model = MODELS[settings.model]
    batches = [model.batch(NUM_BATCHES * comm.rank + number) for number in range(NUM_BATCHES)]
    start = model.build(0)
    contestants = [CONTESTANTS[name](name, model) for name in settings.contestants]
    processes = comm.allgather(os.getpid())
    foreign_cores = {}
    for contestant in contestants:
        contestant.reset(start, TIMED_RATE)
        load = usage(processes)
        steps = warm_up(comm, contestant, batches, settings, NUM_STEPS)
        foreign = foreign_cores[contestant.name] = load.foreign_cores(usage(processes))
        say(f"{contestant.name} ready after {steps} steps, foreign load {foreign:.2f} cores")
    differences = check_equality(comm, contestants, start, batches)
    say(f"parameters agree after {NUM_STEPS} steps from one state")
    for contestant in contestants:
        contestant.reset(start, TIMED_RATE)
    blocks = time_blocks(comm, contestants, batches, settings, say)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(start)]
    check_link_carried(blocks, sum(sizes))
    write_result(
        comm, settings, model.title, sizes, contestants, differences, foreign_cores, blocks
    )
    comm.Barrier()
    wfbp.shutdown()
    if GLOO in settings.contestants:
        jax.distributed.shutdown()


def check_equality(
    comm: MPI.Intracomm, contestants: Sequence[Contestant], start: Params, batches: Sequence[Batch]
) -> dict[str, float | None]:
    """Train a few steps from one state with each contestant and compare the parameters.

    Returns:
        Each contestant's difference from the reference, relative to the norm of the parameters,
        the largest of all ranks; None for the one that does not communicate.

    Raises:
        RuntimeError: one of them trains something else.
    """
    begin = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(start)])
    reference = _train(next(c for c in contestants if c.name == FLAT), start, batches)
    norm, change = np.linalg.norm(reference), np.linalg.norm(reference - begin)
    differences: dict[str, float | None] = {}
    for contestant in contestants:
        name = contestant.name
        if name == NO_COMMUNICATION:
            differences[name] = None
            continue
        distance = np.linalg.norm(_train(contestant, start, batches) - reference)
        of_all = comm.allreduce(float(distance / norm), MPI.MAX)
        of_change = comm.allreduce(float(distance / change), MPI.MAX)
        # Written so that a NaN fails.
        if not (of_all <= TOLERANCE and of_change <= TOLERANCE_OF_CHANGE):
            raise RuntimeError(
                f"{name} trains something else than {FLAT}: after {NUM_STEPS} steps their "
                f"parameters differ by {of_all:.1e} of their norm (at most {TOLERANCE:.0e} is "
                f"expected) and {of_change:.1e} of their change ({TOLERANCE_OF_CHANGE:.0e})"
            )
        differences[name] = of_all
    return differences


def _train(contestant: Contestant, start: Params, batches: Sequence[Batch]) -> Any:
    contestant.reset(start, LEARNING_RATE)
    for step in range(NUM_STEPS):
        contestant.step(batches[step % len(batches)])
    return contestant.vector()


def _start_gloo(comm: MPI.Intracomm, interface: str) -> None:
    """Make the ranks one JAX program; over a link, have gloo use it."""
    where = ""
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind((_address(interface or "lo"), 0))
            where = "{}:{}".format(*probe.getsockname())
    where = comm.bcast(where)
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    # JAX offers no setting for this: gloo would meet at what the host's name resolves to.
    _jax.make_gloo_tcp_collectives = partial(
        _jax.make_gloo_tcp_collectives, interface=interface or "lo"
    )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(where, comm.size, comm.rank)
    jnp.zeros(()).block_until_ready()


def _address(interface: str) -> str:
    """The IPv4 address of a network interface; Linux only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode())
        answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)
    return socket.inet_ntoa(answer[20:24])


if __name__ == "__main__":
    run(main)
