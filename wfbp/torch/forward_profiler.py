"""When each parameter is first used in forward: measured in the steps of the profile phase only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from wfbp.runtime.engine.engine import Engine


class ForwardProfiler:
    """Time stamps of forward, through hooks on all modules while the engine wants them.

    Args:
        engine: told of each parameter's first use.
        params: the engine's tensors, by index.
    """

    def __init__(self, engine: Engine, params: Sequence[torch.Tensor]) -> None:
        self._engine = engine
        self._index = {id(p): k for k, p in enumerate(params)}
        self._handles: list[Any] = []

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

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        for param in module._parameters.values():
            index = self._index.get(id(param))
            if index is not None:
                self._engine.mark_forward(index)

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._engine.mark_forward_end()
