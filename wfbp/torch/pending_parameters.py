"""Parameters that have not arrived yet: a thread that reads one waits for it.

After a decoupled step parameters are gathered while the program goes on. One that has not arrived
is *pending*. It then has another class, the *stand-in* of its own: every use of the tensor from
Python, and every use from C++ that begins with "is this a tensor?", comes through it, waits,
restores the class and goes on with the ordinary parameter. So the modules, lists or functions
through which the program reaches its parameters do not matter.

Reads that no class can notice are covered within the step
(:meth:`PendingParameters.wait_for_exposed` waits for these parameters):

* memory that others use, too: a view, ``detach()`` or NumPy array that the program has kept, a
  scripted or traced copy of the module, another process;
* parameters that compiled code reads: its guards compare classes, and a stand-in would have it
  compiled again. So everything that is pending also arrives before ``torch.compile`` begins to look
  at a function.

A process is forked when everything has arrived.

Read :class:`PendingParameters` first, then :func:`_make_stand_in`.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import optimizer as torch_optimizer

from wfbp.runtime import signals

_Base: Any = torch._C.TensorBase
_set_class: Any = object.__dict__["__class__"].__set__
_as_plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
_storage_uses: Any = torch._C._storage_Use_Count
_tensor_uses: Any = getattr(_Base, "_use_count", lambda tensor: 1)  # since PyTorch 2.10

_USES = 2
"""A tensor is used by its Python object, and by its gradient accumulator where a graph is alive."""


def _uses_of_one() -> int:
    """Uses of the memory of one tensor, once it has been looked at."""
    tensor = torch.empty(1)
    held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(_storage_uses(held.cdata))


_ALONE = _uses_of_one()

_COMPILED = "_dynamo_static_input_type"
"""Attribute of parameters that torch.compile has taken into a graph."""

_plain: dict[type, type] = {}
"""The class of which each stand-in is one."""

_stand_ins: dict[type, type | None] = {}
"""The stand-in of each class; None where there can be none."""

_owners: dict[int, tuple[weakref.ref[PendingParameters], int]] = {}
"""Who lets a parameter be pending, and its index there, by the parameter's id."""

_all: weakref.WeakSet[PendingParameters] = weakref.WeakSet()

unfinished: set[PendingParameters] = set()
"""Those with pending parameters: they live until these have arrived, though nobody else may hold
the optimizer any more."""

_making = threading.RLock()


class Arrivals(Protocol):
    """Brings the parameters that are pending."""

    def await_arrival(self, index: int) -> None:
        """Wait for the communication of a parameter. Several threads may wait at a time."""

    def complete(self, indices: Collection[int]) -> None:
        """Finish the update of these parameters; called in the thread that reads."""


