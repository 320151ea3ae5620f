"""A script of one process: it reads no rank and starts nothing."""

import torch

print("trained", torch.ones(2).sum().item(), flush=True)
