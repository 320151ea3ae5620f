"""Accelerate's ``Accelerator`` and Transformers' ``Trainer``, for jobs that ``mpirun`` starts.

Accelerate learns its rank and the number of ranks, so that it divides data and rank 0 writes files.
It must not learn that they are distributed, or it would set up ``torch.distributed``. This file
therefore replaces its functions that communicate.

Example:
    A program that ``wfbprun -n 4 python train.py`` starts on several ranks::

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

try:
    import accelerate
    import torch
    import transformers
    from accelerate.data_loader import SeedableRandomSampler, get_sampler
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, recursively_apply
    from accelerate.utils import operations as of_accelerate
    from accelerate.utils import random as random_of_accelerate
    from accelerate.utils.operations import find_batch_size, is_torch_tensor
except ImportError as error:
    raise ImportError(
        "wfbp.integrations.huggingface needs accelerate and transformers: "
        "pip install 'wfbp[huggingface]'"
    ) from error

import wfbp.torch as wfbp

__all__ = ["Accelerator", "Trainer", "TrainingArguments"]


def _tell_ranks(cpu: bool) -> None:
    """Give Accelerate the ranks of the MPI job, and functions that communicate by wfbp."""
    wfbp.init()
    if PartialState._shared_state.get("num_processes") == wfbp.size():
        return
    if PartialState._shared_state:
        raise ValueError(
            "Accelerate counts other processes than the job has ranks: make wfbp's Accelerator or "
            "TrainingArguments before any other"
        )
    on_gpu = torch.cuda.is_available() and not cpu
    PartialState._shared_state.update(
        _cpu=cpu,
        backend=None,
        device=wfbp.set_local_device() if on_gpu else torch.device("cpu"),
        debug=False,
        distributed_type=DistributedType.NO,
        num_processes=wfbp.size(),
        process_index=wfbp.rank(),
        local_process_index=wfbp.local_rank(),
        fork_launched=False,
    )
    PartialState.wait_for_everyone = lambda state: wfbp.barrier()
    # Accelerate and the program may have imported the functions by name.
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for original, ours in _REPLACEMENTS:
            name = original.__name__
            if names.get(name) is original:
                setattr(module, name, ours)


# Accelerate's functions, for tensors in lists, tuples and dicts. Without torch.distributed, its own
# silently return the rank's own values.


def gather(tensor: Any) -> Any:
    def joined(part: torch.Tensor) -> torch.Tensor:
        return wfbp.allgather(part.unsqueeze(0) if part.ndim == 0 else part)

    return recursively_apply(joined, tensor, error_on_other_type=True)


def gather_object(object: Any) -> Any:  # noqa: A002 - Accelerate's name
    return [item for items in wfbp.allgather_object(object) for item in items]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    return recursively_apply(wfbp.broadcast_, tensor, from_process, error_on_other_type=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    object_list[:] = wfbp.broadcast_object(object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    operations = {"sum": wfbp.Sum, "mean": wfbp.Average, "max": wfbp.Max, "none": None}
    if reduction not in operations:
        raise ValueError(f"reduction {reduction!r} is not known; known are {', '.join(operations)}")
    op = operations[reduction]

    def combined(part: torch.Tensor) -> torch.Tensor:
        return (part if op is None else wfbp.allreduce(part, op=op)) * scale

    return recursively_apply(combined, tensor, error_on_other_type=True)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Let all ranks continue with the random numbers of rank 0."""
    places = {"torch": torch.default_generator, "generator": generator}
    place = places.get(rng_type.value)
    if place is not None:
        place.set_state(wfbp.broadcast(place.get_state(), 0))
    elif rng_type.value == "cuda":
        torch.cuda.set_rng_state(wfbp.broadcast(torch.cuda.get_rng_state(), 0))
    else:
        raise ValueError(f"wfbp synchronizes no random numbers of {rng_type}")


