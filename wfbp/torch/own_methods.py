"""Methods that an optimizer has beside PyTorch's, such as ``first_step()``.

A distributed optimizer averages new gradients before one of them runs, before a generator among
them resumes, and after each of their backward passes. Gradients that they compute by
``torch.autograd.grad`` are not averaged; :class:`Differentiation` detects that they use some.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_map

from wfbp.torch import tensors

_PROTOCOLS = ("__call__", "__enter__", "__exit__", "__iter__", "__next__")
"""Special methods that may use gradients. Python looks them up in the class."""

_WITHOUT_CALL = (functools.partialmethod, functools.singledispatchmethod)
"""Methods that cannot be called in the class."""

_NUM_WATCHED = 4

Call = Callable[..., Any]
Within = Callable[[], AbstractContextManager[None]]


def object_of(function: Any) -> object:
    """The object whose method this is, also with arguments filled in; None for other values."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__self__", None)


@functools.cache
def _methods_of(kind: Any) -> frozenset[str]:
    """Names of methods that an optimizer's class has, and PyTorch's have not."""
    names = {name for each in kind.__mro__ for name in vars(each)}
    return frozenset(name for name in names if _adds(kind, name))


def _adds(kind: type[torch.optim.Optimizer], name: str) -> bool:
    owner = next(each for each in kind.__mro__ if name in vars(each))
    value = vars(owner)[name]
    return (
        not hasattr(torch.optim.Optimizer, name)
        and not _is_torchs(owner)
        and (name in _PROTOCOLS or not name.startswith("__"))
        and hasattr(value, "__get__")
        and (callable(value) or isinstance(value, _WITHOUT_CALL))
        and not isinstance(value, staticmethod | classmethod | type)
    )


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim.")


def is_own_method(optimizer: torch.optim.Optimizer, name: str, value: Any) -> bool:
    """Whether an attribute is a method that the optimizer's class adds, or a function that the
    program has stored in the optimizer."""
    kind: Any = type(optimizer)
    functions = types.FunctionType, types.MethodType, functools.partial
    return callable(value) and (
        name in _methods_of(kind)
        or isinstance(object_of(value), torch.optim.Optimizer)
        or (isinstance(value, functions) and name in vars(optimizer))
    )


def own_method_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the methods that an optimizer's class adds, and of functions that are stored in it;
    without special methods."""
    kind: Any = type(optimizer)
    stored = {
        name
        for name, value in vars(optimizer).items()
        if callable(value)
        and is_own_method(optimizer, name, value)
        and not hasattr(torch.optim.Optimizer, name)
    }
    return sorted((_methods_of(kind) | stored).difference(_PROTOCOLS))


def has_own_methods(optimizer: torch.optim.Optimizer) -> bool:
    """Whether methods beside PyTorch's may use gradients."""
    return not _is_torchs(type(optimizer)) or bool(own_method_names(optimizer))


def hidden_names(kind: Any, base: type) -> list[str]:
    """Methods of an optimizer's class that those of another base class hide."""
    names = {name for each in base.__mro__ for name in vars(each) if not name.startswith("_")}
    return sorted(names & _methods_of(kind))


def looked_up(kind: Any) -> dict[str, Call]:
    """For a class derived from an optimizer's: its further methods, which are looked up on the
    object, as if it had been asked for them."""

    def look_up(name: str) -> Call:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._wfbp_read(name)(*args, **kwargs)

        return functools.update_wrapper(method, inspect.getattr_static(kind, name))

    return {name: look_up(name) for name in _methods_of(kind)}


def resumed_by(call: Callable[[Call], Call], within: Within, result: Any) -> Any:
    """The result of a method. If it is a generator, or a context manager made of one, this is
    resumed through ``call``, or ``within`` a method that averages nothing if it ends early."""
    generator = result if isinstance(result, types.GeneratorType) else getattr(result, "gen", None)
    if not isinstance(generator, types.GeneratorType):
        return result
    resumed = _resuming(call, within, generator)
    if generator is result:
        return resumed
    result.gen = resumed  # of contextlib's
    return result


def _resuming(
    call: Callable[[Call], Call], within: Within, generator: Any
) -> Generator[Any, Any, Any]:
    def throw(error: BaseException) -> Any:  # which this rank may be alone with
        with within():
            return generator.throw(error)

    resume, value = call(generator.send), None
    while True:
        try:
            result = resume(value)
        except StopIteration as end:
            return end.value
        try:
            resume, value = call(generator.send), (yield result)
        except GeneratorExit:
            with within():
                generator.close()
            raise
        except BaseException as error:
            resume, value = throw, error


class Differentiation(ExitStack):
    """Detects that ``torch.autograd.grad`` has computed gradients and that parameters have changed,
    by looking at a few parameters: some of all, and the first ones that have gradients."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        params = [p for p in params if p.requires_grad]
        watched = params[:: max(1, len(params) // _NUM_WATCHED)]
        self._before = {p: tensors.sample(p) for p in watched}
        self._versions = {p: p._version for p in params}
        self._most = len(watched) + _NUM_WATCHED
        self.happened = False
        """Whether it was called since the last backward pass; those clear this."""
        for param in params:
            hook = functools.partial(self._note, param)
            self.callback(param.register_hook(hook).remove)  # type: ignore[no-untyped-call]

    def _note(self, param: torch.Tensor, _: torch.Tensor) -> None:
        self.happened = True
        is_new = len(self._before) < self._most and param not in self._before
        if is_new and param._version == self._versions[param]:  # else the method has changed it
            self._before[param] = tensors.sample(param)

    def has_updated(self) -> bool:
        """Whether it was called, and parameters have changed."""
        changed = (not torch.equal(tensors.sample(p), was) for p, was in self._before.items())
        return self.happened and any(changed)


class _CombinedLoss(torch.autograd.Function):
    """All ranks' loss by value, this rank's by gradient, because gradients are averaged later."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, combined: torch.Tensor, check: Call) -> torch.Tensor:
        ctx.check = check
        return combined.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.check)
        return grad, None, None


def differentiable(mine: Any, combined: Any, has_run_backward: Callable[[], bool]) -> Any:
    """A closure's combined loss. An optimizer may run ``backward()`` on it. To differentiate it
    otherwise, which ``has_run_backward`` tells, is an error."""

    def check() -> None:
        if not has_run_backward():
            raise RuntimeError(
                "an optimizer differentiates its closure's loss by torch.autograd.grad(), whose "
                "gradients are this rank's own: they would not be averaged over the ranks. Call "
                "backward() instead, in the closure or on the loss that it returns"
            )

    def tied(loss: Any, total: Any) -> Any:
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad) or loss is total:
            return total
        with torch.enable_grad():
            return _CombinedLoss.apply(loss, total, check)  # type: ignore[no-untyped-call]

    return tree_map(tied, mine, combined)
