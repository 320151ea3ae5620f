"""The way of starting of PyTorch's tutorials for torchrun: LOCAL_RANK, a trainer class."""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model: torch.nn.Module, data: DataLoader) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.data = data
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(self, epochs: int) -> int:
        seen = 0
        for epoch in range(epochs):
            self.data.sampler.set_epoch(epoch)
            for x, y in self.data:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                seen += len(x)
        return seen


def main() -> None:
    dist.init_process_group(sys.argv[1])
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    trainer = Trainer(torch.nn.Linear(4, 1), loader)
    assert trainer.global_rank == dist.get_rank()
    seen = torch.tensor(trainer.train(2))
    dist.all_reduce(seen)
    if trainer.global_rank == 0:
        print(f"trained on {dist.get_world_size()} ranks, {int(seen)} samples", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
