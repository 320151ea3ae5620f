"""When each parameter is first used in forward, and by which model: in the profile phase only."""

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
    """Marks the first use of each parameter in forward, by hooks on all modules, while the engine
    profiles."""

    def __init__(self, engine: Reducer, params: Sequence[torch.Tensor]) -> None:
        self._engine = engine
        self._index = {id(p): k for k, p in enumerate(params)}
        self._handles: list[Any] = []
        self._depth = 0
        self._outermost: dict[int, weakref.ref[torch.nn.Module]] = {}

    def follow(self) -> None:
        """Start or stop watching, as the engine's phase asks."""
        if self._engine.profiling and not self._handles:
            # Compiled functions must leave their graphs here, where they cannot read the clock.
            disable: Any = torch.compiler.disable
            self._handles = [
                register_module_forward_pre_hook(disable(self._before)),
                register_module_forward_hook(disable(self._after), always_call=True),
            ]
        elif self._handles and not self._engine.profiling:
            self.stop()

    def stop(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        modules = [module for ref in self._outermost.values() if (module := ref()) is not None]
        if modules:
            self._engine.name_model(_class_name(max(modules, key=self._num_params)))
        self._outermost.clear()
        self._depth = 0

    def _num_params(self, module: torch.nn.Module) -> int:
        """How many of the engine's tensors are a module's."""
        return sum(id(param) in self._index for param in module.parameters())

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._depth == 0 and id(module) not in self._outermost:
            self._outermost[id(module)] = weakref.ref(module)
        self._depth += 1
        for param in module._parameters.values():
            index = self._index.get(id(param))
            if index is not None:
                self._engine.mark_forward(index)

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)  # watching may begin within a forward
        self._engine.mark_forward_end()


def _class_name(module: torch.nn.Module) -> str:
    """Of the module that a user knows: a compiled one stands for what was compiled."""
    return type(getattr(module, "_orig_mod", module)).__name__
