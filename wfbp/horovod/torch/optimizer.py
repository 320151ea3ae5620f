"""What :func:`wfbp.horovod.torch.DistributedOptimizer` returns.

With ``op=Adasum`` every rank updates its parameters by its own optimizer from its own gradients.
The change of each parameter, and not its gradient, is then combined over the ranks. Changes that
are alike are averaged, and orthogonal ones are added (Maleki et al., "Scaling Distributed Training
with Adaptive Summation", 2020). So the learning rate need not grow with the number of ranks. Each
rank has its own optimizer state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from wfbp.errors import DisagreementError
from wfbp.horovod.torch.adasum import HorovodOp, perform
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.collectives.forms import FORMS
from wfbp.runtime.collectives.process_sets import ProcessSet
from wfbp.runtime.consistency import SAME_TENSORS, describe_specs
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Compressor
from wfbp.torch.optimizer import DistributedOptimizerBase, SyncState
from wfbp.torch.original import named_params, take_place, wrapped_of


class HorovodOptimizer(DistributedOptimizerBase):
    """A distributed optimizer that warns of what Horovod does otherwise."""

    _wfbp_synchronized = False
    """Whether the program has called :meth:`synchronize` since the last step."""

    def synchronize(self) -> None:
        """As :meth:`DistributedOptimizerBase.synchronize`."""
        super().synchronize()
        self._wfbp_synchronized = True

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`DistributedOptimizerBase.step`; warns after ``synchronize()`` without
        ``skip_synchronize()``, which averages twice under Horovod."""
        synchronized = self._wfbp_synchronized and self._wfbp_sync_state is SyncState.PROGRAM
        self._wfbp_synchronized = False
        if synchronized and not self._wfbp_skip and closure is None and self._wfbp_sync is not None:
            warnings.warn(
                # Programs filter for the words of Horovod's that say what was called.
                f"{type(self).__name__}: optimizer.step() called without "
                "optimizer.skip_synchronize(), though synchronize() was. Here gradients are "
                "not averaged twice, but under Horovod they are: write "
                "`with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        return super().step(closure, *args, **kwargs)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As :meth:`DistributedOptimizerBase.clip_grad_norm_`."""
        norm = super().clip_grad_norm_(*args, **kwargs)
        self._wfbp_synchronized = False  # Horovod has no such method
        return norm

    def _wfbp_differs(self, error: DisagreementError) -> None:
        warnings.warn(str(error), stacklevel=2)

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names that match parameters across ranks; some programs for Horovod read this."""
        named = named_params(self, self._wfbp_known, complete=False)
        return {param: name for name, param in named}


_TITLE = f"DistributedOptimizer(op={HorovodOp.ADASUM})"


class AdasumOptimizer(HorovodOptimizer):
    """Mixin over the user's optimizer class: combines what its steps change.

    For its base it is the optimizer of a rank that steps alone. ``runtime`` is None on a rank that
    does.
    """

    def __init__(
        self,
        runtime: Runtime | None,
        original: torch.optim.Optimizer,
        known: list[tuple[str, torch.Tensor]] | None,
        process_set: ProcessSet,
        compression: type[Compressor],
        sparse_as_dense: bool,
    ) -> None:
        """Take the original's place; a collective."""
        among = runtime if runtime and runtime.size > 1 else None
        named = named_params(original, known, complete=True)
        for name, param in named:
            tensors.check(name, param)
        if among is not None:
            if among.size & (among.size - 1):
                raise ValueError(
                    f"{among.where}: {_TITLE} combines a power of two of ranks; there are "
                    f"{among.size}. Start 2, 4, 8, ... ranks, pass a process_set of so many, or "
                    "op=Average"
                )
            kind = type(original)
            settings = {"the optimizer's class": f"{kind.__module__}.{kind.__qualname__}"}
            same = describe_specs([tensors.spec(n, p) for n, p in named]), settings
            among.channel.exchange(b"", _TITLE, same=same, remedy=SAME_TENSORS)
            self._wfbp_prefix = f"adasum.{next(among.optimizer_numbers)}"
        previous = getattr(wrapped_of(original), "_wfbp_sync", None)
        if previous is not None and previous.runtime is among and not previous.successor:
            previous.release()
        super().__init__(None, original, known, ReducerOptions("single", 1), sparse_as_dense)
        self._wfbp_among = among
        self._wfbp_process_set = process_set
        self._wfbp_compression = compression
        take_place(self, refuses=among is not None)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Let this rank's optimizer step, and combine what it changed with the others' changes.

        Returns what the optimizer's step returned.
        """
        if self._wfbp_among is None:
            return super().step(closure, *args, **kwargs)
        params = [p for _, p in named_params(self, self._wfbp_known, complete=False)]
        before = [p.detach().clone() for p in params]
        result = super().step(closure, *args, **kwargs)
        with torch.no_grad():
            changes = [p - start for p, start in zip(params, before, strict=True)]
            for param, start in zip(params, before, strict=True):
                param.copy_(start)  # equal on all ranks, should these not combine
            changes = perform(
                FORMS["grouped_allreduce"],
                changes,
                name=self._wfbp_prefix,
                compression=self._wfbp_compression,
                op=HorovodOp.ADASUM,
                process_set=self._wfbp_process_set,
            )
            for param, start, change in zip(params, before, changes, strict=True):
                param.copy_(start + change)
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are not exchanged."""
        yield

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read first by ``GradScaler.step()``, which may then leave out ``step()``."""
        if self._wfbp_among is not None:
            raise RuntimeError(
                f"{_TITLE} combines steps, and a GradScaler would skip them on one rank alone; "
                "train without it, in bfloat16 or float32"
            )
        return super()._step_supports_amp_scaling

    def skip_synchronize(self) -> NoReturn:
        """Raise ``RuntimeError``: :meth:`step` itself makes the updates that are combined."""
        raise RuntimeError(
            f"a distributed optimizer with op={HorovodOp.ADASUM} has no gradients to synchronize: "
            "it combines what its step changed. Change or clip this rank's gradients and call "
            "step()"
        )
