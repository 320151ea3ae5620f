"""The first use of each parameter in forward, while a reducer profiles."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from wfbp.runtime.reducer import Reducer


class ForwardProfiler:
    """Marks the first use of each parameter in forward, by hooks on all modules, while the reducer
    profiles; and learns which model is trained."""

    def __init__(self, reducer: Reducer, params: Sequence[torch.Tensor]) -> None:
        self._reducer = reducer
        self._index = {id(p): k for k, p in enumerate(params)}
        self.watching = False
        self._handles: list[Any] = []
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}

    def follow(self) -> None:
        """Start or stop watching, as the reducer asks."""
        if self._reducer.profiling and not self.watching:
            self.watching = True
            # Compiled functions must leave their graphs here, where they cannot read the clock.
            disable: Any = torch.compiler.disable
            self._handles = [
                register_module_forward_pre_hook(disable(self._before)),
                register_module_forward_hook(disable(self._after), always_call=True),
            ]
        elif self.watching and not self._reducer.profiling:
            self.stop()

    def stop(self) -> None:
        """Stop watching."""
        self._unhook()
        modules = [module for ref in self._modules.values() if (module := ref()) is not None]
        if modules:  # the outermost of those with most parameters comes first
            model = max(modules, key=lambda m: sum(id(p) in self._index for p in m.parameters()))
            # A compiled module stands for the one that the user knows.
            name = type(getattr(model, "_orig_mod", model)).__name__
            if self._reducer.recorder is not None:
                self._reducer.recorder.model = name
        self._modules.clear()

    def abandon(self) -> None:
        """Stop watching from the next forward on."""
        # The garbage collector calls this, perhaps while a module iterates over all hooks.
        self.watching = False

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.watching = [], False

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self.watching:
            self._unhook()
            return
        self._modules.setdefault(id(module), weakref.ref(module))
        for param in module._parameters.values():
            index = self._index.get(id(param))
            if index is not None:
                self._reducer.clock.mark_forward(index)

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self.watching:
            self._reducer.clock.mark_forward_end()
