"""States that are saved, loaded and copied."""

from __future__ import annotations

import copy
import io
import pickle

import torch

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    Twins,
    adamw,
    compare,
    equal,
    mlp,
    square,
    twins,
)

check = Checks()


@check
def state_dict_round_trip() -> None:
    both = twins(adamw, named=True)
    both.train(range(7))
    file = io.BytesIO()
    torch.save({"model": both.model.state_dict(), "optimizer": both.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = mlp(5, 7, 3)
    resumed.load_state_dict(saved["model"])
    again = wfbp.torch.DistributedOptimizer(adamw(resumed.parameters()), resumed.named_parameters())
    again.load_state_dict(saved["optimizer"])
    Twins(resumed, again, both.reference, both.plain).train(range(7, 14))


@check
def state_loads_into_a_plain_optimizer() -> None:
    both = twins(adamw)
    both.train(range(7))
    resumed = mlp(5, 7, 3)
    resumed.load_state_dict(both.model.state_dict())
    single = adamw(resumed.parameters())
    single.load_state_dict(both.optimizer.state_dict())
    for step in range(7, 12):
        for net, opt in ((resumed, single), (both.reference, both.plain)):
            opt.zero_grad()
            square(net, 0, step)
            opt.step()
        compare(resumed, both.reference, f"step {step}", 1e-12)


@check
def a_wrapped_model_can_be_saved_and_copied() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    square(model, wfbp.rank(), 0)
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        equal(other.parameters(), model.parameters(), "copy", 0.0)
        square(other, wfbp.rank(), 0)  # must not disturb what is exchanged
    optimizer.zero_grad()
    square(model, wfbp.rank(), 1)
    optimizer.step()
