"""When each parameter is first used in forward: measured in the steps of the profile phase only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from wfbp.runtime.engine import Engine
from wfbp.torch.reading import Barrier


class ForwardClock:
    """Time stamps of forward, through hooks on all modules while the engine wants them.

    Args:
        engine: told of each parameter's first use.
        params: the engine's tensors, by index.
        barrier: is put up in the modules that are called, and told to watch.
    """

    def __init__(
        self, engine: Engine, params: Sequence[torch.Tensor], barrier: Barrier | None = None
    ) -> None:
        self._barrier = barrier
        self._guarded: set[int] = set()
        self._engine = engine
        self._index = {id(p): k for k, p in enumerate(params)}
        self._handles: list[Any] = []
        self._depth = 0

    def follow(self) -> None:
        """Start or stop watching, as the engine's phase asks."""
        self._enter(-self._depth)
        if self._engine.profiling and not self._handles:
            if self._barrier is not None:
                self._barrier.watch()
            # Compiled functions must leave their graphs here, where they cannot read the clock.
            disable: Any = torch.compiler.disable
            self._handles = [
                register_module_forward_pre_hook(disable(self._before)),
                register_module_forward_hook(disable(self._after), always_call=True),
            ]
        elif self._handles and not self._engine.profiling:
            self.stop()
            if self._barrier is not None:
                self._barrier.hook_unseen()

    def stop(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, levels: int) -> None:
        """Go down into modules, or up again. What is read outside says nothing of forward."""
        self._depth += levels
        if self._barrier is not None:
            self._barrier.counts = self._depth > 0

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        self._enter(1)
        if self._barrier is not None and id(module) not in self._guarded:
            self._guarded.update(map(id, module.modules()))
            self._barrier.guard(module)
        for param in dict.values(module._parameters):  # which reads nothing
            index = self._index.get(id(param))
            if index is not None:
                self._engine.mark_forward(index)

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._enter(-1)
        self._engine.mark_forward_end()
