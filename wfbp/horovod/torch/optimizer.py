"""What :func:`wfbp.horovod.torch.DistributedOptimizer` returns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from wfbp.errors import DisagreementError
from wfbp.torch.optimizer import DistributedOptimizerBase, SyncState
from wfbp.torch.original import named_params


class HorovodOptimizer(DistributedOptimizerBase):
    """A distributed optimizer that warns of what Horovod does otherwise."""

    _wfbp_synchronized = False
    """Whether the program has called :meth:`synchronize` since the last step."""

    def synchronize(self) -> None:
        """As :meth:`DistributedOptimizerBase.synchronize`."""
        super().synchronize()
        self._wfbp_synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
        return super().step(closure)

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
