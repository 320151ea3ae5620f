"""Training under Lightning on several ranks, beside a single process on the joined batches."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import wfbp.torch as wfbp
from wfbp.integrations.lightning import WfbpStrategy

NUM_SAMPLES = 40
BATCH = 8  # of all ranks together: with two ranks five batches, so the last step has one of two
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(lightning.LightningModule):
    """A classifier, whose first parameters differ from rank to rank."""

    def __init__(self, seed: int, adam: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        )
        self.adam = adam

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        kind, rate = (torch.optim.Adam, 0.01) if self.adam else (torch.optim.SGD, 0.2)
        options = {} if self.adam else {"momentum": 0.9}
        optimizer = kind(self.parameters(), lr=rate, **options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def trained(strategy: Any, batch: int, folder: Path, adam: bool, **options: Any) -> Any:
    """Parameters and the loss after some epochs, interrupted by a checkpoint."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    labels = torch.randint(3, (NUM_SAMPLES,), generator=generator)
    data = TensorDataset(inputs, labels)
    # The sampler that Lightning would put in shuffles, in another order than a single process.
    part = {"num_replicas": wfbp.size(), "rank": wfbp.rank(), "shuffle": False}
    sampler = DistributedSampler(data, **part) if strategy is WfbpStrategy else None
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    quiet = {**QUIET, **options}
    path = folder / f"{wfbp.rank()}.ckpt"
    trainer = lightning.Trainer(strategy=strategy(), max_epochs=2, **quiet)
    seed = wfbp.rank() if strategy is WfbpStrategy else 0
    trainer.fit(Model(seed, adam), loader)
    trainer.save_checkpoint(path)
    wfbp.barrier()
    if strategy is WfbpStrategy:  # rank 0 alone has written
        assert path.exists() == (wfbp.rank() == 0)
        path = folder / "0.ckpt"
    model = Model(5, adam)
    trainer = lightning.Trainer(strategy=strategy(), max_epochs=3, **quiet)
    trainer.fit(model, loader, ckpt_path=path, weights_only=False)
    wfbp.barrier()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return parameters, trainer.callback_metrics["loss"]


class Measured(Model):
    """Logs metrics of values that fall on rank 0 and rise on the others."""

    def __init__(self) -> None:
        super().__init__(0, adam=False)
        self.mean = torchmetrics.MeanMetric()
        self.values = torchmetrics.CatMetric()

    def on_train_start(self) -> None:
        self.late = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, index: int) -> None:
        value = float(self.current_epoch + 1) * (-3 if wfbp.rank() == 0 else 1)
        for metric in (self.mean, self.late):
            metric.update(value)
        self.values.update(torch.full((1 + wfbp.rank(),), value))
        self.log_dict({"mean": self.mean, "late": self.late})

    def on_validation_epoch_end(self) -> None:
        self.seen = self.values.compute().tolist()
        self.values.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "mean"},
        }


def measured() -> None:
    """Metrics combine the values of all ranks, so that learning rates agree."""
    data = TensorDataset(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    module, size = Measured(), wfbp.size()
    trainer = lightning.Trainer(
        strategy=WfbpStrategy(), max_epochs=3, num_sanity_val_steps=0, **QUIET
    )
    trainer.fit(module, DataLoader(data), DataLoader(data))
    for name in ("mean", "late"):
        assert trainer.callback_metrics[name].item() == 3.0 * (size - 4) / size
    batches = 2 // size
    expected = [[-9.0 if rank == 0 else 3.0] * (1 + rank) * batches for rank in range(size)]
    assert module.seen == [value for row in expected for value in row], module.seen
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0


class Contrastive(Model):
    """Compares the rows of this rank with the rows of all."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        outputs = self.net(batch[0])
        return (outputs @ self.all_gather(outputs, sync_grads=True).flatten(0, 1).T).square().mean()


def gathered_with_gradients() -> None:
    """The gradient equals that of a single process with the whole batch."""
    data = TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
    module, expected = Contrastive(0, adam=False), Model(0, adam=False)
    trainer = lightning.Trainer(strategy=WfbpStrategy(), max_steps=1, **QUIET)
    part = DistributedSampler(data, wfbp.size(), wfbp.rank(), shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=8 // wfbp.size(), sampler=part))
    outputs = expected.net(data.tensors[0])
    (outputs @ outputs.T).square().mean().backward()
    torch.optim.SGD(expected.parameters(), lr=0.2).step()
    for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def single() -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device="cpu")


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    wfbp.init()
    cases: dict[str, tuple[bool, dict[str, Any]]] = {
        "clipped": (False, {"gradient_clip_val": 0.05}),
        "clipped by value": (
            True,
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ),
        "accumulated": (True, {"accumulate_grad_batches": 2}),
        "changing": (
            False,
            {
                "callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})],
                "gradient_clip_val": 0.05,
            },
        ),
    }
    for name, (adam, options) in cases.items():
        ours = folder / name / "ours"
        alone = folder / name / f"alone{wfbp.rank()}"
        for place in (ours, alone):
            place.mkdir(parents=True, exist_ok=True)
        found, loss = trained(WfbpStrategy, BATCH // wfbp.size(), ours, adam, **options)
        expected, expected_loss = trained(single, BATCH, alone, adam, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-5)
        if wfbp.rank() == 0:
            print(f"same: {name}", flush=True)
    measured()
    gathered_with_gradients()
    strategy = WfbpStrategy()
    assert strategy.reduce(torch.tensor(wfbp.rank())).item() == (wfbp.size() - 1) / 2
    assert strategy.reduce_boolean_decision(wfbp.rank() == 0, all=False)
    assert not strategy.reduce_boolean_decision(wfbp.rank() == 0)
    assert strategy.broadcast(wfbp.rank(), 1) == 1
    assert strategy.all_gather(torch.full((2,), wfbp.rank())).tolist() == [
        [rank] * 2 for rank in range(wfbp.size())
    ]
    wfbp.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
