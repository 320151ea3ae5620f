"""Whether an optimizer looks settings up by its tensors, instead of by their values.

Ranks step shards, which are other tensors than the parameters: ``self.scale[p]``, ``id(p)``,
``getattr(p, "lr_scale", 1.0)`` or ``p is q`` would silently use a default. Two ways find such
optimizers:

* :func:`refers_to_tensors` reads them: the values of their attributes and groups, and the code of
  their classes. This sees ``id()`` and ``is``, which no object notices.
* :class:`LookupRecorder` makes stand-ins for parameters (:meth:`~LookupRecorder.tensor`) that note
  when they are hashed, compared or asked for an attribute that tensors do not have. This sees
  tables wherever they lie, and also when they are filled later.
"""

from __future__ import annotations

import builtins
import dis
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_PER_TENSOR_ATTRIBUTES = frozenset(
    {"data_ptr", "untyped_storage", "storage", "_typed_storage", "__dict__", "name", "_cdata"}
    | {"_backward_hooks", "_post_accumulate_grad_hooks", "_version"}
)
"""What every tensor has, and each of its own."""

_KNOWN = frozenset(dir(nn.Parameter)) - _PER_TENSOR_ATTRIBUTES
_FOREIGN = {"torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
_DEPTH = 6


class LookupRecorder:
    """Notes what an optimizer asks of its tensors besides their values, in words, in ``things``."""

    def __init__(self) -> None:
        self.things: set[str] = set()
        self._at_state = 0
        self._quiet = _quiet(self)

    def note(self, thing: str) -> None:
        """Something was asked, unless it was to find the optimizer's state, kept by shard."""
        if not self._at_state:
            self.things.add(thing)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A parameter that shares these values and notes what is asked of it."""
        parameter: torch.Tensor = values.as_subclass(_recording_class(self)).requires_grad_()
        return parameter

    def state(self, held: dict[Any, Any] | None = None) -> defaultdict[Any, Any]:
        """State in which tensors may be looked up, beginning with ``held``; an optimizer may have
        replaced the dictionary."""
        made: defaultdict[Any, Any] = self._quiet(dict, held or {})  # which hashes nothing
        return made

    def names(self, names: list[str]) -> list[str]:
        """Names of a group's parameters, which are to be used for messages only."""

        class Names(list[str]):
            def __iter__(names) -> Iterator[str]:  # noqa: N805
                self.note("param_names")
                return list.__iter__(names)

            def __getitem__(names, index: Any) -> Any:  # noqa: N805
                self.note("param_names")
                return list.__getitem__(names, index)

        return Names(names)


def _recording_class(lookups: LookupRecorder) -> Any:
    class Recording(nn.Parameter):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            if name not in _KNOWN:
                lookups.note(f"attribute {name!r}")
            return super().__getattribute__(name)

        def __hash__(self) -> int:
            lookups.note("hash")
            return object.__hash__(self)

        def __eq__(self, other: object) -> Any:
            if isinstance(other, torch.Tensor):
                lookups.note("comparison with another tensor")
            return super().__eq__(other)

    return Recording


def _quiet(lookups: LookupRecorder) -> Any:
    def quietly(name: str) -> Callable[..., Any]:
        act = getattr(defaultdict, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            lookups._at_state += 1
            try:
                return act(self, *args, **kwargs)
            finally:
                lookups._at_state -= 1

        return method

    special = [f"__{name}__" for name in ("getitem", "setitem", "delitem", "contains")]
    names = [*special, "get", "setdefault", "pop", "update"]
    return type("State", (defaultdict,), {name: quietly(name) for name in names})


def refers_to_tensors(optimizer: torch.optim.Optimizer) -> str:
    """How an optimizer can tell its tensors from others, in words; empty if it cannot.

    Searches its attributes and groups (not ``state``, which the runtime keeps by shard) and the
    functions of its class for the parameters, their ids and their addresses; and these functions
    for ``id`` and for ``is`` between variables.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    search = _Search(params)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    own = {k: v for k, v in vars(optimizer).items() if not _is_of_every_optimizer(k)}
    for base in type(optimizer).__mro__:
        if _is_foreign(base.__module__):
            continue
        for name, value in vars(base).items():
            if not name.startswith("__") and search.finds(value):
                return f"{base.__name__}.{name}"
    for name, value in [*own.items(), *((k, v) for group in groups for k, v in group.items())]:
        if search.finds(value):
            return f"attribute or setting {name!r}"
    return ""


def _is_of_every_optimizer(name: str) -> bool:
    """Whether an attribute is there whatever the class (schedulers put ``step`` there)."""
    hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
    return hooks or name in ("param_groups", "state", "step", "_wfbp_wrapped")


class _Search:
    """Looks for some tensors in values, and in the code of functions among them."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        held = list(params)
        self._ids = {id(p) for p in held}
        # The address of one that is empty is 0.
        self._numbers = self._ids | {p.data_ptr() for p in held if p.numel()}
        self._seen: set[int] = set()

    def finds(self, value: Any, depth: int = 0) -> bool:
        """Whether a value holds one of the tensors, or what tells it from others."""
        if isinstance(value, bool | float | complex | str | bytes | type(None)):
            return False
        if isinstance(value, int):
            return value in self._numbers
        if isinstance(value, torch.Tensor):
            return id(value) in self._ids
        if id(value) in self._seen or depth > _DEPTH:
            return False
        self._seen.add(id(value))
        return any(self.finds(inner, depth + 1) for inner in _parts(value)) or (
            isinstance(value, types.FunctionType) and self._reads(value, depth)
        )

    def _reads(self, function: types.FunctionType, depth: int) -> bool:
        """Whether a function's code tells tensors apart."""
        if _is_foreign(function.__globals__.get("__name__", "")):
            return False
        codes = list(_codes(function.__code__))
        names = {name for code in codes for name in code.co_names}
        namespace = function.__globals__
        if "id" in names and namespace.get("id", builtins.id) is builtins.id:
            return True
        if any(map(_compares_identities, codes)):
            return True
        mentioned = [namespace[name] for name in names if name in namespace]
        for value in list(mentioned):
            holds = isinstance(value, types.ModuleType) and not _is_foreign(value.__name__)
            if holds or (isinstance(value, type) and not _is_foreign(value.__module__)):
                mentioned += [vars(value)[name] for name in names if name in vars(value)]
        return any(self.finds(value, depth + 1) for value in mentioned)


def _parts(value: Any) -> Iterator[Any]:
    """What a value consists of, as far as that may tell tensors apart."""
    if isinstance(value, dict):
        yield from list(value.keys())
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from list(value)
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, getattr(value, "__wrapped__", None))
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not yet filled
                continue
    elif isinstance(value, nn.Module):
        yield from list(value.parameters())
    elif not isinstance(value, type | types.ModuleType | torch.optim.Optimizer):
        yield getattr(value, "__dict__", None)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _compares_identities(code: types.CodeType) -> bool:
    """Whether it asks if two variables are the same object."""
    before = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before.startswith(("LOAD_FAST", "LOAD_DEREF")):
            return True
        before = instruction.opname
    return False


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN
