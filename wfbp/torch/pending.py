"""Parameters that arrive after ``step()``: a program that reads one waits for it.

After a decoupled step parameters are gathered while the program continues. One that has not arrived
has the class :class:`Pending`. Two things bring it back to ``nn.Parameter``, after a wait: a hook
before the forward of its module, and ``__torch_function__`` for every other use.

Reads that neither of them notices must not meet a parameter under way. So ``step()`` waits

* until hooks have seen every parameter, because tensor subclasses may hide other reads;
* whenever a parameter has another user: a view, a NumPy array, another process, TorchScript;
* in every step (:meth:`PendingParameters.stop`) once a second thread reads a parameter or
  ``torch.compile`` uses them.

A process is forked, and a script module is made, when everything has arrived.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree

from wfbp.runtime import signals
from wfbp.torch.compiling import uncompiled, uncompiled_methods

log = logging.getLogger("wfbp")

_storage_uses: Any = torch._C._storage_Use_Count
_uses: Any = torch.Tensor._use_count  # type: ignore[attr-defined]

under_way: dict[int, tuple[PendingParameters, int]] = {}
"""By the id of a parameter that has not arrived: who brings it, and its index there. It keeps both
alive until then, even if the program drops the optimizer."""


class Pending(nn.Parameter):
    """The class of a parameter that has not arrived; any use of its values waits."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Parameter``, for code that makes another object of a parameter's type."""
        return nn.Parameter(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """As of any tensor, of values that have arrived."""
        _await_param(self)  # from here on this is no longer its class
        return self.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_GRADIENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        before = len(under_way)
        _pytree.tree_leaves((args, kwargs))  # calls _flatten
        if len(under_way) == before:
            await_all()  # it is in a structure that pytree does not know
        return func(*args, **(kwargs or {}))


_GRAD: Any = torch._C.TensorBase.grad
_OF_GRADIENTS = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)
"""Uses of a parameter that need no values."""


def _await_param(param: torch.Tensor) -> None:
    owner = under_way.get(id(param))
    if owner is not None:
        owner[0].wait(owner[1])


def await_all(stop: str = "") -> None:
    """Wait until nothing is pending; ``stop``: why nothing may be pending from now on."""
    for pending in {owner for owner, _ in list(under_way.values())}:
        if stop:
            pending.stop(stop)
        pending.wait_all()


# Some code takes tensors in C++, without asking __torch_function__: forked processes, torch.func,
# and TorchScript.
os.register_at_fork(before=await_all)


def _flatten(param: Pending) -> tuple[list[torch.Tensor], None]:
    _await_param(param)
    return [param], None


_pytree.register_pytree_node(
    Pending,
    _flatten,
    lambda children, _: next(iter(children)),
    serialized_type_name=f"{__name__}.Pending",
)


