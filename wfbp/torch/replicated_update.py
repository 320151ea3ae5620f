"""Every rank updates every parameter, what is decoupled when it is about to be read."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wfbp.torch import tensors
from wfbp.torch.update import Group, Reduced, Step, Update, apart


class ReplicatedUpdate(Update):
    """Every rank updates every parameter; what the plan decouples just before it is read.

    Several threads may read: ``_lock`` has one wait until another has carried an update out. (What
    an update reads itself goes on.)
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.RLock()
        self._updating = False
        self._layouts = [tensors.Layout.of(p) for p in self._params]
        self._gradients: dict[int, torch.Tensor] = {}
        self._group: dict[int, int] = {}
        self._groups: list[Group] = []

    def apply(self, reduced: Reduced | None) -> Any:
        self.flush()
        engine = self._engine
        if reduced is None or not engine.decoupled:
            return self._timed(self._step)
        # The program may go on with its own gradients where an earlier step left averages.
        grads = (p.grad for p in self._params)
        own = {g.data_ptr() for g in grads if g is not None and g.layout is torch.strided}
        whole = engine.gather_gradients(reduced, own)
        self._group = {k: n for n, group in enumerate(engine.gather_groups) for k in group}
        self._groups = apart(self._optimizer.param_groups)
        now = []
        for index, slot in enumerate(whole):
            if not engine.decouples_tensor(index):
                now.append(index)
            elif slot is not None:
                self._gradients[index] = tensors.view(slot.data, self._layouts[index])
        self._travelling.note(self._gradients)
        return self._timed(lambda: self._update(now, {}))

    def await_param(self, index: int) -> None:
        with self._lock:
            if index not in self._gradients:
                return
            self._engine.await_tensor(index)
            # Not all that has arrived: were the optimizer to raise, ranks would lose different
            # updates.
            last = self._group[index]
            ready = [k for k in self._gradients if self._group[k] <= last]
            for k in ready:
                self._travelling.arrived(k)
            within, self._updating = self._updating, True
            try:
                self._update(ready, {k: self._gradients.pop(k) for k in ready})
            finally:
                self._updating = within

    @property
    def at_once(self) -> Collection[int]:
        # Of such ones PyTorch takes the late update of one for a change of the others.
        return self._travelling.together

    @property
    def pending(self) -> bool:
        return bool(self._gradients) or self._updating or self._engine.gathering

    def settle(self) -> None:
        # A change of plans has gradients gathered anew, into the memory of those not yet used.
        self.flush()

    def flush(self) -> None:
        """Wait for all gradients, and update all parameters."""
        with self._lock:
            for index in list(self._gradients):
                self.await_param(index)
        self._engine.flush()

    def _timed(self, step: Step) -> Any:
        now = self._engine.now
        start = now()
        result = step()
        self._engine.update = start, now()
        return result

    def _update(self, indices: Iterable[int], gradients: dict[int, torch.Tensor]) -> Any:
        """Step some parameters as the groups were when the step was asked for."""
        chosen = {id(self._params[k]) for k in indices}
        held = {k: self._params[k].grad for k in gradients}
        for k, gradient in gradients.items():
            self._params[k].grad = gradient
        try:
            # Whoever reads a parameter may do so in a mode that step() was not called in.
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(self._params[0].device.type, enabled=False),
                _as_if_nothing_compiled(),
            ):
                return self._run(self._groups, lambda p: [p] if id(p) in chosen else [])
        finally:
            for k, kept in held.items():
                self._params[k].grad = kept


@contextmanager
def _as_if_nothing_compiled() -> Iterator[None]:
    """Within it, PyTorch's optimizers compute as they do in ``step()``.

    While ``torch.compile`` looks at a function it may read parameters itself; optimizers that find
    it at work keep numbers in float32 tensors.
    """
    compiler: Any = torch.compiler
    found = getattr(compiler, "_is_compiling_flag", False)
    if found:
        compiler._is_compiling_flag = False
    try:
        yield
    finally:
        if found:
            compiler._is_compiling_flag = True
