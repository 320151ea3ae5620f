"""One rank of the training part of the GPU benchmark; rank 0 prints JSON.

``mpirun -np N python -m tests.benchmarks.gpu_worker MODEL CONTESTANTS ROUNDS cuda``; the command
``python -m tests.benchmarks gpu`` starts it. All ranks use the one GPU, so two of them share it.
NCCL refuses that where it recognises the host, so each rank gives another one; their traffic then
goes through sockets, for all contestants alike. All use deterministic kernels, so that equal
gradients give equal parameters.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from unittest.mock import patch

import torch
from mpi4py import MPI

from tests.benchmarks.models import (
    GPT,
    RESNET50,
    BenchModel,
    Decoder,
    images,
    mlp,
    resnet50,
    tokens,
)
from wfbp.bench import training


def _vectors(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 16, generator=generator), torch.randint(16, (4,), generator=generator)


MODELS = {
    "resnet50": BenchModel("ResNet-50 224x224, batch 64", resnet50, images(64, 224)),
    "gpt": BenchModel(
        "GPT 12 x 768, T 1024, vocab 50304 untied, batch 8",
        lambda: Decoder(12, 768, 12, 1024, 50304),
        tokens(50304, 8, 1024),
    ),
    "resnet50-small": RESNET50,
    "gpt-small": GPT,
    "mlp-tiny": BenchModel("MLP 4 x 16, batch 4", lambda: mlp(4, 16), _vectors),
}
"""Models of the size that a GPU is given; small ones where ranks share it; one to rehearse with."""


def main(model: str, names: str, rounds: str, device: str) -> None:
    """Time one model on ``cuda`` or, to rehearse, on ``cpu``."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or its sums change from run to run
    torch.set_num_threads(1)
    if device == "cuda":
        os.environ["NCCL_HOSTID"] = f"wfbp-bench-{MPI.COMM_WORLD.rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(), patch("torch.cuda.set_device"):  # the ranks share the device
        warnings.simplefilter("ignore", UserWarning)  # not every kernel has such a variant
        contestants = training.run(MODELS[model], names.split(","), int(rounds), device)
    if MPI.COMM_WORLD.rank == 0:
        document = {
            "title": MODELS[model].title,
            "ranks": MPI.COMM_WORLD.size,
            "seconds": {c.name: c.seconds for c in contestants},
            "reports": {c.name: c.report for c in contestants if c.report},
        }
        print(json.dumps(document))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:  # the other ranks would wait for this one
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
