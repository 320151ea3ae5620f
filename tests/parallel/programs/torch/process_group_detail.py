"""The last rank's 21st operation differs from the others': ``process_group_detail.py OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import wfbp.torch.distributed
from wfbp.errors import DisagreementError

dist.init_process_group("wfbp")
rank, size, problem = dist.get_rank(), dist.get_world_size(), ""
try:
    for step in range(30):
        differs = rank == size - 1 and step == 20
        dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if differs else dist.ReduceOp.SUM)
except DisagreementError as error:
    problem = str(error).partition(": ")[2]
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(problem))
dist.destroy_process_group()
wfbp.torch.shutdown()
