"""One rank of the JAX benchmark: warm up, check equality, time; rank 0 prints JSON.

``mpirun -np 2 python -m tests.benchmarks.jax_worker MODEL CONTESTANTS ROUNDS INTERFACE``; the
command ``python -m tests.benchmarks jax`` starts it. All contestants are in one set of processes,
and only the one being timed works.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import wfbp.jax as wfbp
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
from tests.benchmarks.turns import in_turns

NUM_BATCHES = 4
NUM_STEPS = 3
"""Steps after which parameters are compared."""
LEARNING_RATE = 0.01
TIMED_RATE = 1e-6
TOLERANCE = 1e-3
"""Relative to the norm of the parameters' change."""
MOST_WARM_UP_STEPS = 1000
_ADDRESS_OF_INTERFACE = 0x8915


def main(model_name: str, contestant_names: str, rounds: str, interface: str) -> None:
    """Run one model."""
    names = contestant_names.split(",")
    if GLOO in names:
        _start_gloo(MPI.COMM_WORLD, interface)
    wfbp.init()
    rank = MPI.COMM_WORLD.rank
    model = MODELS[model_name]
    batches = [model.batch(NUM_BATCHES * rank + number) for number in range(NUM_BATCHES)]
    start = model.build(0)
    contestants = [CONTESTANTS[name](name, model) for name in names]
    for contestant in contestants:
        contestant.reset(start, TIMED_RATE)
        _warm_up(contestant, batches)
        if rank == 0:
            print(f"{model_name}: {contestant.name} is ready", file=sys.stderr, flush=True)
    check_equality(contestants, start, batches)
    steps = {}
    for contestant in contestants:
        contestant.reset(start, TIMED_RATE)
        steps[contestant.name] = partial(_step, contestant, cycle(batches))
    seconds, cpu_seconds = in_turns(steps, int(rounds))
    if rank == 0:
        document = {
            "ranks": MPI.COMM_WORLD.size,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "reports": {c.name: c.report() for c in contestants if c.report()},
        }
        print(json.dumps(document))
    MPI.COMM_WORLD.Barrier()
    wfbp.shutdown()
    if GLOO in names:
        jax.distributed.shutdown()


def _step(contestant: Contestant, batches: cycle[Batch]) -> None:
    contestant.step(next(batches))


def _warm_up(contestant: Contestant, batches: Sequence[Batch]) -> None:
    """Step until the contestant has chosen how to communicate, on every rank."""
    for number in range(MOST_WARM_UP_STEPS):
        contestant.step(batches[number % len(batches)])
        if MPI.COMM_WORLD.allreduce(contestant.settled(), MPI.LAND):
            return
    raise RuntimeError(f"{contestant.name} has no plan after {MOST_WARM_UP_STEPS} steps")


def check_equality(
    contestants: Sequence[Contestant], start: Params, batches: Sequence[Batch]
) -> None:
    """Raise ``RuntimeError`` unless all that communicate train what the reference trains."""
    begin = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(start)])
    reference = _train(next(c for c in contestants if c.name == FLAT), start, batches)
    for contestant in contestants:
        if contestant.name == NO_COMMUNICATION:
            continue
        distance = np.linalg.norm(_train(contestant, start, batches) - reference)
        change = float(distance / np.linalg.norm(reference - begin))
        worst = MPI.COMM_WORLD.allreduce(change, MPI.MAX)
        if not worst <= TOLERANCE:  # written so that no number fails
            raise RuntimeError(
                f"{contestant.name} trains something else than {FLAT}: after {NUM_STEPS} steps "
                f"their parameters differ by {worst:.1e} of their change, expected at most "
                f"{TOLERANCE:.0e}"
            )


def _train(contestant: Contestant, start: Params, batches: Sequence[Batch]) -> Any:
    contestant.reset(start, LEARNING_RATE)
    for step in range(NUM_STEPS):
        contestant.step(batches[step % len(batches)])
    return contestant.vector()


def _start_gloo(comm: MPI.Intracomm, interface: str) -> None:
    """Make the ranks one JAX program, whose messages use this network interface."""
    where = ""
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind((_address(interface), 0))
            where = "{}:{}".format(*probe.getsockname())
    where = comm.bcast(where)
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    # JAX offers no setting for this: gloo would meet at what the host's name resolves to.
    _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, interface=interface)
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
    try:
        main(*sys.argv[1:])
    except BaseException:  # the other ranks would wait for this one
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
