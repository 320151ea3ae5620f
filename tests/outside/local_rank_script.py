"""An older script: --local_rank, explicit numbers, is_initialized(), then Horovod's way to wrap."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
parser.add_argument("--backend", default="gloo")
args = parser.parse_args()
if args.local_rank == -1:
    args.local_rank = int(os.environ.get("LOCAL_RANK", -1))
if args.local_rank != -1 and not dist.is_initialized():
    dist.init_process_group(
        args.backend,
        init_method="env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
gradient = torch.full((3,), float(args.local_rank))
if size > 1:
    dist.all_reduce(gradient)
    dist.barrier()
assert gradient.tolist() == [sum(range(size))] * 3
if args.local_rank in (-1, 0):
    print(f"trained on {size} ranks", flush=True)
