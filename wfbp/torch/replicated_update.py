"""Every rank updates every parameter, what is decoupled when it is about to be read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from wfbp.torch import tensors
from wfbp.torch.update import Group, Reduced, Step, Update, copied_groups


class ReplicatedUpdate(Update):
    """Every rank updates every parameter; what the plan decouples just before it is read.

    The thread that reads carries the update out, under the lock of ``pending``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._layouts = [tensors.Layout.of(p) for p in self._params]
        self._gradients: dict[int, torch.Tensor] = {}
        self._groups: list[Group] = []

    def apply(self, reduced: Reduced | None) -> Any:
        self.flush()
        engine = self._engine
        if reduced is None or not engine.decoupled:
            return self._timed(self._step)
        # The program may go on with its own gradients where an earlier step left averages.
        grads = (p.grad for p in self._params)
        own = {g.data_ptr() for g in grads if g is not None and g.layout is torch.strided}
        addresses = [p.data_ptr() for p in self._params]
        whole = engine.gather_gradients(reduced, own)
        self._groups = copied_groups(self._optimizer.param_groups)
        now = []
        with self.pending.updating():
            for index, slot in enumerate(whole):
                if not engine.decouples_tensor(index):
                    now.append(index)
                elif slot is not None:
                    self._gradients[index] = tensors.view(slot.data, self._layouts[index])
            waiting = list(self._gradients)
            self.pending.begin(
                waiting, groups=engine.gather_groups, changed=waiting, addresses=addresses
            )
            return self._timed(lambda: self._update(now, {}))

    def complete(self, indices: Collection[int]) -> None:
        # All that has arrived with the one that is read, and no more: were the optimizer to raise,
        # ranks would lose different updates.
        self._update(indices, {k: self._gradients.pop(k) for k in indices})

    def _timed(self, step: Step) -> Any:
        now = self._engine.now
        start = now()
        result = step()
        self._engine.update = start, now()
        return result

    def _update(self, indices: Iterable[int], gradients: dict[int, torch.Tensor]) -> Any:
        """Step some parameters as the groups were when the step was asked for."""
        chosen = {id(self._params[k]) for k in indices}

        def step() -> Any:
            # Whoever reads a parameter may do so in a mode that step() was not called in.
            with (
                self.pending.lent(),
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(self._params[0].device.type, enabled=False),
                _as_if_nothing_compiled(),
            ):
                return self._run(self._groups, lambda p: [p] if id(p) in chosen else [])

        self.pending.gradients = {id(self._params[k]): g for k, g in gradients.items()}
        try:
            return _apart_from_modes(step)
        finally:
            self.pending.gradients = {}


def _apart_from_modes(act: Callable[[], Any]) -> Any:
    """Call a function where no mode and no transform (``torch.func``) turns tensors into others.

    They belong to threads, so it is called in another one where any is at work.
    """
    functorch: Any = torch._C._functorch
    counts: Any = torch._C
    if functorch.peek_interpreter_stack() is None and not (
        counts._len_torch_dispatch_stack() or counts._len_torch_function_stack()
    ):
        return act()
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(act).result()


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
