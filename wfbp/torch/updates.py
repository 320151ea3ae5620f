"""The optimizer's update after gradients have been reduced.

Either every rank updates every parameter, decoupled ones just before they are read; or each rank
updates its shards, and the parameters are gathered while the next forward runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch

from wfbp.runtime.reducer import Reducer
from wfbp.runtime.step import BufferView
from wfbp.torch import tensors
from wfbp.torch.pending_parameters import PendingParameters
from wfbp.torch.state_sharding import StateSharding, flat, ordered

Reduced = Sequence[BufferView | None]
Step = Callable[[], Any]
Group = dict[str, Any]
Targets = list[torch.Tensor]

STEPPED = "_wfbp_stepped"
"""Attribute of a distributed optimizer: a thread, and the groups that it steps."""


class Update(ABC):
    """Steps an optimizer whose gradients an engine reduces.

    The training thread steps. A thread that reads a parameter waits, through ``pending``, and
    carries out the rest of its update.

    Args:
        engine: has reduced the gradients.
        optimizer: whose ``param_groups`` say what is stepped, and how.
        params: the engine's tensors, by index.
        step: the optimizer's own step.
    """

    def __init__(
        self,
        engine: Reducer,
        optimizer: torch.optim.Optimizer,
        params: Sequence[torch.Tensor],
        step: Step,
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._params = params
        self._index = {id(p): k for k, p in enumerate(params)}
        self._own_step = step
        self.pending = PendingParameters(params, self)

    @property
    def due(self) -> bool:
        """Whether state is still as before the last step, of some parameters."""
        return False

    @abstractmethod
    def apply(self, reduced: Reduced | None, shard_factor: float | None = None) -> Any:
        """Step, begin the all-gathers that the plan needs, and return the optimizer's result.

        Args:
            reduced: the engine's results, shards among them; None where every ``p.grad`` is whole.
            shard_factor: by what those have yet to be multiplied that are shards, of an update for
                which gradients are gathered.
        """

    def apply_whole(self) -> Any:
        """Step every tensor on this rank, alone; every ``p.grad`` and all state is whole."""
        self.flush()
        start = self._engine.now()
        result = self._step()
        self._engine.mark_update(start)
        return result

    def finish_pending(self) -> None:
        """Do what must be done before anything else is reduced."""
        self.pending.wait_all()

    def flush(self) -> None:
        """Wait until every parameter is up to date, and all that was gathered has arrived."""
        self.pending.wait_all()
        self._engine.flush()

    def await_arrival(self, index: int) -> None:
        """Wait for the all-gather of a parameter; any thread."""
        self._engine.await_tensor(index)

    def complete(self, indices: Collection[int]) -> None:  # noqa: B027 - most have nothing to do
        """Finish the update of these parameters before they are read."""

    def _step(self) -> Any:
        with self.pending.updating():
            return self._own_step()

    def _run(self, groups: Sequence[Group], targets: Callable[[torch.Tensor], Targets]) -> Any:
        """Step some tensors by the hyperparameters of these groups, which stay as they are.

        Changes that the optimizer makes to its groups (some count steps there) are kept. It does
        not see groups without tensors. ``targets`` gives what is stepped for a parameter.
        """
        parts = copied_groups(groups)
        for part in parts:
            part["params"] = [t for p in part["params"] for t in targets(p)]
        before = [dict(part) for part in parts]
        own = self._optimizer.param_groups
        with stepped_groups(self._optimizer, [part for part in parts if part["params"]]):
            result = self._own_step()
        for group, requested, old, new in zip(own, groups, before, parts, strict=True):
            for key, value in new.items():
                if key not in old or value is not old[key]:  # some count in a key of their own
                    group[key] = value
                elif isinstance(value, torch.Tensor) and not torch.equal(value, requested[key]):
                    group[key].copy_(value)
        return result


@contextmanager
def stepped_groups(optimizer: torch.optim.Optimizer, groups: list[Group]) -> Iterator[None]:
    """A context in which an optimizer has these groups, as the calling thread sees it.

    Other threads may read and set its own meanwhile, as learning-rate schedulers do.
    """
    held = optimizer.__dict__
    within, held[STEPPED] = held.get(STEPPED), (get_ident(), groups)
    try:
        yield
    finally:
        held[STEPPED] = within


def copied_groups(groups: Sequence[Group]) -> list[Group]:
    """Copies of groups that change neither with them nor they with these, as tensors would."""
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items()}
        for group in groups
    ]


class ReplicatedUpdate(Update):
    """Every rank updates every parameter; decoupled ones just before they are read, by the thread
    that reads, under the lock of ``pending``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._layouts = [tensors.Layout.of(p) for p in self._params]
        self._gradients: dict[int, torch.Tensor] = {}
        self._factor = 1.0
        self._unscaled: set[int] = set()
        """The tensors whose gradients have yet to be multiplied by the factor."""
        self._groups: list[Group] = []

    @property
    def due(self) -> bool:
        return bool(self.pending)

    def apply(self, reduced: Reduced | None, shard_factor: float | None = None) -> Any:
        self.flush()
        self._factor = 1.0 if shard_factor is None else shard_factor
        engine = self._engine
        if reduced is None or not engine.decoupled:
            return self._timed(self._step)
        # The program may go on with its own gradients where an earlier step left averages.
        grads = (p.grad for p in self._params)
        own = {g.data_ptr() for g in grads if g is not None and g.layout is torch.strided}
        addresses = [p.data_ptr() for p in self._params]
        # (Some may be whole already: what was sent again because it had grown.)
        shards = (k for k, slot in enumerate(reduced) if slot is not None and not slot.whole)
        self._unscaled = set() if shard_factor is None else set(shards)
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
        self._timed(lambda: self._update(indices, {k: self._gradients.pop(k) for k in indices}))
        self._engine.publish()

    def _timed(self, step: Step) -> Any:
        start = self._engine.now()
        result = step()
        self._engine.mark_update(start)
        return result

    def _update(self, indices: Iterable[int], gradients: dict[int, torch.Tensor]) -> Any:
        """Step some parameters as the groups were when the step was asked for."""
        chosen = {id(self._params[k]) for k in indices}

        def step() -> Any:
            # The thread that reads a parameter may be in a mode that step() was not called in.
            with (
                self.pending.lent(),
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(self._params[0].device.type, enabled=False),
                _as_if_nothing_compiled(),
            ):
                for k in self._unscaled.intersection(gradients):
                    gradients[k].mul_(self._factor)
                return self._run(self._groups, lambda p: [p] if id(p) in chosen else [])

        self.pending.gradients = {id(self._params[k]): g for k, g in gradients.items()}
        try:
            return _outside_modes(step, self._params[0].device)
        finally:
            self.pending.gradients = {}


