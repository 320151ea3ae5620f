"""What PyTorch loads by the entry point ``torch.backends``."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch.distributed as dist
from wfbp.integrations.torch_backend import register
register()
register()
assert "wfbp" in dist.Backend.backend_list
assert "wfbp.torch" not in sys.modules and "mpi4py" not in sys.modules
dist.init_process_group("wfbp", store=dist.HashStore(), rank=0, world_size=1)
import torch
total = torch.ones(2)
dist.all_reduce(total)
assert total.tolist() == [1, 1]
dist.destroy_process_group()
"""


def test_a_backend_is_loaded_when_it_is_used() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=100)
