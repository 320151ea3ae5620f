"""The documentation's Python, one snippet after another on the ranks of one job.

Usage: mpirun -n N python documents.py OUT [NAME ...]. OUT/rank<r>.json has, by the snippet's name,
what it printed on that rank and how it failed ("" where it did not).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from mpi4py import MPI

import wfbp
from tests.support.cores import leave_cores
from tests.support.shared import NO_ERRORS
from tests.support.snippets import snippets


def torch_names(source: str) -> dict[str, Any]:
    """What a page takes for granted: a model, its optimizer, a batch.

    The optimizer is wrapped unless the snippet does it; backward has been unless it comes.
    """
    import torch

    import wfbp.torch as hvd

    model: torch.nn.Module = torch.nn.Linear(4, 2)
    if "LocalSteps(" in source:
        model = torch.nn.Sequential(model, torch.nn.Linear(2, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if "DistributedOptimizer(" not in source:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict())
    loss = model(torch.ones(3, 4)).square().mean()
    if "optimizer.step()" in source and "loss.backward()" not in source:
        loss.backward()
    data = torch.utils.data.TensorDataset(torch.ones(100, 4))
    names = {"model": model, "optimizer": optimizer, "loss": loss, "data": data}
    names |= {"loader": [torch.ones(3, 4)], "evaluate": lambda model: model(torch.ones(3, 4))}
    return {"torch": torch, "wfbp": hvd, "batches": range(3), **names}


def jax_names() -> dict[str, Any]:
    """Parameters and a loss."""
    import jax
    import jax.numpy as jnp

    import wfbp.jax as hvd

    params = {"w": jnp.ones(3)}
    return {"jax": jax, "wfbp": hvd, "params": params, "loss_of": lambda p, x: (p["w"] * x).sum()}


def array_names() -> dict[str, Any]:
    """Two layers' parameters and gradients."""
    import numpy as np

    w1, w2 = np.ones((4, 3), np.float32), np.ones(3, np.float32)
    return {"w1": w1, "w2": w2, "grad_w1": w1, "grad_w2": w2, "batches": range(3)}


def names_for(name: str, source: str) -> dict[str, Any]:
    """The names that a snippet may use without defining them."""
    if ":" not in name:  # a whole program, also of a diff
        return {}
    wfbp.init()
    if "GradientReducer(" in source:
        return array_names()
    return jax_names() if "jax" in source else torch_names(source)


def main() -> None:
    out, *chosen = sys.argv[1:]
    leave_cores()
    warnings.simplefilter("error")
    for message in NO_ERRORS:
        warnings.filterwarnings("ignore", message)
    told = {}
    rank = MPI.COMM_WORLD.rank
    os.chdir(out)
    for name, source in snippets():
        if chosen and name not in chosen:
            continue
        error = ""
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                exec(
                    compile(source, name, "exec"),
                    {"__name__": "__main__"} | names_for(name, source),
                )
            except Exception:
                error = traceback.format_exc()
        told[name] = {"printed": output.getvalue(), "error": error}
        wfbp.shutdown()
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
