"""What every distributed optimizer offers besides what PyTorch's optimizers do, and how it takes
the place of the optimizer that it is made of."""

from __future__ import annotations

import types
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch


# Without ``ABC``: classes that are derived together with it may have a metaclass of their own.
class DistributedOptimizerBase(torch.optim.Optimizer):
    """What :func:`DistributedOptimizer` returns, besides an instance of the optimizer's own class.

    ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` are those of any optimizer;
    every rank steps and loads alike, any rank may take the ``state_dict()`` alone. All other
    attributes are those of the optimizer that it was made of, which stays as it is.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> optimizer = wfbp.DistributedOptimizer(sgd)
        >>> isinstance(optimizer, wfbp.DistributedOptimizerBase), isinstance(optimizer, type(sgd))
        (True, True)
    """

    _wfbp_original: torch.optim.Optimizer
    _wfbp_own: ClassVar[frozenset[str]]
    """Names of attributes that are not the original's."""
    _wfbp_bare: dict[str, Any]
    """The original's own methods that this object replaces; see :func:`take_place`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = [vars(base) for base in cls.__mro__ if issubclass(base, DistributedOptimizerBase)]
        cls._wfbp_own = frozenset[str]().union(*ours)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object that ``__init__`` fills, without what the user's class does here."""
        return object.__new__(cls)

    # Methods of the user's class are in this object's class, too, so that isinstance() holds. They
    # must be looked up on the original: bound methods and ``__dict__`` are its own.
    if not TYPE_CHECKING:  # which would take every name for one that exists

        def __getattribute__(self, name: str) -> Any:
            if name.startswith(("_wfbp_", "__")) or name in type(self)._wfbp_own:
                return object.__getattribute__(self, name)
            return self._wfbp_read(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith(("_wfbp_", "__")) or name in type(self)._wfbp_own:
                object.__setattr__(self, name, value)
            else:
                setattr(self._wfbp_original, name, value)

        def __delattr__(self, name: str) -> None:
            if name.startswith(("_wfbp_", "__")) or name in type(self)._wfbp_own:
                object.__delattr__(self, name)
            else:
                delattr(self._wfbp_original, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a distributed {type(self).__name__} cannot be copied or pickled: it exchanges "
            "gradients with other ranks; copy or save its state_dict()"
        )

    def _wfbp_read(self, name: str) -> Any:
        """An attribute of the original."""
        return getattr(self._wfbp_original, name)

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

        With a schedule that decouples they may still travel after ``step()``. Whoever reads one
        waits for it, so this is needed only before code that PyTorch does not notice: CUDA graphs,
        addresses kept elsewhere, and C++ extensions that are given a parameter outside the forward
        of its module. Any rank may call it, alone.

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
        """The plan in use, and how training goes; empty with one rank, and with ``op=Adasum``.

        Returns:
            Plain values; None if not yet known.

            * ``schedule``, ``plan`` (in words), ``plan_digest``, ``overlap`` (whether messages are
              sent during backward), ``num_groups`` (messages), ``num_tensors``, ``total_bytes`` (in
              messages, per step).
            * ``phase``: ``warm-up``, ``profile``, ``trial`` or ``installed``; ``steps`` so far.
            * In seconds: ``measured_iteration_s`` and ``exposed_s`` (waiting for communication),
              medians of the last steps; ``predicted_iteration_s``, ``predicted_exposed_s``, and
              ``lower_bound_s``, which no plan can beat.
            * ``ratio_to_lower_bound``: T/LB; ``kappa``: interference of communication with compute.
        """


_WRAPPED = "_wfbp_wrapped"
"""Attribute of an optimizer: what was last made of it, and may hold shards of its state."""

_REPLACED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""Methods of the original that the distributed optimizer replaces."""


def wrapped_of(optimizer: torch.optim.Optimizer) -> Any:
    """What was last made of an optimizer, or None."""
    return vars(optimizer).get(_WRAPPED)


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's instance attributes, as the program has set them."""
    wrapped = wrapped_of(optimizer)
    if wrapped is None:
        return vars(optimizer)
    before: dict[str, Any] = wrapped._wfbp_before
    return {k: v for k, v in vars(optimizer).items() if k not in _REPLACED} | before


def take_place(distributed: Any, refuses: bool) -> None:
    """Let a distributed optimizer take its original's place, and that of an earlier one.

    ``refuses``: the original's own step becomes an error, because it would not average gradients;
    its other methods do what the distributed optimizer's do. ``_wfbp_bare`` has those that the
    program gave it.
    """
    original = distributed._wfbp_original
    attributes = own_attributes(original)
    distributed._wfbp_before = {k: attributes[k] for k in _REPLACED if k in attributes}
    for name in _REPLACED:
        vars(original).pop(name, None)
    vars(original).update(distributed._wfbp_before)
    distributed._wfbp_bare = {name: getattr(original, name) for name in _REPLACED}
    vars(original)[_WRAPPED] = distributed
    if not refuses:
        return
    kind = type(original).__name__

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"this {kind} was made into a distributed optimizer, and its own step() would not "
            "average gradients over the ranks; call step() of what DistributedOptimizer() returned"
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # nothing for a scheduler here
    vars(original).update({name: getattr(distributed, name) for name in _REPLACED})
    vars(original)["step"] = types.MethodType(step, original)
