"""``python -m tests.benchmarks jax``: iteration times of wfbp.jax and its peers, interleaved.

Two ranks with one compute thread each train JAX versions of two of the training benchmark's models,
over shared memory or an emulated link. Contestants are: no communication; one flat MPI all-reduce
between backward and update; mpi4jax's all-reduce within the program, per leaf and flat, where it is
installed. The others are JAX's own processes with gloo, shard_map and psum, and wfbp with each
schedule.
Parameters are compared before anything is timed.

``--overlap`` and ``--leaf`` measure one process on a link that exists only as a cost: how much of
the communication backward hides, and what announcing a gradient costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.benchmarks.jax_contestants import CONTESTANTS, FLAT, MODELS
from tests.benchmarks.jobs import document_of, names
from tests.benchmarks.training import ALONE, Others, add_arguments, print_contestants, save

OTHERS: Others = {
    "best peer": lambda name: name != ALONE and not name.startswith("wfbp-"),
}
VARIABLES = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}
"""One thread per rank."""
LINK_INTERFACE = "wl0"


def main(words: Sequence[str]) -> int:
    """Run what the flags ask for; exit status."""
    options = arguments(words)
    if options.overlap:
        from tests.benchmarks import jax_overlap

        return jax_overlap.main(options.rounds)
    if options.leaf:
        from tests.benchmarks import jax_leaf

        return jax_leaf.main(options.rounds)
    results = []
    for model in options.models:
        interface = "lo" if options.link == "none" else LINK_INTERFACE
        program = ["-m", "tests.benchmarks.jax_worker", model, ",".join(options.contestants)]
        program += [str(options.rounds), interface]
        document = document_of(program, options.link, options.np, options.hosts, VARIABLES)
        if document is None:
            return 1
        results.append({**document, "model": model, "link": options.link})
        print_contestants(MODELS[model].title, results[-1], OTHERS)
        if options.json:
            save(options.json, results)
    return 0


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line; the reference is always among the contestants."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks jax", description=__doc__)
    parser.add_argument("--contestants", type=names(CONTESTANTS), default=list(CONTESTANTS))
    add_arguments(parser, MODELS, list(MODELS))
    parser.add_argument("--overlap", action="store_true", help="how much backward hides")
    parser.add_argument("--leaf", action="store_true", help="what announcing a gradient costs")
    options = parser.parse_args(words)
    options.contestants = list(dict.fromkeys([FLAT, *options.contestants]))
    return options
