"""Training by DDP under Accelerate or Lightning, with the backend ``wfbp`` of torch.distributed.

``process_group_trainers.py OUT accelerate|lightning``, under mpirun. Each rank writes how far its
parameters are from those of one process that has the batches of all ranks.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wfbp.torch.distributed

NUM_SAMPLES, BATCH, EPOCHS = 24, 4, 2


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, TensorDataset(torch.randn(NUM_SAMPLES, 6), torch.randint(3, (NUM_SAMPLES,)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def with_accelerate() -> tuple[nn.Module, int]:
    """Accelerate uses the process group that there is."""
    from accelerate import Accelerator

    dist.init_process_group("wfbp")
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    plain, data = model_and_data()
    model, optimizer, loader = accelerator.prepare(
        plain, optimizer_of(plain), DataLoader(data, batch_size=BATCH)
    )
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
    assert ranks.tolist() == list(range(accelerator.num_processes))
    return accelerator.unwrap_model(model), accelerator.num_processes


def with_lightning() -> tuple[nn.Module, int]:
    """Lightning makes the process group."""
    import lightning
    from lightning.fabric.plugins.environments import MPIEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DistributedSampler

    plain, data = model_and_data()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    environment = MPIEnvironment()
    size, rank = environment.world_size(), environment.global_rank()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend="wfbp", cluster_environment=environment),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False)
    trainer.fit(Module(), DataLoader(data, batch_size=BATCH, sampler=sampler))
    return plain, size


def alone(size: int) -> nn.Module:
    """The same on one process, with the batches of all ranks as one.

    Lightning's sampler gives ranks every ``size``-th sample, Accelerate every ``size``-th batch:
    either way each step has the next ``size * BATCH`` samples.
    """
    model, data = model_and_data()
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for batch in DataLoader(data, batch_size=size * BATCH):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


def main(out: str, library: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model, size = with_lightning() if library == "lightning" else with_accelerate()
    assert dist.get_backend() == "wfbp"
    rank = dist.get_rank()
    expected = nn.utils.parameters_to_vector(alone(size).parameters())
    found = nn.utils.parameters_to_vector(model.parameters())
    Path(out, f"rank{rank}.json").write_text(json.dumps((found - expected).abs().max().item()))
    dist.destroy_process_group()
    wfbp.torch.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
