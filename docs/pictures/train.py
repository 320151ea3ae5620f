"""A small model for the pictures of ``draw.py``; schedule and timeline come by variables."""

from __future__ import annotations

import torch

import wfbp.torch as wfbp

WIDTH, LAYERS, BATCH, STEPS = 384, 16, 720, 40

torch.set_num_threads(1)
wfbp.init()
torch.manual_seed(0)
layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = wfbp.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
wfbp.broadcast_parameters(model.state_dict(), root_rank=0)
inputs = torch.randn(BATCH, WIDTH)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
