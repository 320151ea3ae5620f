"""Jobs in a Ray cluster of this machine alone; its nodes are addresses of the loopback network."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from wfbp.errors import BackendError, WfbpError
from wfbp.integrations.ray import run


def trained(scale: float) -> dict[str, Any]:
    """A step on every rank, and what the rank has around it."""
    import torch

    import wfbp.torch as wfbp

    wfbp.init()
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    (model(torch.full((1, 2), scale * wfbp.rank())).sum()).backward()
    optimizer.step()
    print(f"from rank {wfbp.rank()}", flush=True)
    return {
        "rank": wfbp.rank(),
        "size": wfbp.size(),
        "weight": model.weight.detach().tolist(),
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "folder": sys.argv[2],  # of the process that calls this function
        "mine": os.environ.get("MINE"),
    }


def failing() -> None:
    import wfbp

    wfbp.init()
    if wfbp.rank() == 1:
        raise KeyError("no such sample")
    wfbp.barrier()


def leaving() -> None:
    os._exit(3)


SCRIPT = """
import sys
from pathlib import Path

import wfbp

wfbp.init()
Path(sys.argv[1], f"{wfbp.rank()} of {wfbp.size()}").touch()
"""


def main(num_nodes: int, folder: Path) -> None:
    # Paths of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
        os.environ["RAY_TMPDIR"] = short
        Path(short, "ray").mkdir()  # where Ray notes the address of a cluster
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "node_ip_address": "127.0.0.2",
                "num_cpus": 3 - num_nodes,
                "num_gpus": 3 - num_nodes,
                "include_dashboard": False,
                "temp_dir": short,
            },
        )
        try:
            for node in range(1, num_nodes):
                cluster.add_node(node_ip_address=f"127.0.0.{2 + node}", num_cpus=1, num_gpus=1)
            settings = {"env_vars": {"MINE": "yes", "OMP_NUM_THREADS": "1"}}
            ray.init(address=cluster.address, runtime_env=settings)
            check(num_nodes)
            if num_nodes > 1:
                submit(cluster.address, folder)
        finally:
            ray.shutdown()
            cluster.shutdown()


def submit(address: str, folder: Path) -> None:
    """The recipe, with a script."""
    (folder / "script.py").write_text(SCRIPT)
    recipe = Path(__file__).resolve().parents[3] / "launch" / "ray_job.py"
    words = [sys.executable, str(recipe), "-n", "2", "script.py", "."]
    subprocess.run(words, cwd=folder, env={**os.environ, "RAY_ADDRESS": address}, check=True)
    assert {path.name for path in folder.iterdir()} >= {"0 of 2", "1 of 2"}
    print("submitted", flush=True)


def check(num_nodes: int) -> None:
    told = run(trained, 2.0, num_ranks=2, gpus_per_rank=1)
    assert [(t["rank"], t["size"], t["mine"]) for t in told] == [(0, 2, "yes"), (1, 2, "yes")], told
    assert all(t["weight"] == [[-1.0, -1.0]] for t in told), told
    assert [t["gpu"] for t in told] == (["0", "0"] if num_nodes == 2 else ["0", "1"]), told
    assert not any(os.path.exists(t["folder"]) for t in told), "something is left behind"
    print("trained", flush=True)
    if num_nodes == 1:
        return
    with pytest.raises(WfbpError, match="rank 1 failed") as failed:
        run(failing, num_ranks=2)
    assert repr(failed.value.__cause__) == "KeyError('no such sample')"
    print("failed", flush=True)
    with pytest.raises(BackendError, match="no result of ranks 0"):
        run(leaving, num_ranks=1)
    print("left", flush=True)
    with pytest.raises(BackendError, match="no place for 3 ranks of 1 CPU"):
        run(leaving, num_ranks=3, timeout_s=0.5)
    print("refused", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
