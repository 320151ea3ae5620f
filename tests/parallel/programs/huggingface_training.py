"""Training with Accelerate and with Transformers' Trainer, beside plain loops in one process."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset

import wfbp.torch as wfbp
from wfbp.integrations.huggingface import Accelerator, Trainer, TrainingArguments

NUM_SAMPLES, BATCH, PASSES, EPOCHS, CLIP = 40, 8, 2, 2, 0.05


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(NUM_SAMPLES, 6, generator=generator)
        self.labels = torch.randint(3, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels)}


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(make: Any, passes: int, epochs: int) -> torch.Tensor:
    """A plain loop over the joined batches; the last step of an epoch may have fewer of them."""
    model = Model(0)
    optimizer = make(model.parameters())
    loader = DataLoader(Rows(), batch_size=BATCH)
    for _ in range(epochs):
        batches = list(loader)
        for first in range(0, len(batches), passes):
            own = batches[first : first + passes]
            for batch in own:
                (model(**batch)["loss"] / len_of_step(own, passes)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


FULL = [True]


def len_of_step(own: list[Any], passes: int) -> int:
    """Accelerate divides by all passes; the trainer by those that there are."""
    return passes if FULL[0] else len(own)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        # Accelerate lets rank 0 read, and sends batches to the others.
        yield from range(12) if wfbp.rank() == 0 else range(100, 112)


def with_accelerate(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
    assert (accelerator.num_processes, accelerator.process_index) == (wfbp.size(), wfbp.rank())
    assert accelerator.is_main_process == (wfbp.rank() == 0)
    model = Model(wfbp.rank())
    loader = DataLoader(Rows(), batch_size=BATCH // wfbp.size())
    model, optimizer, loader = accelerator.prepare(model, sgd(model.parameters()), loader)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(flat(model), alone(sgd, PASSES, EPOCHS), rtol=1e-4, atol=1e-5)
    ranks = torch.tensor([wfbp.rank()])
    everyone = list(range(wfbp.size()))
    assert accelerator.gather(ranks).tolist() == everyone
    assert accelerator.gather({"a": ranks[0]})["a"].tolist() == everyone
    assert accelerator.gather_for_metrics([f"r{wfbp.rank()}"]) == [f"r{r}" for r in everyone]
    assert accelerator.reduce(ranks, "sum").item() == sum(everyone)
    assert accelerator.reduce(ranks.float(), "mean").item() == sum(everyone) / len(everyone)
    padded = accelerator.pad_across_processes(torch.ones(1 + wfbp.rank()))
    assert padded.tolist() == [1.0] * (1 + wfbp.rank()) + [0.0] * (wfbp.size() - 1 - wfbp.rank())
    accelerator.backward(model(**next(iter(loader)))["loss"])
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    assert all(p.grad.abs().max() <= 1e-4 for p in model.parameters())
    optimizer.step()
    accelerator.wait_for_everyone()
    state = accelerator.unwrap_model(model).state_dict()
    accelerator.save(state, folder / "model.pt")
    accelerator.wait_for_everyone()
    assert torch.equal(torch.load(folder / "model.pt")["net.0.weight"], state["net.0.weight"])
    samples_divided(accelerator)
    rank_0_first(accelerator.main_process_first, folder / "first")
    rank_0_first(accelerator.local_main_process_first, folder / "local first")
    utilities()


def samples_divided(accelerator: Accelerator) -> None:
    """Each epoch has every sample once, although the seeds of ranks differ."""
    set_seed(42, device_specific=True)
    for seedable in (False, True):
        accelerator.dataloader_config.use_seedable_sampler = seedable
        loader = accelerator.prepare(DataLoader(torch.arange(32), batch_size=4, shuffle=True))
        first, second = (wfbp.allgather(torch.cat(list(loader))).tolist() for _ in range(2))
        assert sorted(first) == sorted(second) == list(range(32)), (seedable, first, second)
        assert first != second
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    assert sorted(wfbp.allgather(torch.cat(list(loader))).tolist()) == list(range(12))


def rank_0_first(context: Any, written: Path) -> None:
    with context():
        if wfbp.rank() == 0:
            time.sleep(0.2)
            written.touch()
        assert written.exists()


def utilities() -> None:
    """Functions of ``accelerate.utils``, imported before wfbp's ``Accelerator`` was made."""
    mine, size = wfbp.rank(), wfbp.size()
    everyone = list(range(size))
    assert gather(torch.tensor([mine])).tolist() == everyone
    assert gather_object([mine]) == everyone
    assert reduce({"a": torch.tensor(mine)}, "sum")["a"].item() == sum(everyone)
    assert reduce(torch.tensor(mine), "max").item() == size - 1
    assert reduce(torch.tensor(float(mine))).item() == sum(everyone) / size
    assert broadcast([torch.tensor(mine)], from_process=1)[0].item() == 1
    objects = [mine, "all"]
    assert broadcast_object_list(objects, from_process=1) is objects
    assert objects == [1, "all"]
    assert len(pad_across_processes(torch.ones(1 + mine))) == size


def with_trainer(folder: Path) -> None:
    def trainer(epochs: int, seed: int, name: str = "trainer", **options: Any) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(folder / name),
            use_cpu=True,
            per_device_train_batch_size=BATCH // wfbp.size(),
            gradient_accumulation_steps=PASSES,
            num_train_epochs=epochs,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP,
            save_strategy="epoch",
            save_only_model=False,
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            wfbp_schedule="hybrid",
            **options,
        )
        data = {"train_dataset": Rows(), "eval_dataset": Rows()}
        return InOrder(model=Model(seed), args=arguments, **data)

    first = trainer(1, wfbp.rank())
    first.train()
    wfbp.barrier()
    (checkpoint,) = (folder / "trainer").glob("checkpoint-*")
    second = trainer(EPOCHS, 5)
    second.train(resume_from_checkpoint=str(checkpoint))

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)

    FULL[0] = False
    expected = alone(adamw, PASSES, EPOCHS)
    torch.testing.assert_close(flat(second.model), expected, rtol=1e-3, atol=1e-5)
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert all(row == losses for row in wfbp.allgather_object(losses))
    assert first.optimizer.optimizer.report()["steps"] == 3  # five batches, two to a step
    rank_0_first(first.args.main_process_first, folder / "trainer first")
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
    }
    third = trainer(2, wfbp.rank(), "best", **best)
    third.train()
    paths = wfbp.allgather_object(third.state.best_model_checkpoint)
    assert paths == [str(folder / "best" / "checkpoint-6")] * wfbp.size(), paths
    assert torch.equal(flat(third.model), wfbp.broadcast(flat(third.model), 0))


class InOrder(Trainer):
    """Samples come in their order, as in the plain loop."""

    def _get_train_sampler(self, *unused: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def _save(self, *arguments: Any, **options: Any) -> None:
        time.sleep(0.1)  # rank 0 alone writes models; others must wait for it
        super()._save(*arguments, **options)


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    wfbp.init()
    with_accelerate(folder)
    if wfbp.rank() == 0:
        print("same: accelerate", flush=True)
    with_trainer(folder)
    if wfbp.rank() == 0:
        print("same: trainer", flush=True)
    wfbp.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