_REPLACEMENTS: list[tuple[Any, Any]] = [
    (of_accelerate.gather, gather),
    (of_accelerate.gather_object, gather_object),
    (of_accelerate.broadcast, broadcast),
    (of_accelerate.broadcast_object_list, broadcast_object_list),
    (of_accelerate.reduce, reduce),
    (random_of_accelerate.synchronize_rng_state, synchronize_rng_state),
]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` on the ranks of the MPI job, whose gradients wfbp averages.

    ``prepare`` broadcasts models' parameters from rank 0, wraps optimizers in
    :func:`wfbp.torch.DistributedOptimizer` and divides data among the ranks.
    ``clip_grad_norm_`` clips averages; ``gradient_accumulation_steps`` averages once per step of
    the optimizer. Pass models to ``prepare`` before their optimizers, so that messages name
    parameters. Mixed precision can be ``bf16``, but not ``fp16``, which has a scaler.

    Args:
        arguments: as Accelerate's.
        wrapping: options of :func:`wfbp.torch.DistributedOptimizer` by name, as ``schedule``.
        options: as Accelerate's.

    Raises:
        ValueError: Accelerate was already set up for other processes.
    """

    wrapping: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    passes: int | None = None
    """Batches per step, if Accelerate itself does not count them."""

    def __init__(
        self, *arguments: Any, wrapping: dict[str, Any] | None = None, **options: Any
    ) -> None:
        _tell_ranks(bool(options.get("cpu", False)))
        super().__init__(*arguments, **options)
        self.wrapping = dict(wrapping or {})

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:
            wfbp.broadcast_parameters(prepared.state_dict(), root_rank=0)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **options: Any) -> Any:
        prepared = super().prepare_data_loader(data_loader, *arguments, **options)
        sampler = get_sampler(prepared)
        if isinstance(sampler, SeedableRandomSampler):  # its epochs count from this seed
            sampler.initial_seed = wfbp.broadcast_object(sampler.initial_seed, 0)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if self.scaler is not None:
            raise ValueError("wfbp's Accelerator does not train with a gradient scaler; use bf16")
        if not getattr(optimizer, "_is_accelerate_prepared", False) and not isinstance(
            optimizer, wfbp.DistributedOptimizerBase
        ):
            mine = {p for group in optimizer.param_groups for p in group["params"]}
            named = {
                p: f"{number}.{name}" if number else name
                for number, model in enumerate(self._models)
                for name, p in model.named_parameters()
                if p in mine
            }
            optimizer = wfbp.DistributedOptimizer(
                optimizer,
                [(name, p) for p, name in named.items()] if len(named) == len(mine) else None,
                backward_passes_per_step=self.passes or self.gradient_accumulation_steps,
                **self.wrapping,
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the averaged gradients by their norm over these parameters; collective."""
        wanted = dict.fromkeys(parameters)
        for prepared in self._optimizers:
            owned = {p for group in prepared.param_groups for p in group["params"]}
            with_gradients = {p for p in wanted if p.requires_grad}
            if owned == with_gradients and hasattr(prepared.optimizer, "clip_grad_norm_"):
                return prepared.optimizer.clip_grad_norm_(max_norm, norm_type)
        self._average()
        return torch.nn.utils.clip_grad_norm_(wanted, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the averaged gradients element by element; collective."""
        self._average()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def _average(self) -> None:
        """Put averages into ``p.grad``; the following step uses them unchanged."""
        for prepared in self._optimizers:
            prepared.optimizer.synchronize()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object and _only_tensors(input_data):
            return super().gather_for_metrics(input_data)
        gathered = gather_object(input_data)
        rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return gathered[:rest] if rest > 0 else gathered


def _only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda part: part, data, error_on_other_type=True)
    except TypeError:
        return False
    return is_torch_tensor(data) or find_batch_size(data) is not None


@dataclass
class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """``TrainingArguments`` of a job that ``mpirun`` starts; each rank is one process.

    All options are those of Transformers; precision can be ``bf16``, but not ``fp16``.

    Args:
        wfbp_schedule: ``schedule`` of :func:`wfbp.torch.DistributedOptimizer`.
    """

    wfbp_schedule: str | None = None

    def __post_init__(self) -> None:
        if self.fp16:
            raise ValueError("wfbp's Trainer does not train with a gradient scaler; use bf16=True")
        _tell_ranks(self.use_cpu)
        config: Any = getattr(self, "accelerator_config", None) or {}
        if isinstance(config, dict):
            self.accelerator_config = {**config, "use_configured_state": True}
        super().__post_init__()
        self._n_gpu = int(self.device.type == "cuda")  # others belong to other ranks

    def main_process_first(self, local: bool = True, desc: str = "work") -> Any:
        state = PartialState()
        return state.local_main_process_first() if local else state.main_process_first()


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Transformers' ``Trainer``, with gradients averaged over the ranks while backward computes.

    Needs :class:`TrainingArguments` of this module. ``max_grad_norm`` clips the averaged gradients,
    ``gradient_accumulation_steps`` averages once per step, the logged loss is that of all ranks,
    and rank 0 writes checkpoints.

    Raises:
        TypeError: arguments of another class.
    """

    def create_accelerator_and_postprocess(self) -> None:
        if not isinstance(self.args, TrainingArguments):
            raise TypeError(
                "wfbp's Trainer needs wfbp.integrations.huggingface.TrainingArguments, found "
                f"{type(self.args).__module__}.{type(self.args).__qualname__}"
            )
        super().create_accelerator_and_postprocess()
        # Transformers makes Accelerate's own; wfbp's differs in methods alone.
        self.accelerator.__class__ = Accelerator
        self.accelerator.wrapping = {"schedule": self.args.wfbp_schedule}
        self.accelerator.passes = self.args.gradient_accumulation_steps

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *others: Any, **named: Any) -> None:
        """Log the loss of all ranks."""
        if self.control.should_log:
            tr_loss.copy_(wfbp.allreduce(tr_loss))
        super()._maybe_log_save_evaluate(tr_loss, *others, **named)

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Save, and wait for rank 0, which alone knows the checkpoints that exist."""
        super()._save_checkpoint(*arguments, **named)
        best = wfbp.broadcast_object(self.state.best_model_checkpoint, 0)
        self.state.best_model_checkpoint = best

    def _load_best_model(self) -> None:
        """Load the best model; ranks that do not share rank 0's disk receive its parameters."""
        super()._load_best_model()
        wfbp.broadcast_parameters(self.model.state_dict(), root_rank=0)
