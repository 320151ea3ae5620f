"""Before anything is timed: every contestant trains the same thing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from wfbp.bench.models import Batch
from wfbp.bench.training_contestants import NO_COMMUNICATION, PER_TENSOR, Contestant

NUM_STEPS = 3
LEARNING_RATE = 0.01
TOLERANCE = 1e-5
"""Of the parameters' norm."""
TOLERANCE_OF_CHANGE = 1e-3
"""Of the norm of what the steps changed, which a wrong average would miss by far more."""


def check_equality(
    comm: MPI.Intracomm,
    contestants: Sequence[Contestant],
    state: dict[str, Tensor],
    batches: Sequence[Batch],
) -> dict[str, float | None]:
    """Train a few steps from one state with each contestant and compare the parameters.

    Args:
        comm: of all ranks; collective.
        contestants: one of them the reference, one all-reduce per tensor.
        state: of the model, to start from.
        batches: of this rank.

    Returns:
        Each contestant's difference from the reference, relative to the norm of the parameters,
        the largest of all ranks; None for the one that does not communicate.

    Raises:
        RuntimeError: one of them trains something else.
    """
    reference = _train(next(c for c in contestants if c.name == PER_TENSOR), state, batches)
    start = torch.cat([state[n].flatten() for n, _ in contestants[0].model.named_parameters()])
    sizes = float(reference.norm()), float((reference - start).norm())
    differences: dict[str, float | None] = {}
    for contestant in contestants:
        name = contestant.name
        if name == NO_COMMUNICATION:
            differences[name] = None
            continue
        distance = float((_train(contestant, state, batches) - reference).norm())
        of_all = comm.allreduce(distance / sizes[0], MPI.MAX)
        of_change = comm.allreduce(distance / sizes[1], MPI.MAX)
        # Written so that a NaN fails.
        if not (of_all <= TOLERANCE and of_change <= TOLERANCE_OF_CHANGE):
            raise RuntimeError(
                f"{name} trains something else than {PER_TENSOR}: after {NUM_STEPS} steps their "
                f"parameters differ by {of_all:.1e} of their norm (at most {TOLERANCE:.0e} is "
                f"expected) and {of_change:.1e} of their change ({TOLERANCE_OF_CHANGE:.0e})"
            )
        differences[name] = of_all
    return differences


def _train(contestant: Contestant, state: dict[str, Tensor], batches: Sequence[Batch]) -> Tensor:
    """All parameters after the steps, in one vector."""
    contestant.reset(state, LEARNING_RATE)
    for step in range(NUM_STEPS):
        contestant.step(batches[step % len(batches)])
    contestant.rest()
    return torch.cat([p.detach().flatten() for p in contestant.model.parameters()])
