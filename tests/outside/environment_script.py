"""A GPT trainer's way of starting: RANK decides whether the program is distributed."""

import argparse
import os

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="gloo")
parser.add_argument("--checkpoint", required=True)
options = parser.parse_args()

ddp = int(os.environ.get("RANK", -1)) != -1
rank, world_size, master_process = 0, 1, True
if ddp:
    init_process_group(backend=options.backend)
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    assert 0 <= local_rank < int(os.environ["LOCAL_WORLD_SIZE"])
    master_process = rank == 0
torch.manual_seed(1337 + rank)
model = torch.nn.Linear(8, 1)
if ddp:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(16 // world_size, 8)
    optimizer.zero_grad(set_to_none=True)
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
weight = next(model.parameters()).detach()
if ddp:
    others = [torch.empty_like(weight) for _ in range(world_size)]
    torch.distributed.all_gather(others, weight)
    assert all(torch.equal(weight, other) for other in others)
if master_process:
    torch.save(weight, f"{options.checkpoint}.{os.getpid()}")
    print(f"trained on {world_size} ranks", flush=True)
if ddp:
    destroy_process_group()
