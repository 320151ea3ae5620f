"""Distributed optimizers that step on their own gradients and combine their updates by Adasum.

Every rank updates its parameters by its own optimizer from its own gradients. The change of each
parameter, and not its gradient, is then combined over the ranks: changes that are alike are
averaged, changes that are orthogonal are added (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", 2020). So the learning rate need not grow with the number of ranks. Each rank
has an optimizer state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from wfbp.core.types import Op
from wfbp.runtime import consistency
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.process_sets import ProcessSet
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors
from wfbp.torch.collectives import allreduce_async
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Compressor
from wfbp.torch.optimizer_interface import DistributedOptimizerBase, take_place, wrapped_of

Named = list[tuple[str, torch.Tensor]]


class AdasumOptimizerBase(DistributedOptimizerBase):
    """What is laid over the user's optimizer class: what a step changes is combined by Adasum."""

    def __init__(
        self,
        runtime: Runtime | None,
        original: torch.optim.Optimizer,
        named: Callable[[torch.optim.Optimizer], Named],
        process_set: ProcessSet,
        compression: type[Compressor],
    ) -> None:
        """Take the original's place; a collective.

        Args:
            runtime: of the process set; None on a rank outside it, which steps alone.
            original: of the class over which this one is laid.
            named: the names and parameters of an optimizer, equal on every rank.
            process_set: the ranks that take part.
            compression: type in which updates travel.

        Raises:
            ValueError: a parameter that cannot be sent, or ranks that are no power of two.
            DisagreementError: ranks passed different parameters.
        """
        self._wfbp_original = original
        self._wfbp_named = named
        self._wfbp_process_set = process_set
        self._wfbp_compression = compression
        self._wfbp_runtime = runtime if runtime is not None and runtime.size > 1 else None
        self._wfbp_prefix = ""
        if self._wfbp_runtime is not None:
            self._wfbp_compare(self._wfbp_runtime)
        previous = getattr(wrapped_of(original), "_wfbp_sync", None)
        if previous is not None and previous.runtime is runtime and previous.exchanges:
            previous.release()
        take_place(self, refuses=self._wfbp_runtime is not None)

    def _wfbp_compare(self, runtime: Runtime) -> None:
        """Raise unless ranks have the same parameters, as many as can be combined."""
        kind = type(self._wfbp_original)
        if runtime.size & (runtime.size - 1):
            raise ValueError(
                f"{runtime.where}: DistributedOptimizer(op={Op.ADASUM}) combines a power of two of "
                f"ranks; there are {runtime.size}. Start 2, 4, 8, ... ranks, pass a process_set of "
                "so many, or op=Average"
            )
        named = self._wfbp_named(self)
        for name, param in named:
            tensors.check(name, param)
        self._wfbp_prefix = f"adasum.{next(runtime.optimizer_numbers)}"
        settings = {"the optimizer's class": f"{kind.__module__}.{kind.__qualname__}"}
        payload = consistency.encode_specs([tensors.spec(n, p) for n, p in named], settings)
        label = f"DistributedOptimizer(op={Op.ADASUM}): comparing tensors"
        consistency.check_specs(
            f"{runtime.where}: {kind.__name__}", runtime.exchange(payload, label)
        )

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let this rank's optimizer step, and combine what it changed with the others' changes.

        Args:
            closure: computes the loss of this rank's data and its gradients.

        Returns:
            What the optimizer's step returned.

        Raises:
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        step = self._wfbp_bare["step"]
        if self._wfbp_runtime is None:
            return step(closure)
        named = self._wfbp_named(self)
        before = [p.detach().clone() for _, p in named]
        result = step(closure)
        with torch.no_grad():
            changes = [p - start for (_, p), start in zip(named, before, strict=True)]
            packed = [self._wfbp_compression.compress(change) for change in changes]
            handles = [
                allreduce_async(
                    narrow,
                    name=f"{self._wfbp_prefix}.{name}",
                    op=Op.ADASUM,
                    process_set=self._wfbp_process_set,
                )
                for (name, _), (narrow, _) in zip(named, packed, strict=True)
            ]
            rows = zip(named, before, handles, packed, strict=True)
            for (_, param), start, handle, (_, context) in rows:
                change = self._wfbp_compression.decompress(api.synchronize(handle), context)
                param.copy_(start + change)
        return result

    def synchronize(self) -> None:
        """Nothing: there is no communication before :meth:`step`."""

    def synchronize_parameters(self) -> None:
        """Nothing: parameters are up to date behind :meth:`step`."""

    def skip_synchronize(self) -> NoReturn:
        """Raise ``RuntimeError``: :meth:`step` itself makes the updates that are combined."""
        raise RuntimeError(
            f"a distributed optimizer with op={Op.ADASUM} has no gradients to synchronize: it "
            "combines what its step changed. Change or clip this rank's gradients and call step()"
        )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale this rank's gradients, as ``torch.nn.utils.clip_grad_norm_`` does."""
        params: Sequence[torch.Tensor] = [p for g in self.param_groups for p in g["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accepted: gradients accumulate until :meth:`step`, however many passes there are."""

    def report(self) -> dict[str, Any]:
        """Empty: there is no plan."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Empty: there is no plan."""
        return {}

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by which ranks match parameters; some programs for Horovod read this."""
        return {param: name for name, param in self._wfbp_named(self)}
