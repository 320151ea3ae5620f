"""Parameters that arrive after ``step()``: a program that reads one waits for it.

After a decoupled step parameters are gathered while the program continues. One that has not arrived
has the class :class:`Pending`. Two things bring it back to ``nn.Parameter``, after a wait: a hook
before the forward of the module that owns it, and ``__torch_function__`` for every other use.

Reads that neither of them notices must not meet a parameter under way. So ``step()`` waits for all
of them if their memory has another user (a view, a NumPy array, another process). It waits in
every step (:meth:`PendingParameters.stop`) once a second thread reads a parameter or
``torch.compile`` uses them. A process is forked when everything has arrived.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree

from wfbp.runtime import signals

log = logging.getLogger("wfbp")

_storage_uses: Any = torch._C._storage_Use_Count

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


def await_all(stop: str = "", of_any: bool = False) -> None:
    """Wait until nothing is pending; ``stop``: why nothing may be pending from now on. ``of_any``:
    whatever the model, so parameters whose update has failed are left out instead of raising."""
    for pending in {owner for owner, _ in list(under_way.values())}:
        if stop:
            pending.stop(stop)
        if not (of_any and pending.has_failed):
            pending.wait_all()


# Some code takes tensors in C++, without asking __torch_function__: forked processes, torch.func,
# and script functions.
os.register_at_fork(before=partial(await_all, of_any=True))


def _flatten(param: Pending) -> tuple[list[torch.Tensor], None]:
    _await_param(param)
    return [param], None


_pytree.register_pytree_node(
    Pending,
    _flatten,
    lambda children, _: next(iter(children)),
    serialized_type_name=f"{__name__}.Pending",
)

_script_function: Any = torch.jit.ScriptFunction
_call_script = _script_function.__call__


def _wait_and_call_script(self: object, *args: object, **kwargs: object) -> Any:
    await_all()
    return _call_script(self, *args, **kwargs)


_script_function.__call__ = _wait_and_call_script


def _compiling(*_: object) -> None:
    """Before a compilation, whose guards compare classes."""
    await_all("torch.compile reads them", of_any=True)


def _before_forward(module: nn.Module, inputs: object) -> None:
    functorch: Any = torch._C._functorch
    if isinstance(module, torch.jit.ScriptModule) or functorch.peek_interpreter_stack() is not None:
        await_all()  # it reads parameters of its submodules in C++; or has wrapped them already
    else:
        for param in module._parameters.values():
            if type(param) is Pending:
                _await_param(param)


class PendingParameters:
    """The parameters of one optimizer; some may be pending.

    The training thread calls :meth:`begin`; any thread may wait. ``_lock`` is held while waiting,
    while an update is completed and while classes change, so a second reader waits for the first.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        await_arrival: Callable[[int], None],
        complete: Callable[[Sequence[int]], None] | None,  # updates what has arrived
        name: str,
    ) -> None:
        self._params = list(params)
        self._await_arrival = await_arrival
        self._complete = complete
        self._name = name
        self._lock = threading.RLock()
        self._left: dict[int, int] = {}
        """By index, in the order of arrival, the number of the message that brings it."""
        self._thread = 0
        self._hook: Any = None
        self._layout: tuple[list[int], list[int]] = [], []
        self._storages: dict[int, StorageWeakRef] = {}
        self._stopped = False
        self._failure: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def has_failed(self) -> bool:
        """Whether an update has raised, so that the parameters are of no use."""
        return self._failure is not None

    def begin(
        self, indices: Sequence[int], groups: Sequence[Sequence[int]], addresses: Sequence[int]
    ) -> None:
        """Make these parameters pending. The tensors of a group arrive together, groups in order;
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
            if self._left and not self._stopped:
                for index in self._left:
                    under_way[id(self._params[index])] = self, index
                    self._params[index].__class__ = Pending
                self._hook = register_module_forward_pre_hook(_before_forward)
                # torch._dynamo.reset() makes it forget those that it calls.
                from torch._dynamo.callback import callback_handler

                if _compiling not in callback_handler.start_callbacks:
                    callback_handler.register_start_callback(_compiling)

    def _look_at_memory(self, indices: Sequence[int]) -> None:
        storages = [self._params[k].untyped_storage() for k in indices]
        held = [StorageWeakRef(s) for s in storages]  # type: ignore[no-untyped-call]
        self._storages = {storage.cdata: storage for storage in held}
        if len(self._storages) < len(indices) or any(
            p.device.type == "cpu" and p.is_shared()  # type: ignore[no-untyped-call]
            for p in self._params
        ):
            self.stop("their memory is shared")

    def wait_for_shared(self) -> None:
        """Wait for all where reads could not be noticed, at the end of ``step()``."""
        if self._left and (
            self._stopped or set(map(_storage_uses, self._storages)) != {_USES_OF_TWO}
        ):
            self.wait_all()

    def stop(self, why: str) -> None:
        """From now on nothing is pending after ``step()``."""
        if not self._stopped:
            self._stopped = True
            log.info("%s: step() waits for all parameters from now on: %s", self._name, why)

    def wait(self, index: int) -> None:
        """Wait until a parameter may be read; raises ``WfbpError`` if ranks failed or did not
        answer in time."""
        with signals.deferred, self._lock:
            if index not in self._left:
                return
            if self._failure is not None:
                raise RuntimeError(
                    f"{self._name}: an earlier update failed on this rank, so its parameters "
                    "differ from those of other ranks: end the job and resume from a checkpoint"
                ) from self._failure
            self._await_arrival(index)
            if index not in self._left:  # a signal handler has read it meanwhile
                return
            # All that has arrived with it, and no more: were the update to raise, ranks would lose
            # different parts of it.
            last = self._left[index]
            arrived = []
            for other, number in list(self._left.items()):
                if number <= last:
                    del self._left[other]
                    arrived.append(other)
            try:
                if self._complete is not None:
                    self._complete(arrived)
            except BaseException as error:
                self._failure = error  # this rank lacks an update that the others have
                self._left.update(dict.fromkeys(arrived, last))
                raise
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
        if not self._left and self._hook is not None:
            self._hook.remove()
            self._hook = None


def _uses_of_two() -> int:
    """Uses of memory that two tensors share, once it has been looked at."""
    tensor = torch.empty(1)
    held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(_storage_uses(held.cdata)) + 1


_USES_OF_TWO = _uses_of_two()
