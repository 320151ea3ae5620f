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
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree

from wfbp.runtime import signals

log = logging.getLogger("wfbp")

_storage_uses: Any = torch._C._storage_Use_Count
_is_shared: Any = torch.Tensor.is_shared

under_way: dict[int, tuple[PendingParameters, int]] = {}
"""By the id of a parameter that has not arrived: who brings it, and its index there. It keeps both
alive until then, even if the program drops the optimizer."""

_all: weakref.WeakSet[PendingParameters] = weakref.WeakSet()


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
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_GRADIENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if not _arrive(args) and not _arrive(kwargs.values()):
            await_all()  # it is deep in a structure
        return func(*args, **kwargs)


_GRAD: Any = torch._C.TensorBase.grad
_OF_GRADIENTS = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)
"""Uses of a parameter that need no values."""


def _arrive(values: Iterable[Any]) -> bool:
    """Wait for the pending parameters among values; whether there were any."""
    found = False
    for value in values:
        if type(value) is Pending:
            _await_param(value)
            found = True
        elif type(value) in (list, tuple):
            found |= _arrive(value)
    return found


def _await_param(param: torch.Tensor) -> None:
    owner = under_way.get(id(param))
    if owner is not None:
        owner[0].wait(owner[1])


def await_all() -> None:
    """Wait until nothing is pending."""
    for pending in {owner for owner, _ in list(under_way.values())}:
        pending.wait_all()


os.register_at_fork(before=await_all)


def _flatten(param: Pending) -> tuple[list[torch.Tensor], None]:
    _await_param(param)
    return [param], None


# torch.func takes tensors from its arguments in C++, without asking __torch_function__.
_pytree.register_pytree_node(
    Pending,
    _flatten,
    lambda children, _: next(iter(children)),
    serialized_type_name=f"{__name__}.Pending",
)


class PendingParameters:
    """The parameters of one optimizer; some may be pending.

    The training thread calls :meth:`begin`; any thread may wait. ``_lock`` is held while waiting,
    while an update is completed and while classes change, so a second reader waits for the first.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        await_arrival: Callable[[int], None],
        complete: Callable[[Sequence[int]], None],  # updates what has arrived
        name: str,
    ) -> None:
        self._params = list(params)
        self._await_arrival = await_arrival
        self._complete = complete
        self._name = name
        self._lock = threading.RLock()
        self._groups: deque[list[int]] = deque()
        self._thread = 0
        self._hook: Any = None
        self._layout: tuple[list[int], list[int]] = [], []
        self._storages: list[StorageWeakRef] = []
        self._stopped = False
        self._failure: BaseException | None = None
        _all.add(self)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def begin(
        self, indices: Sequence[int], groups: Sequence[Sequence[int]], addresses: Sequence[int]
    ) -> None:
        """Let these parameters be pending, of whose memory the caller keeps one more tensor each.

        ``groups`` arrive together, in this order; ``addresses`` are those of all parameters.
        """
        with self._lock:
            some = set(indices)
            for group in groups:
                if part := [index for index in group if index in some]:
                    self._groups.append(part)
            self._thread = threading.get_ident()
            if (layout := (list(addresses), list(indices))) != self._layout:
                self._layout = layout
                self._storages = [
                    StorageWeakRef(self._params[k].untyped_storage())  # type: ignore[no-untyped-call]
                    for k in indices
                ]
                if len({s.cdata for s in self._storages}) < len(indices) or any(
                    p.device.type == "cpu" and _is_shared(p) for p in self._params
                ):
                    self.stop("their memory is shared")
            if self._stopped or not indices:
                return
            _listen()
            for index in indices:
                param = self._params[index]
                under_way[id(param)] = self, index
                param.__class__ = Pending
            self._hook = register_module_forward_pre_hook(_before_forward)

    def wait_for_shared(self) -> None:
        """Wait for all where reads could not be noticed, at the end of ``step()``."""
        if self._groups and (
            self._stopped or any(_storage_uses(s.cdata) != _USES_OF_TWO for s in self._storages)
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
            if not self._is_pending(index):
                return
            self._await_arrival(index)
            if not self._is_pending(index):  # a signal handler has read it meanwhile
                return
            # All that has arrived with it, and no more: were the update to raise, ranks would lose
            # different parts of it.
            arrived: list[int] = []
            while index not in arrived:
                arrived += self._groups.popleft()
            try:
                self._complete(arrived)
            except BaseException as error:
                self._failure = error  # this rank lacks an update that the others have
                raise
            finally:
                self._put_back(arrived)
            if threading.get_ident() != self._thread and not self._stopped:
                self.stop("a second thread reads them")
                self.wait_all()

    def _is_pending(self, index: int) -> bool:
        return any(index in group for group in self._groups)

    def wait_all(self) -> None:
        """Wait until all may be read."""
        if self._failure is not None:
            raise RuntimeError(
                f"{self._name}: an earlier update failed on this rank, so its parameters differ "
                "from those of other ranks: end the job and resume from a checkpoint"
            ) from self._failure
        with self._lock:
            while self._groups:
                self.wait(self._groups[-1][-1])

    def release(self) -> None:
        """Let the parameters be as they were, whether they have arrived or not."""
        with self._lock:
            left = [index for group in self._groups for index in group]
            self._groups.clear()
            self._put_back(left)

    def wait_if_compiled(self) -> None:
        """Wait, and from now on in every step, if compiled code reads any of the parameters."""
        if self._groups or any(hasattr(p, "_dynamo_static_input_type") for p in self._params):
            self.stop("torch.compile reads them")
            self.wait_all()

    def _put_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            param = self._params[index]
            if under_way.pop(id(param), None) is not None:
                param.__class__ = nn.Parameter
        if not self._groups and self._hook is not None:
            self._hook.remove()
            self._hook = None


def _uses_of_two() -> int:
    """Uses of memory that two tensors share, once it has been looked at."""
    tensor = torch.empty(1)
    held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(_storage_uses(held.cdata)) + 1


_USES_OF_TWO = _uses_of_two()


def _before_forward(module: nn.Module, inputs: object) -> None:
    functorch: Any = torch._C._functorch
    if isinstance(module, torch.jit.ScriptModule) or functorch.peek_interpreter_stack() is not None:
        await_all()  # it reads parameters of its submodules in C++; or has wrapped them already
    else:
        for param in module._parameters.values():
            if type(param) is Pending:
                _await_param(param)


def _listen() -> None:
    """Hear of compilations from now on; ``torch._dynamo.reset()`` makes that forgotten. And of
    calls of script functions, which read their arguments in C++."""
    from torch._dynamo import callback

    script: Any = torch.jit.ScriptFunction
    if script.__call__ is not _call_script:
        global _script_call
        _script_call, script.__call__ = script.__call__, _call_script
    handler: Any = callback.callback_handler
    if _compiling not in handler.start_callbacks:
        handler.register_start_callback(_compiling)
        handler.register_end_callback(_compiling)


def _compiling(*_: object) -> None:
    """Before and after a compilation, whose guards compare classes."""
    for pending in list(_all):
        pending.wait_if_compiled()


_script_call: Any = None


def _call_script(self: object, *args: object, **kwargs: object) -> Any:
    if under_way:
        await_all()
    return _script_call(self, *args, **kwargs)