def _outside_modes(act: Callable[[], Any], device: torch.device) -> Any:
    """Call a function where no mode and no transform (``torch.func``) affects tensors.

    They belong to threads, so it is called in another one where any is active; on the calling
    thread's stream of the device, where that has streams.
    """
    functorch: Any = torch._C._functorch
    counts: Any = torch._C
    if functorch.peek_interpreter_stack() is None and not (
        counts._len_torch_dispatch_stack() or counts._len_torch_function_stack()
    ):
        return act()
    streams = [torch.cuda.current_stream(device)] if device.type == "cuda" else []

    def on_stream() -> Any:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return act()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(on_stream).result()


@contextmanager
def _as_if_nothing_compiled() -> Iterator[None]:
    """A context in which PyTorch's optimizers compute as they do in ``step()``.

    While ``torch.compile`` traces a function it may read parameters itself; optimizers that see it
    active keep numbers in float32 tensors.
    """
    compiler: Any = torch.compiler
    is_compiling = getattr(compiler, "_is_compiling_flag", False)
    if is_compiling:
        compiler._is_compiling_flag = False
    try:
        yield
    finally:
        if is_compiling:
            compiler._is_compiling_flag = True


_EARLY = 8
"""The first groups that hold this part of what is gathered are updated before the rest."""


