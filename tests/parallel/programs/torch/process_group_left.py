"""Rank 1 ends after the first operation of a process group: ``process_group_left.py OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import wfbp.torch.distributed
from wfbp.errors import PeerError

dist.init_process_group("wfbp")
dist.all_reduce(torch.ones(1))
rank, problem = dist.get_rank(), ""
if rank != 1:
    try:
        dist.all_reduce(torch.ones(1))
    except PeerError as error:
        problem = str(error)
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(problem))
dist.destroy_process_group()
wfbp.torch.shutdown()
