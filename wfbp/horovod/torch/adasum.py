"""Distributed optimizers that step on their own gradients and combine their updates by Adasum.

Every rank updates its parameters by its own optimizer from its own gradients. The change of each
parameter, and not its gradient, is then combined over the ranks. Changes that are alike are
averaged, and orthogonal ones are added (Maleki et al., "Scaling Distributed Training with Adaptive
Summation", 2020). So the learning rate need not grow with the number of ranks. Each rank
has its own optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from wfbp.horovod.torch.operands import HorovodOp, perform
from wfbp.horovod.torch.optimizer import HorovodOptimizer
from wfbp.runtime import consistency
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.forms import FORMS
from wfbp.runtime.collectives.process_sets import ProcessSet
from wfbp.runtime.runtime import Runtime
from wfbp.torch import joining, state, tensors
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Compressor
from wfbp.torch.optimizer import DistributedOptimizerBase
from wfbp.torch.original import named_params, take_place, wrapped_of
from wfbp.torch.wrapping import named_pairs

_made = count()
_in_use: WeakValueDictionary[int, AdasumOptimizerBase] = WeakValueDictionary()
"""In the order of making, the same on every rank."""

_TITLE = f"DistributedOptimizer(op={HorovodOp.ADASUM})"


class AdasumOptimizerBase(DistributedOptimizerBase):
    """Mixin over the user's optimizer class: combines what its steps change."""

    def __init__(
        self,
        runtime: Runtime | None,
        original: torch.optim.Optimizer,
        known: list[tuple[str, torch.Tensor]] | None,
        process_set: ProcessSet,
        compression: type[Compressor],
        sparse_as_dense: bool,
    ) -> None:
        """Take the original's place; a collective. The runtime is None on a rank that steps
        alone."""
        self._wfbp_original = original
        self._wfbp_known = known
        self._wfbp_sync = None
        self._wfbp_process_set = process_set
        self._wfbp_compression = compression
        self._wfbp_sparse_as_dense = sparse_as_dense
        self._wfbp_runtime = runtime = runtime if runtime and runtime.size > 1 else None
        self._wfbp_num_steps = 0
        if runtime is not None:
            if runtime.size & (runtime.size - 1):
                raise ValueError(
                    f"{runtime.where}: {_TITLE} combines a power of two of ranks; there are "
                    f"{runtime.size}. Start 2, 4, 8, ... ranks, pass a process_set of so many, or "
                    "op=Average"
                )
            named = self._wfbp_named()
            for name, param in named:
                tensors.check(name, param)
            self._wfbp_prefix = f"adasum.{next(runtime.optimizer_numbers)}"
            kind = type(original)
            settings = {"the optimizer's class": f"{kind.__module__}.{kind.__qualname__}"}
            specs = consistency.encode_specs([tensors.spec(n, p) for n, p in named], settings)
            specs_of_ranks = runtime.channel.exchange(specs, f"{_TITLE}: comparing tensors")
            consistency.check_specs(f"{runtime.where}: {kind.__name__}", specs_of_ranks)
            _in_use[next(_made)] = self
        previous = getattr(wrapped_of(original), "_wfbp_sync", None)
        if previous is not None and previous.runtime is runtime and not previous.successor:
            previous.release()
        take_place(self, refuses=runtime is not None)

    def _wfbp_named(self) -> list[tuple[str, torch.Tensor]]:
        return named_params(self, self._wfbp_known, complete=False)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let this rank's optimizer step, and combine what it changed with the others' changes.

        Returns what the optimizer's step returned.
        """
        self._wfbp_make_dense()
        step = self._wfbp_bare["step"]
        if self._wfbp_runtime is None:
            return step(closure)
        named = self._wfbp_named()
        before = [p.detach().clone() for _, p in named]
        result = step(closure)
        with torch.no_grad():
            changes = perform(
                FORMS["grouped_allreduce"],
                [p - start for (_, p), start in zip(named, before, strict=True)],
                name=self._wfbp_prefix,
                compression=self._wfbp_compression,
                op=HorovodOp.ADASUM,
                process_set=self._wfbp_process_set,
            )
            for (_, param), start, change in zip(named, before, changes, strict=True):
                param.copy_(start + change)
        self._wfbp_num_steps += 1
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read first by ``GradScaler.step()``, which may then leave out ``step()``."""
        if self._wfbp_runtime is not None:
            raise RuntimeError(
                f"{_TITLE} combines steps, and a GradScaler would skip them on one rank alone; "
                "train without it, in bfloat16 or float32"
            )
        return bool(getattr(self._wfbp_original, "_step_supports_amp_scaling", False))

    def _wfbp_follow_joined(self) -> None:
        """After all ranks have joined, take over from a rank that has made the most steps."""
        runtime = self._wfbp_runtime
        assert runtime is not None
        try:
            if api.runtime_of(self._wfbp_process_set, "join()") is not runtime:
                return
        except ValueError:  # the process set was removed
            return
        counts = runtime.channel.exchange(
            str(self._wfbp_num_steps).encode(), "join(): steps by Adasum"
        )
        steps = [int(count) for count in counts]
        if len(set(steps)) > 1:
            state.share(runtime, self, self._wfbp_named(), steps.index(max(steps)))
        self._wfbp_num_steps = max(steps)

    _parameter_names = HorovodOptimizer._parameter_names

    def synchronize(self) -> None:
        """Do nothing; communication is in :meth:`step`."""

    def skip_synchronize(self) -> NoReturn:
        """Raise ``RuntimeError``: :meth:`step` itself makes the updates that are combined."""
        raise RuntimeError(
            f"a distributed optimizer with op={HorovodOp.ADASUM} has no gradients to synchronize: "
            "it combines what its step changed. Change or clip this rank's gradients and call "
            "step()"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing; communication is in :meth:`step`."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accepted: gradients accumulate until :meth:`step`, however many passes there are."""


def _follow_joined() -> None:
    for optimizer in list(_in_use.values()):
        optimizer._wfbp_follow_joined()


joining.at_end.append(_follow_joined)


def combine_steps(
    runtime: Runtime | None,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    process_set: ProcessSet,
    compression: type[Compressor],
    sparse_as_dense: bool,
) -> AdasumOptimizerBase:
    """Wrap an optimizer so that its changes are combined by Adasum; collective.

    ``runtime`` is None on a rank that steps alone.
    """
    known = None if named_parameters is None else named_pairs(named_parameters)
    named_params(optimizer, known, complete=True)
    kind = type(optimizer)
    made = type(kind.__name__, (AdasumOptimizerBase, kind), {})
    wrapped: AdasumOptimizerBase = made(
        runtime, optimizer, known, process_set, compression, sparse_as_dense
    )
    return wrapped
