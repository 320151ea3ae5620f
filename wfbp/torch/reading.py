"""A read barrier: somebody is told before a module hands out one of some parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)

from wfbp.torch.guarded import Guarded


class Barrier:
    """Calls back before modules hand out parameters, while it is active.

    Modules whose forward does not read their parameters there (``nn.LSTM`` keeps a list) can be
    hooked: a call of such a module counts as a read of all it holds. So does a call of one that is
    given a parameter later, which is guarded at that moment. Compiled modules, and scripted ones,
    read without anybody hearing of it; they are left as they are, and what they
    hold is ``exposed``. A function under ``torch.compile`` that calls a guarded module while the
    barrier is active runs uncompiled there.

    Made, switched and changed by the training thread. Parameters may be read, and ``on_read`` is
    called, in any thread; it may be called again for the same read, and must not read parameters
    of another index.

    Args:
        params: the parameters, by index.
        on_read: called with the index of a parameter before it is handed out.

    Attributes:
        active: whether reads are heard of. Switch it off whenever nobody needs to wait.
        counts: whether reads are kept in ``seen``. One at another time says nothing of how a
            parameter is read when it is needed.
        seen: indices that were read since :meth:`watch`, or since the barrier was made.
        exposed: indices that can be read without the barrier, as far as the last
            :meth:`guard` could know, or that ``torch.jit.trace`` has taken into a graph since.
        moved: whether a parameter has left its module since, as parametrizations make it do;
            call :meth:`guard` again.

    Example:
        >>> from torch import nn
        >>> module = nn.Linear(2, 1)
        >>> barrier = Barrier(list(module.parameters()), lambda index: print("reads", index))
        >>> barrier.guard(module)
        >>> barrier.active = True
        >>> weight = module.weight
        reads 0
    """

    def __init__(self, params: Sequence[torch.Tensor], on_read: Callable[[int], None]) -> None:
        self._params = list(params)
        self._index = {id(p): k for k, p in enumerate(self._params)}
        self._on_read = on_read
        # By ids of modules, as long as these live.
        self._guarded: dict[int, tuple[weakref.ref[nn.Module], Guarded]] = {}
        self._hooked: dict[int, tuple[weakref.ref[nn.Module], set[int]]] = {}
        self._unheard: set[int] = set()
        self._handle: Any = None
        this = weakref.ref(self)
        self._adopts = register_module_parameter_registration_hook(_adopter(this))
        weakref.finalize(self, self._adopts.remove)
        self.active = False
        self.moved = False
        self.counts = True
        self.seen: set[int] = set()
        self.exposed = set(range(len(self._params)))
        # A compiled function must leave its graph here, or it would never call back.
        self.read: Callable[[Any], None] = torch.compiler.disable(  # type: ignore[no-untyped-call]
            self._read
        )

    def guard(self, root: nn.Module) -> None:
        """Hear of the parameters that a module and those below it hold.

        Args:
            root: may have been guarded before, also by other barriers.
        """
        self.moved = False
        compiled = _compiled(root)
        for module in root.modules():
            if id(module) in compiled:
                self._leave(module)
                continue
            if self._own(module.__dict__["_parameters"]):
                self._put_up(module)
            self._hooked.pop(id(module), None)
            others = [value for key, value in vars(module).items() if key != "_parameters"]
            kept = {index for value in others for index in self._kept(value)}
            if kept:
                self._hook(module, kept)
        held = [self._own(table) for _, table in list(self._guarded.values())]
        self.exposed = set(range(len(self._params))) - set().union(*held)
        for module in compiled.values():
            own = self._own(dict(module.named_parameters(recurse=False)))
            self.exposed |= own
            if isinstance(module, torch.jit.ScriptModule):  # may be a copy of one that is guarded
                self._unheard |= own
        self.exposed |= self._unheard

    def adopt(self, module: nn.Module, value: Any) -> None:
        """Called before a module is given a parameter."""
        index = self._index.get(id(value))
        if index is None:
            return
        if isinstance(module, torch.jit.ScriptModule):
            self.expose(value)
            return
        # How it reads its parameters nobody has seen.
        self._hook(module, {index, *self._own(self._put_up(module))})

    def expose(self, value: Any) -> None:
        """Called where a parameter goes into a graph that will read it unheard."""
        if id(value) in self._index:
            self._unheard.add(self._index[id(value)])
            self.exposed |= self._unheard

    def watch(self) -> None:
        """Forget what has been seen, and hear of reads from now on."""
        self.seen = set()
        self.active = True

    def hook(self, module: nn.Module) -> None:
        """Let a call of a guarded module count as a read of the parameters it holds."""
        self._hook(module, self._own(module.__dict__["_parameters"]))

    def hook_unseen(self) -> None:
        """Hook the guarded modules that hold parameters which have not been seen."""
        for alive, table in list(self._guarded.values()):
            module = alive()
            if module is not None and not self._own(table) <= self.seen:
                self.hook(module)

    def release(self) -> None:
        """Let all modules be as they were."""
        self.active = False
        for alive, _ in list(self._guarded.values()):
            module = alive()
            if module is not None:
                self._leave(module)
        self._adopts.remove()
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._hooked.clear()
        self.exposed = set(range(len(self._params)))

    def leaves(self, value: Any) -> None:
        """Called by a :class:`Guarded` that lets go of a value."""
        self.moved = self.moved or id(value) in self._index

    def before(self, module: nn.Module) -> None:
        """Called before any module's forward."""
        if self.active and id(module) in self._hooked:
            for index in self._hooked[id(module)][1]:
                self.seen.add(index)
                self._on_read(index)

    def _read(self, value: Any) -> None:
        index = self._index.get(id(value))
        if index is not None:
            if self.counts:
                self.seen.add(index)
            self._on_read(index)

    def _put_up(self, module: nn.Module) -> Guarded:
        table = module.__dict__["_parameters"]
        if not isinstance(table, Guarded):
            table = module.__dict__["_parameters"] = Guarded(table)
        if self not in table.barriers:
            table.barriers = (*table.barriers, self)
        self._guarded[id(module)] = _forgotten(module, self._guarded), table
        return table

    def _hook(self, module: nn.Module, indices: set[int]) -> None:
        self._hooked[id(module)] = _forgotten(module, self._hooked), indices
        if self._handle is None:
            # One for all modules: a hook on the module would be copied and pickled with it.
            self._handle = register_module_forward_pre_hook(_caller(weakref.ref(self)))
            weakref.finalize(self, self._handle.remove)

    def _leave(self, module: nn.Module) -> None:
        _, table = self._guarded.pop(id(module), (None, None))
        if table is None:
            return
        table.barriers = tuple(b for b in table.barriers if b is not self)
        if not table.barriers and module.__dict__["_parameters"] is table:
            module.__dict__["_parameters"] = table.copy()

    def _own(self, table: dict[str, Any]) -> set[int]:
        """Indices of the parameters in a dictionary, without reading them."""
        return {self._index[id(v)] for v in dict.values(table) if id(v) in self._index}

    def _kept(self, value: Any) -> Iterator[int]:
        """Indices of the parameters in an attribute."""
        if isinstance(value, dict):
            value = list(value.values())
        for inner in value if isinstance(value, list | tuple) else (value,):
            if id(inner) in self._index:
                yield self._index[id(inner)]


def _forgotten(module: nn.Module, held: dict[int, Any]) -> weakref.ref[nn.Module]:
    """A reference; what is held under the module's id goes with the module."""
    key = id(module)
    return weakref.ref(module, lambda _: held.pop(key, None))


def _adopter(this: weakref.ref[Barrier]) -> Callable[[nn.Module, str, Any], None]:
    def adopt(module: nn.Module, name: str, value: Any) -> None:
        barrier = this()
        if barrier is not None:
            barrier.adopt(module, value)

    return adopt


def _caller(this: weakref.ref[Barrier]) -> Callable[[nn.Module, Any], None]:
    def before(module: nn.Module, inputs: Any) -> None:
        barrier = this()
        if barrier is not None:
            barrier.before(module)

    return before


def _compiled(root: nn.Module) -> dict[int, nn.Module]:
    """The modules that compiled code may read, by their ids."""
    found: dict[int, nn.Module] = {}
    for module in root.modules():
        wrapper = getattr(type(module), "__module__", "") == "torch._dynamo.eval_frame"
        scripted = isinstance(module, torch.jit.ScriptModule)
        if wrapper or scripted or getattr(module, "_compiled_call_impl", None) is not None:
            found |= {id(below): below for below in module.modules()}
    return found