class ShardedUpdate(Update):
    """Each rank updates its shards of decoupled parameters, which are then gathered."""

    def __init__(self, *args: Any, sharding: StateSharding) -> None:
        super().__init__(*args)
        self.sharding = sharding
        self._installed = 0
        self._early: tuple[set[int], int] = set(), 0

    def apply(self, reduced: Reduced | None, shard_factor: float | None = None) -> Any:
        assert shard_factor is None, "shards are updated as they are"
        try:
            return self._apply(reduced)
        finally:
            self.sharding.publish()

    def _apply(self, reduced: Reduced | None) -> Any:
        engine, sharding = self._engine, self.sharding
        self.finish_pending()
        self._follow()
        sharding.check()
        start = engine.now()
        if not sharding:
            result = self._step()
            engine.mark_update(start)
            return result
        groups = copied_groups(self._optimizer.param_groups)
        addresses = [p.data_ptr() for p in self._params]
        early, count = self._early
        gathers = False
        with self.pending.updating():
            try:
                targets = {
                    id(p): self._target(p, reduced) for group in groups for p in group["params"]
                }
                # Another thread that reads a parameter waits from here on: its shard changes.
                self.pending.begin(
                    sharding.indices,
                    groups=engine.gather_groups,
                    changed=self._stepped(reduced),
                    addresses=addresses,
                    views=sharding.indices,
                    view_of=sharding.shard,
                )
                if early:
                    self._run(groups, lambda p: targets[id(p)] if id(p) in early else [])
                engine.gather(addresses, self._params, count)
                gathers = True
                result = self._run(groups, lambda p: [] if id(p) in early else targets[id(p)])
            finally:
                # Whatever the optimizer raised: what it did to its shards, every rank must see.
                if gathers:
                    engine.gather_rest()
                else:
                    engine.gather(addresses, self._params)
                sharding.drop_gradients()
        engine.mark_update(start)
        return result

    def make_whole(self) -> None:
        """Have whole state on every rank, and whole updates until the next :meth:`apply`."""
        self.sharding.follow([])
        self._installed = 0

    def forget(self) -> None:
        """The optimizer's state is whole, because another one is being loaded."""
        self.sharding.forget()
        self._installed = 0

    def _follow(self) -> None:
        if self._installed != self._engine.num_installed:
            self._installed = self._engine.num_installed
            # What has no elements is stepped on every rank: optimizers have state for it, too.
            some = [k for k, p in enumerate(self._params) if p.numel()]
            self.sharding.follow([k for k in some if self._engine.decouples_tensor(k)])
            self._early = self._first_groups()

    def _first_groups(self) -> tuple[set[int], int]:
        """Ids of the parameters that forward needs first, and the number of groups that they fill.

        These are updated first, so that their all-gathers hide the others' update.
        """
        groups = self._engine.gather_groups
        sizes = [sum(self._params[k].nbytes for k in group) for group in groups]
        count = 0
        while sum(sizes[:count]) * _EARLY < sum(sizes) and count < len(sizes) - 1:
            count += 1
        return {id(self._params[k]) for group in groups[:count] for k in group}, count

    def _stepped(self, reduced: Reduced | None) -> set[int]:
        """The sharded parameters that have changed on any rank."""
        gradients: Sequence[object] = [p.grad for p in self._params] if reduced is None else reduced
        return {k for k in self.sharding.indices if gradients[k] is not None}

    def _target(self, param: torch.Tensor, reduced: Reduced | None) -> Targets:
        """The tensor that the optimizer steps for a parameter: itself or its shard.

        It also sees empty shards, as tensors without gradient, because it may count the steps of a
        group.
        """
        index = self._index.get(id(param), -1)
        if index not in self.sharding:
            if not param.numel() and param.grad is None and reduced and reduced[index] is not None:
                param.grad = torch.empty_like(param)  # as where another rank has it
            return [param]
        shard = self.sharding.shard(index)
        slot = None if reduced is None else reduced[index]
        if not shard.numel():
            return [shard]
        if slot is not None and not slot.whole:
            shard.grad = tensors.shared(slot.data).view(param.dtype)
        elif param.grad is not None and (reduced is None or slot is not None):
            shard.grad = self.sharding.part(index, flat(ordered(param, param.grad)))
        return [shard]
