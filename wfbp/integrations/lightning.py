"""A strategy for PyTorch Lightning, for jobs that ``mpirun`` or ``wfbprun`` starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import torch
    from lightning.fabric.plugins.environments import MPIEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.types import ReduceOp
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(
        "wfbp.integrations.lightning needs lightning: pip install 'wfbp[lightning]'"
    ) from error

import wfbp.torch as wfbp

__all__ = ["WfbpStrategy"]

_OPERATIONS = {
    **dict.fromkeys(("mean", "avg"), wfbp.Average),
    "sum": wfbp.Sum,
    "min": wfbp.Min,
    "max": wfbp.Max,
    "product": wfbp.Product,
}


class WfbpStrategy(ParallelStrategy):  # type: ignore[misc]
    """Trains on every rank of the MPI job, and averages gradients while backward computes.

    ``gradient_clip_val`` of the trainer clips the averaged gradients;
    ``accumulate_grad_batches`` averages once per step of the optimizer. Rank 0 broadcasts its
    parameters and writes checkpoints; samplers divide the data among the ranks. A module may have
    several optimizers, and optimize manually. Its metrics of torchmetrics are computed from the
    values of all ranks. Statistics of training are in
    ``trainer.strategy.optimizers[0].report()``. Precision can be ``bf16-mixed``, but not
    ``16-mixed``, which has a scaler.

    Args:
        schedule: of :func:`wfbp.torch.DistributedOptimizer`.
        options: its other options by name, as ``compression`` and ``optimizer_sharding``.

    Raises:
        WfbpError: MPI cannot be initialized.

    Example:
        >>> WfbpStrategy(schedule="oasr").world_size
        1
    """

    strategy_name = "wfbp"
    optimizers: list[Any]  # Lightning's property

    def __init__(self, schedule: str | None = None, **options: Any) -> None:
        wfbp.init()
        ranks = MPIEnvironment()
        ranks.local_rank()  # a collective, for which Lightning could ask on one rank alone
        super().__init__(cluster_environment=ranks)
        self._wrapping = {"schedule": schedule, **options}
        self._passes = 1

    # Lightning's interface.

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[wfbp.local_rank() % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": wfbp.size(), "rank": wfbp.rank()}

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = wfbp.rank()

    def model_to_device(self) -> None:
        module = self.lightning_module
        module.to(self.root_device)
        wfbp.broadcast_parameters(module.state_dict(), root_rank=0)
        self._synchronize_metrics()

    def _synchronize_metrics(self) -> None:
        """Let the module's metrics combine ranks by wfbp instead of ``torch.distributed``."""
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.distributed_available_fn = _has_other_ranks
                metric.dist_sync_fn = _gather_state

    # The module's own hooks run before these and may have made metrics.
    on_train_start = on_validation_start = on_test_start = _synchronize_metrics

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "WfbpStrategy does not train with a gradient scaler (precision='16-mixed'); use "
                "'bf16-mixed' or '32-true'"
            )
        module = self.lightning_module
        if module.automatic_optimization:
            self._passes = trainer.accumulate_grad_batches
        wrapped = []
        for optimizer in self.optimizers:
            mine = {p for group in optimizer.param_groups for p in group["params"]}
            named = [(n, p) for n, p in module.named_parameters() if p in mine]
            wrapped.append(
                wfbp.DistributedOptimizer(
                    optimizer, named, backward_passes_per_step=self._passes, **self._wrapping
                )
            )
        self.optimizers = wrapped

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        module = self.lightning_module
        passes = module.trainer.accumulate_grad_batches  # which a callback may change
        if module.automatic_optimization and passes != self._passes:
            self._passes = passes
            for optimizer in self.optimizers:
                optimizer.set_backward_passes_per_step(passes)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **options: Any,
    ) -> Any:
        """Run forward and backward, average and clip the gradients, and let the optimizer step."""
        module = model or self.lightning_module
        if isinstance(optimizer, torch.optim.LBFGS):  # calls its closure as often as it likes
            if module.trainer.gradient_clip_val:
                raise ValueError("LBFGS steps within its closure; gradients cannot be clipped")
            return super().optimizer_step(optimizer, closure, model, **options)
        # Lightning's own closure would clip before gradients are averaged. Unless something reads
        # them, the optimizer averages them itself, perhaps keeping only shards.
        result = closure()
        if not self._reads_gradients(module):
            optimizer.step(**options)
            return result
        distributed: Any = optimizer
        distributed.synchronize()
        self.precision_plugin._after_closure(module, optimizer)
        with distributed.skip_synchronize():
            optimizer.step(**options)
        return result

    def _reads_gradients(self, module: LightningModule) -> bool:
        """Whether something reads or changes gradients between backward and the step."""
        trainer = module.trainer
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
        return (
            bool(trainer.gradient_clip_val)
            or type(self.precision_plugin)._after_closure is not Precision._after_closure
            or any(is_overridden(hook, module, LightningModule) for hook in hooks)
            or any(is_overridden(hooks[0], callback) for callback in trainer.callbacks)
        )

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if group is not None:
            raise ValueError("WfbpStrategy reduces over all ranks; it knows no process groups")
        name = "mean" if reduce_op is None else getattr(reduce_op, "name", reduce_op)
        operation = _OPERATIONS.get(str(name).lower())
        if operation is None:
            raise ValueError(f"no reduction {reduce_op!r}; known are {', '.join(_OPERATIONS)}")
        if operation is wfbp.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.float()
        return wfbp.allreduce(tensor, op=operation)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        if group is not None:
            raise ValueError("WfbpStrategy gathers from all ranks; it knows no process groups")
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            gathered = wfbp.allgather(tensor.unsqueeze(0))
        if gathered.requires_grad:
            # Lightning's contract is the sum of the ranks' gradients; backward averages them.
            hooked: Any = gathered
            hooked.register_hook(lambda grad: grad * wfbp.size())
        return gathered

    def barrier(self, name: str | None = None) -> None:
        wfbp.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return wfbp.broadcast_object(obj, src)

    def teardown(self) -> None:
        for optimizer in self.optimizers:
            if hasattr(optimizer, "synchronize_parameters"):
                optimizer.synchronize_parameters()
        super().teardown()


# Metrics are pickled with these functions, so they are no methods.


def _has_other_ranks() -> bool:
    return wfbp.is_initialized() and wfbp.size() > 1


def _gather_state(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return a metric's state of each rank; shapes may differ."""
    if group is not None:
        raise ValueError("WfbpStrategy gathers from all ranks; it knows no process groups")
    # A clone, because a view would be pickled with all of its storage.
    gathered = wfbp.allgather_object(state.detach().cpu().clone())
    everyone = [part.to(state.device) for part in gathered]
    everyone[wfbp.rank()] = state  # which may have a gradient
    return everyone