class PendingParameters:
    """The parameters of one optimizer, of which some may be pending.

    The training thread lets them be pending (:meth:`begin`); any thread may wait, or read.
    ``_lock`` is held while parameters are updated and while classes change, never while waiting for
    communication. The thread that updates uses pending parameters as they are.

    Attributes:
        gradients: by id of a parameter, the ``grad`` that the updating thread sees.
    """

    def __init__(self, params: Sequence[torch.Tensor], arrivals: Arrivals) -> None:
        self._params = list(params)
        self._arrivals = arrivals
        self._lock = threading.RLock()
        self._updater = 0
        self._number = 0
        self._left: set[int] = set()
        self._groups: Sequence[Sequence[int]] = ()
        self._group_of: dict[int, int] = {}
        self._next = 0
        self.gradients: dict[int, torch.Tensor | None] = {}
        # What can be read without being noticed.
        self._unwatched: set[int] = set()
        self._compiled: set[int] = set()
        self._compilations: Counter[int] = Counter()
        # Who may use their memory, as of _addresses and _views.
        self._addresses: Sequence[int] = ()
        self._views: Sequence[int] = ()
        self._storages: list[StorageWeakRef] = []
        self._cdata: list[int] = []
        self._uses: list[int] = []
        self._sharers: list[list[int]] = []
        self._tensor_uses: list[int] = []
        self._kept: set[int] = set()
        self._sample = -1
        this = weakref.ref(self)
        for index, param in enumerate(self._params):
            _owners[id(param)] = this, index
        weakref.finalize(self, _disown, this, [id(p) for p in self._params]).atexit = False
        _all.add(self)
        _listen()
        self.find_compiled()

    def __bool__(self) -> bool:
        """Whether any is pending."""
        return bool(self._left)

    @property
    def indices(self) -> list[int]:
        """Of those that are pending."""
        return sorted(self._left)

    @property
    def updates_here(self) -> bool:
        """Whether the calling thread is the one that updates."""
        return self._updater == get_ident()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Within it the calling thread uses pending parameters as they are; others wait."""
        with self._lock:
            within, self._updater = self._updater, get_ident()
            try:
                yield
            finally:
                self._updater = within

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it the calling thread updates for the one that is :meth:`updating`."""
        within, self._updater = self._updater, get_ident()
        try:
            yield
        finally:
            self._updater = within

    def begin(
        self,
        indices: Sequence[int],
        *,
        groups: Sequence[Sequence[int]],
        changed: Iterable[int],
        addresses: Sequence[int],
        views: Sequence[int] = (),
        view_of: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Let parameters be pending, while :meth:`updating`; none may be pending yet.

        Args:
            indices: of these.
            groups: indices that arrive together, in the order of their arrival.
            changed: those whose values change, which a graph that keeps one for its backward must
                notice.
            addresses: where all parameters lie now, by index.
            views: indices of parameters of which the optimizer keeps a view.
            view_of: that view.
        """
        params = self._params
        changed = list(changed)
        torch.autograd.graph.increment_version([params[k] for k in changed])
        if addresses != self._addresses or views != self._views:
            self._find_sharers(addresses, views, view_of)
        if groups is not self._groups:
            self._groups = groups
            self._group_of = {k: number for number, group in enumerate(groups) for k in group}
        _listen()
        self._next = 0
        self._number += 1
        self._left.update(indices)
        if self._left:
            unfinished.add(self)
        for index in indices:
            param = params[index]
            kind = type(param)
            stand_in = _stand_ins[kind] if kind in _stand_ins else _make_stand_in(kind)
            if stand_in is None:
                self._unwatched.add(index)
            else:
                _set_class(param, stand_in)

    def wait_for_exposed(self) -> None:
        """Wait for what the program could read without being noticed."""
        if not self._left:
            return
        exposed = self._compiled | self._unwatched
        uses = list(map(_storage_uses, self._cdata))
        if uses != self._uses:
            for used, expected, sharers in zip(uses, self._uses, self._sharers, strict=True):
                if used != expected:
                    exposed.update(sharers)
                if used < expected:  # it is another memory now
                    self._addresses = ()
        exposed |= self._kept_by_cpp()
        for index in sorted(exposed & self._left):
            self.wait(index)

    def wait(self, index: int) -> None:
        """Wait until a parameter may be read; raises ``WfbpError`` if ranks failed or did not
        answer in time."""
        if self.updates_here:
            return
        with signals.deferred:
            self._wait(index)

    def _wait(self, index: int) -> None:
        while True:
            with self._lock:  # a step that has begun in another thread ends first
                if index not in self._left:
                    return
                number = self._number
            self._arrivals.await_arrival(index)
            with self.updating():
                if number != self._number or index not in self._left:
                    continue  # another thread was faster, or the next step
                end = self._group_of[index] + 1
                among = self._groups[self._next : end]
                arrived = [k for group in among for k in group if k in self._left]
                self._next = end
                try:
                    self._arrivals.complete(arrived)
                finally:
                    self._put_back(arrived)
                return

    def wait_all(self) -> None:
        """Wait until all may be read."""
        for index in list(self._left):
            self.wait(index)

    def find_compiled(self) -> None:
        """Find parameters that newly compiled code reads."""
        self._compiled.update(k for k, p in enumerate(self._params) if hasattr(p, _COMPILED))

    def before_compilation(self) -> None:
        """Have everything arrive: pending parameters would invalidate what is compiled."""
        left = list(self._left)
        self._compilations.update(left)
        self._compiled.update(k for k in left if self._compilations[k] > 1)
        self.wait_all()

    def release(self) -> None:
        """Let the parameters be as they were, whether they have arrived or not."""
        with self._lock:
            self._put_back(list(self._left))
        self._storages, self._cdata, self._uses, self._sharers = [], [], [], []
        self._addresses = ()

    def _put_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            param = self._params[index]
            kind = _plain.get(type(param))
            if kind is not None:
                _set_class(param, kind)
            self._left.discard(index)
        if not self._left:
            unfinished.discard(self)

    def _find_sharers(
        self,
        addresses: Sequence[int],
        views: Sequence[int],
        view_of: Callable[[int], torch.Tensor] | None,
    ) -> None:
        """Note how often each parameter's memory is used while only we use it."""
        self._addresses, self._views = list(addresses), list(views)
        is_shared: Any = torch.Tensor.is_shared
        self._unwatched = {
            k for k, p in enumerate(self._params) if p.device.type == "cpu" and is_shared(p)
        }
        indices_by_storage: dict[int, list[int]] = {}
        self._storages = []
        for index, param in enumerate(self._params):
            storage = param.untyped_storage()
            if storage._cdata not in indices_by_storage:
                self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            indices_by_storage.setdefault(storage._cdata, []).append(index)
        self._cdata = [storage.cdata for storage in self._storages]
        self._sharers = list(indices_by_storage.values())
        ours = Counter[int]()
        for view in () if view_of is None else map(view_of, views):
            kept: torch.Tensor | None = view
            while kept is not None:  # it keeps the tensor of which it is a part
                ours[kept.untyped_storage()._cdata] += 1
                kept = kept._base
        # Of parameters that share memory, none is to be read before all have arrived.
        self._uses = [
            _ALONE + ours[cdata] if len(sharers) == 1 else 0
            for cdata, sharers in zip(indices_by_storage, self._sharers, strict=True)
        ]

    def _kept_by_cpp(self) -> set[int]:
        """Indices of parameters that C++ code keeps besides their graph, as scripted and traced
        modules do.

        Of two uses, one may be the graph's. It is checked when something has changed, and for one
        parameter in each step, which shows whether graphs are still alive.
        """
        uses = list(map(_tensor_uses, self._params))
        if max(uses) < _USES:
            return set()
        if uses != self._tensor_uses or self._sample < 0 or not self._has_graph(self._sample):
            self._tensor_uses = uses
            self._kept = {
                k
                for k, count in enumerate(uses)
                if count > _USES or (count == _USES and not self._has_graph(k))
            }
            innocent = (k for k, count in enumerate(uses) if count == _USES and k not in self._kept)
            self._sample = next(innocent, -1)
        return self._kept

    def _has_graph(self, index: int) -> bool:
        """Whether a parameter's gradient accumulator is alive, as it is in a graph."""
        param = self._params[index]
        with self.updating(), torch.inference_mode(False):
            if not param.requires_grad:
                return False
            before = _tensor_uses(param)
            edge = torch.autograd.graph.get_gradient_edge(param)
            return bool(_tensor_uses(param) == before and edge.node is not None)


def await_all() -> None:
    """Wait until nothing is pending."""
    for pending in list(unfinished):
        pending.wait_all()


def _await_param(param: Any) -> bool:
    """Wait until a parameter may be read; whether it is pending all the same, because the calling
    thread updates it."""
    while type(param) in _plain:
        held, index = _owners.get(id(param), (None, -1))
        owner = None if held is None else held()
        if owner is None:
            _set_class(param, _plain[type(param)])
        elif owner.updates_here:
            return True
        else:
            owner.wait(index)
    return False


def _disown(this: weakref.ref[PendingParameters], ids: Iterable[int]) -> None:
    for key in ids:
        if key in _owners and _owners[key][0] is this:
            del _owners[key]


os.register_at_fork(before=await_all)


def _listen() -> None:
    """Hear of compilations from now on; ``torch._dynamo.reset()`` makes that forgotten."""
    from torch._dynamo import callback

    handler: Any = callback.callback_handler
    if _before_compilation not in handler.start_callbacks:
        handler.register_start_callback(_before_compilation)
    if _after_compilation not in handler.end_callbacks:
        handler.register_end_callback(_after_compilation)


def _before_compilation(*_: object) -> None:
    for pending in list(unfinished):
        pending.before_compilation()


def _after_compilation(*_: object) -> None:
    for pending in list(_all):
        pending.find_compiled()


# Stand-ins.

_KEPT = frozenset(
    {
        "__class__",
        "__delattr__",
        "__dict__",
        "__doc__",
        "__getattr__",
        "__getattribute__",
        "__hash__",
        "__init__",
        "__init_subclass__",
        "__module__",
        "__new__",
        "__setattr__",
        "__slots__",
        "__subclasshook__",
        "__torch_dispatch__",
        "__torch_function__",
        "__weakref__",
        "grad",
    }
)
"""Attributes that a stand-in has of its own, or that read nothing of a tensor."""


def _make_stand_in(kind: type) -> type | None:
    """A class whose instances are waited for whenever they are used.

    An instance is laid out like one of ``kind`` and holds the same tensor, but ``isinstance`` sees
    no tensor: PyTorch's C++ code has to ask for its ``__class__``, which waits. Attributes of
    ``kind`` exist on the stand-in, and wait; functions of PyTorch call ``__torch_function__``,
    which waits. ``grad`` does not wait.

    None where ``kind`` overrides functions or operators itself, or cannot be subclassed.
    """
    with _making:
        if kind not in _stand_ins:
            made = None
            if _is_ordinary(kind):
                with suppress(TypeError, RuntimeError):
                    made = _build(kind)
            _stand_ins[kind] = made
        return _stand_ins[kind]


def _is_ordinary(kind: Any) -> bool:
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return False
    own = kind.__torch_function__
    plain: Any = torch.Tensor.__torch_function__
    return (
        own is torch._C._disabled_torch_function_impl
        or getattr(own, "__func__", own) is plain.__func__
    )


def _build(kind: Any) -> type:
    hidden = False

    class Meta(type(kind)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            return [cls, _Base, object] if hidden else super().mro()

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

    class AliasMeta(type(kind)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    # isinstance() takes a class into account only if it is not the one that the object has.
    alias = AliasMeta(kind.__name__, (kind,), dict(names))
    members: dict[str, Any] = dict(names)
    for name in dir(kind):
        if name not in _KEPT:
            members[name] = _member(kind, name, inspect.getattr_static(kind, name))
    members |= {
        "__class__": property(*_class_of(kind, alias)),
        "__getattr__": _absent_attribute(kind),
        "__hash__": lambda self: id(self),
        "__torch_function__": classmethod(_torch_function),
        "grad": property(_get_grad, _set_grad, _delete_grad),
    }
    if kind is nn.Parameter:
        members["detach"] = _detach
    made: Any = Meta(kind.__name__, (kind,), members)
    # PyTorch lets a class be made only where it is seen to be a tensor's.
    hidden = True
    made.__bases__ = made.__bases__
    if made.__mro__ != (made, _Base, object):
        raise TypeError(f"{kind} cannot be hidden")
    _plain[made] = kind
    _let_pass(kind, made)
    return made  # type: ignore[no-any-return]


def _let_pass(kind: type, made: Any) -> None:
    """Enter a stand-in where PyTorch looks classes up exactly."""
    supported: list[type] = getattr(torch_optimizer, "_foreach_supported_types", [])
    if kind in supported:
        supported.append(made)
    reduce = ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
    if reduce is not None:

        def reduce_arrived(param: Any) -> Any:
            _await_param(param)
            return reduce(param)

        ForkingPickler.register(made, reduce_arrived)


def _member(kind: type, name: str, member: Any) -> Any:
    """What an attribute of a class becomes in its stand-in."""
    if isinstance(member, classmethod | staticmethod) or not hasattr(member, "__get__"):
        return member
    if callable(member):

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _await_param(self):
                return member.__get__(self, kind)(*args, **kwargs)
            return getattr(type(self), name)(self, *args, **kwargs)

        method.__name__ = method.__qualname__ = name
        return method

    def get(self: Any) -> Any:
        return member.__get__(self, kind) if _await_param(self) else getattr(self, name)

    def set_(self: Any, value: Any) -> None:
        if _await_param(self):
            member.__set__(self, value)
        else:
            setattr(self, name, value)

    def delete(self: Any) -> None:
        if _await_param(self):
            member.__delete__(self)
        else:
            delattr(self, name)

    return property(get, set_, delete)


def _class_of(kind: type, alias: type) -> tuple[Callable[[Any], type], Callable[[Any, type], None]]:
    def get(self: Any) -> type:
        return kind if _await_param(self) else alias

    def set_(self: Any, value: type) -> None:
        _await_param(self)
        _set_class(self, value)

    return get, set_


def _absent_attribute(kind: Any) -> Callable[[Any, str], Any]:
    """``__getattr__``, called for what the stand-in and the object's own dictionary lack."""

    def get(self: Any, name: str) -> Any:
        if not hasattr(kind, name) and not hasattr(kind, "__getattr__"):
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")
        if not _await_param(self):
            return getattr(self, name)
        stand_in = type(self)
        _set_class(self, kind)
        try:
            return getattr(self, name)
        finally:
            _set_class(self, stand_in)

    return get


def _torch_function(
    cls: type,
    func: Callable[..., Any],
    types: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    kwargs = kwargs or {}
    if func in _GRAD:
        return _GRAD[func](*args)
    pending_arguments = list(_pending_in((*args, *kwargs.values())))
    updated_here = [param for param in pending_arguments if _await_param(param)]
    if pending_arguments and not updated_here:
        return func(*args, **kwargs)
    with _as_plain_tensors():
        return func(*args, **kwargs)


def _detach(self: Any) -> Any:
    """``nn.Parameter.detach``.

    ``nn.Parameter(param)`` compares classes before it calls this, and accepts another class only if
    this returns an instance of the same.
    """
    if _await_param(self):
        return _Base.detach(self)
    if sys._getframe(1).f_code is _MAKES_PARAMETERS:
        return _Base._make_subclass(nn.Parameter, self)
    return self.detach()


_MAKES_PARAMETERS: Any = nn.Parameter.__new__.__code__


def _pending_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) in _plain:
            yield value
        elif type(value) in (list, tuple):
            yield from _pending_in(value)
        elif type(value) is dict:
            yield from _pending_in(value.values())


def _gradients_of_update(param: Any) -> dict[int, torch.Tensor | None]:
    """Gradients that a parameter's updater is to see instead of the program's."""
    held, _ = _owners.get(id(param), (None, -1))
    owner = None if held is None else held()
    return owner.gradients if owner is not None and owner.updates_here else {}


def _get_grad(self: Any) -> Any:
    gradients = _gradients_of_update(self)
    if id(self) in gradients:
        return gradients[id(self)]
    with _as_plain_tensors():
        return _Base.grad.__get__(self)


def _set_grad(self: Any, value: Any) -> None:
    gradients = _gradients_of_update(self)
    if id(self) in gradients:
        gradients[id(self)] = value
        return
    with _as_plain_tensors():
        _Base.grad.__set__(self, value)


def _delete_grad(self: Any) -> None:
    _set_grad(self, None)


_GRAD: dict[Any, Callable[..., Any]] = {
    _Base.grad.__get__: lambda param, *_: _get_grad(param),
    _Base.grad.__set__: _set_grad,
    _Base.grad.__delete__: _delete_grad,
}
