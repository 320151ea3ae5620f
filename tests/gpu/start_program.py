"""Two ranks find each other, and tell what they run on; ``--without-gpu`` needs none."""

from __future__ import annotations

import sys
from importlib import metadata

import torch
from mpi4py import MPI

import wfbp.torch as wfbp

PACKAGES = ("torch", "jax", "numpy", "mpi4py", "cupy-cuda12x", "cupy-cuda13x")
PACKAGES += ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def main() -> None:
    wfbp.init()
    names = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    versions = ", ".join(f"{name} {names[name]}" for name in PACKAGES if name in names)
    total = float(wfbp.allreduce(torch.tensor([float(wfbp.rank() + 1)]), op=wfbp.Sum))
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    print(
        f"rank {wfbp.rank()} of {wfbp.size()}: {MPI.Get_library_version().splitlines()[0]}; {gpu}; "
        f"CUDA {torch.version.cuda}; {versions}; the sum of ranks is {total}",
        flush=True,
    )
    assert (wfbp.size(), total) == (2, 3.0), "two ranks were started, and did not find each other"
    if "--without-gpu" not in sys.argv:
        import cupy

        assert torch.cuda.is_available(), "PyTorch finds no GPU"
        assert cupy.cuda.is_available(), "CuPy finds no GPU"
    wfbp.shutdown()


if __name__ == "__main__":
    main()