def _waiting(function: Any, await_those: Callable[[Iterable[object]], None]) -> Any:
    @wraps(function)
    def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        if under_way:
            await_those((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return wait_and_call


def _await_everything(_: Iterable[object]) -> None:
    await_all()  # what is held is not known


def _await_given(arguments: Iterable[object]) -> None:
    """Wait for parameters that are arguments, and for no others: programs call constructors with
    numbers, too, in any thread."""
    for argument in arguments:
        if type(argument) is Pending:
            _await_param(argument)


def _await_listed(arguments: Iterable[Any]) -> None:
    _await_given(next(iter(arguments), ()))


_CONSTRUCTORS: Sequence[tuple[Any, Sequence[str]]] = (
    (torch.nested, ("nested_tensor", "as_nested_tensor")),
    (torch, ("tensor", "as_tensor", "asarray", "from_dlpack", "to_dlpack")),
    (torch, [name for name in dir(torch) if name.startswith("sparse_") and "_tensor" in name]),
    (torch.Tensor, ("new", "new_tensor", "_make_subclass", "_make_wrapper_subclass")),
    (nn.Parameter, ("__new__",)),
    (torch.utils.dlpack, ("from_dlpack", "to_dlpack")),
)
"""Functions that read a tensor and ignore its ``__torch_function__``."""


@cache
def _let_constructors_wait() -> None:
    """Called before the first parameter is pending, because most programs never have any."""
    builtins: Any = torch.jit._builtins
    for owner, names in _CONSTRUCTORS:
        for name in names:
            if (function := getattr(owner, name, None)) is not None:
                await_those = _await_listed if owner is torch.nested else _await_given
                waiting = _waiting(function, await_those)
                waiting.__qualname__ = name  # where pickle finds it
                if operator := builtins._find_builtin(function):
                    builtins._register_builtin(waiting, operator)
                setattr(owner, name, staticmethod(waiting) if name[0] == "_" else waiting)


_script_kinds: Any = torch.jit.ScriptFunction, torch._C.ScriptMethod
for _kind in _script_kinds:
    _kind.__call__ = _waiting(_kind.__call__, _await_everything)
_recursive: Any = torch.jit._recursive
_recursive.create_script_module = _waiting(_recursive.create_script_module, _await_everything)


def _compiling(*_: object) -> None:
    """Before a compilation, whose guards compare classes; it would trace hooks, too."""
    why = "torch.compile reads them"
    await_all(why)
    for pending in list(_looking):
        pending.stop(why)
    _unhook()


_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose forward hooks have seen."""
_looking: weakref.WeakSet[PendingParameters] = weakref.WeakSet()
"""Those that have waited because hooks had not seen some of their parameters."""
_hook: list[Any] = []


def _own(module: nn.Module) -> Iterator[torch.Tensor | None]:
    """The parameters that a module's forward may read without calling another module."""
    yield from module._parameters.values()
    for child in module._modules.values():  # such as ParameterList
        if child is not None and child not in _called:
            yield from _own(child)


def _unhook() -> None:
    """Remove the hook of all modules when no optimizer needs it, because it slows every forward."""
    while _hook and not under_way and not _looking:
        _hook.pop().remove()


@uncompiled  # PyTorch 2.15 fails at sets of weak references to compiled modules
def _before_forward(module: nn.Module, inputs: object) -> None:
    _unhook()  # a program may have dropped an optimizer
    functorch: Any = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None:
        await_all()  # it has wrapped them already
    _called.add(module)
    own = list(_own(module))
    for pending in list(_looking):
        pending.note_seen(own)
    for param in own:
        if type(param) is Pending:
            _await_param(param)


@uncompiled_methods  # else a read within a compilation finds them half put back
class PendingParameters:
    """The parameters of one optimizer; some may be pending.

    The training thread calls :meth:`begin`; any thread may wait. ``_lock`` is held while waiting
    and while classes change, so a second reader waits for the first.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        await_arrival: Callable[[int], None],
        name: str,
    ) -> None:
        self._params = list(params)
        self._await_arrival = await_arrival
        self._name = name
        self._lock = threading.RLock()
        self._left: dict[int, int] = {}
        """By index, in the order of arrival, the number of the message that brings it."""
        self._thread = 0
        self._layout: tuple[list[int], list[int]] = [], []
        self._storages: dict[int, StorageWeakRef] = {}
        self._nodes: dict[int, Any] = {}
        """By index, the node of autograd that adds to the gradient; it refers to the parameter."""
        self._numbers = {id(p): k for k, p in enumerate(params)}
        self._seen: set[int] = set()
        """Indices of parameters that a module's hook waits for."""
        self._stopped = False

    def __bool__(self) -> bool:
        return bool(self._left)

    def begin(
        self, indices: Sequence[int], groups: Sequence[Sequence[int]], addresses: Sequence[int]
    ) -> None:
        """These parameters are under way. The tensors of a group arrive together, groups in order;
        ``addresses`` are those of all parameters. The caller keeps one alias of each."""
        with self._lock:
            self._thread = threading.get_ident()
            if (layout := (list(addresses), list(indices))) != self._layout:
                self._layout = layout
                self._look_at_memory(indices)
            some = set(indices)
            for number, group in enumerate(groups):
                for index in some.intersection(group):
                    self._left[index] = number
                    if hasattr(self._params[index], "_dynamo_static_input_type"):
                        self.stop("torch.compile reads them")

    def _look_at_memory(self, indices: Sequence[int]) -> None:
        storages = [self._params[k].untyped_storage() for k in indices]
        held = [StorageWeakRef(s) for s in storages]  # type: ignore[no-untyped-call]
        self._storages = {storage.cdata: storage for storage in held}
        self._nodes.clear()
        if len(self._storages) < len(indices) or any(
            p.device.type == "cpu" and p.is_shared()  # type: ignore[no-untyped-call]
            for p in self._params
        ):
            self.stop("their memory is shared")

    def leave(self) -> None:
        """The end of ``step()``: leave parameters pending, or wait for all where reads could not be
        noticed."""
        if not self._left:
            return
        seen = self._seen.issuperset(self._left)
        if self._stopped or not seen or self._have_other_users():
            self.wait_all()
            if seen or self._stopped:
                return
            _looking.add(self)
        else:
            _looking.discard(self)
            _let_constructors_wait()
            for index in self._left:
                under_way[id(self._params[index])] = self, index
                self._params[index].__class__ = Pending
        if not _hook:
            _hook.append(register_module_forward_pre_hook(_before_forward))
        # torch._dynamo.reset() makes it forget those that it calls.
        from torch._dynamo.callback import callback_handler

        if _compiling not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(_compiling)

    def _have_other_users(self) -> bool:
        """Whether C++ code, such as a script module, holds a parameter, or anything its memory."""
        if set(map(_storage_uses, self._storages)) != {_USES_OF_TWO}:
            return True
        params, nodes = self._params, self._nodes
        for index in self._left:
            if getrefcount(params[index].untyped_storage()) != _USES_OF_OBJECT:
                return True
            if index not in nodes and params[index].requires_grad:
                nodes[index] = get_gradient_edge(params[index]).node
            if _uses(params[index]) > 1 + (index in nodes):
                return True
        return False

    def note_seen(self, params: Iterable[object]) -> None:
        """A hook waits before these parameters are read."""
        self._seen.update(k for p in params if (k := self._numbers.get(id(p))) is not None)

    def stop(self, why: str) -> None:
        """From now on nothing is pending after ``step()``."""
        if not self._stopped:
            self._stopped = True
            _looking.discard(self)
            log.info("%s: step() waits for all parameters from now on: %s", self._name, why)

    def wait(self, index: int) -> None:
        """Wait until a parameter may be read; raises ``WfbpError`` if ranks failed or did not
        answer in time."""
        with signals.deferred, self._lock:
            if index not in self._left:
                return
            self._await_arrival(index)
            if index not in self._left:  # a signal handler has read it meanwhile
                return
            last = self._left[index]
            arrived = [k for k, number in self._left.items() if number <= last]
            for k in arrived:
                del self._left[k]
            self._put_back(arrived)
            if threading.get_ident() != self._thread and not self._stopped:
                self.stop("a second thread reads them")
                self.wait_all()

    def wait_all(self) -> None:
        """Wait until all may be read."""
        with self._lock:
            while self._left:
                self.wait(next(reversed(self._left)))

    def release(self) -> None:
        """Let the parameters be as they were, whether they have arrived or not."""
        with self._lock:
            indices = list(self._left)
            self._left.clear()
            self._put_back(indices)

    def _put_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            param = self._params[index]
            if under_way.pop(id(param), None) is not None:
                param.__class__ = nn.Parameter
        _unhook()


def _uses_of_two() -> tuple[int, int]:
    """Uses of memory that two tensors share, once it has been looked at; and of the Python object
    for it. PyTorch's count does not show whether a program keeps that object, Python's does."""
    tensor = torch.empty(1)
    held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(_storage_uses(held.cdata)) + 1, getrefcount(tensor.untyped_storage())


_USES_OF_TWO, _USES_OF_OBJECT = _uses_of_two()
