"""What every distributed optimizer offers besides what PyTorch's optimizers do."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch


# Without ``ABC``: classes over which it is laid may have a metaclass of their own.
class DistributedOptimizerBase(torch.optim.Optimizer):
    """What :func:`DistributedOptimizer` returns, besides an instance of the optimizer's own class.

    It is laid over that class. ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` are
    those of any optimizer; every rank steps and loads alike, any rank may take the ``state_dict()``
    alone.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> optimizer = wfbp.DistributedOptimizer(sgd)
        >>> isinstance(optimizer, wfbp.DistributedOptimizerBase), isinstance(optimizer, type(sgd))
        (True, True)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object that ``__init__`` fills; what the user's class makes of it is not asked."""
        return object.__new__(cls)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all gradients of this step are averaged; ``p.grad`` then holds the averages.

        Use it before reading or changing gradients, and step inside :meth:`skip_synchronize`;
        to clip them, :meth:`clip_grad_norm_` costs less. Parameters that still travel are waited
        for, too; for them alone call :meth:`synchronize_parameters`. Every rank must call it. With
        ``op=Adasum`` it does nothing: there is no communication before ``step()``.

        Raises:
            RuntimeError: gradients were changed in place since backward.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """

    @abstractmethod
    def synchronize_parameters(self) -> None:
        """Wait until all parameters are up to date.

        By a schedule that decouples they may still travel behind ``step()``. A thread that reads
        one waits for it, so this is needed only before code that PyTorch does not hear of, such as
        CUDA graphs or addresses kept elsewhere. Any rank may call it, alone.

        Raises:
            WfbpError: ranks failed, or did not answer in time.
        """

    @abstractmethod
    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Within it, ``step()`` takes gradients as they are: they have been synchronized.

        It may be entered around a single step, or once around all of training.

        Raises:
            RuntimeError: at a ``step()`` with gradients for which :meth:`synchronize` was not
                called since backward; with ``op=Adasum`` always, because what is combined is made
                by ``step()`` itself.
        """

    @abstractmethod
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over all parameters is at most ``max_norm``.

        To be called between ``backward()`` and ``step()``, on every rank. Does what
        ``torch.nn.utils.clip_grad_norm_`` does, for the averaged gradients of this optimizer's
        parameters; ranks that hold shards of them tell each other their parts of the norm in one
        small message. With ``op=Adasum`` each rank clips its own gradients.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: 2, or another p of the p-norm, or infinity.
            error_if_nonfinite: raise where the norm is infinite or no number.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            TypeError: a norm that is no number.
            ValueError: a ``max_norm`` below zero, or a ``norm_type`` that is not above it.
            DisagreementError: ranks passed different arguments.
            RuntimeError: see ``error_if_nonfinite``; on every rank, and nothing was scaled.
            WfbpError: as :meth:`synchronize`.
        """

    @abstractmethod
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Have another number of ``backward()`` calls precede each step from now on.

        To be called between a step and the next backward, on every rank alike. Plans are made anew.
        With ``op=Adasum`` it does nothing: gradients accumulate until ``step()`` in any case.

        Raises:
            TypeError: not a whole number.
            ValueError: less than 1.
        """

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """The plan in use and what it costs; empty with one rank, and with ``op=Adasum``.

        Keys: ``schedule``, ``phase``, ``steps``, ``num_groups``, ``num_tensors``,
        ``total_bytes``, ``overlap``, ``kappa``, ``plan_digest``, and in seconds
        ``predicted_iteration_s``, ``measured_iteration_s``, ``predicted_exposed_s``,
        ``exposed_s``, ``lower_bound_s``; ``ratio_to_lower_bound`` is T/LB.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """How training goes, for logs and monitors; empty with one rank, and with ``op=Adasum``.

        Returns:
            ``iteration``: steps so far; ``iteration_s`` and ``exposed_s``: the median of the last
            steps, and how much of it training waited for communication, in seconds; ``bytes`` of
            gradients per step; ``ratio_to_lower_bound``: T/LB; ``predicted_s``; ``plan`` in words;
            ``phase``. None where not yet known.
        """
