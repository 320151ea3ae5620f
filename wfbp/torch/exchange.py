"""Everything that one distributed optimizer does together with other ranks."""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.errors import WfbpError
from wfbp.runtime import world
from wfbp.runtime.runtime import Runtime
from wfbp.torch import pending_parameters, tensors
from wfbp.torch.clipping import Limit, clip
from wfbp.torch.gradients import GradientHooks
from wfbp.torch.hyperparameters import check_equal_on_ranks
from wfbp.torch.nature import UpdateCoupling
from wfbp.torch.replicated_update import ReplicatedUpdate
from wfbp.torch.sharded_update import ShardedUpdate
from wfbp.torch.state_sharding import State, StateSharding
from wfbp.torch.update import Reduced, Step, Update

log = logging.getLogger("wfbp")


def _finish() -> None:
    """Before a shutdown: nobody could have parameters brought up to date behind it."""
    runtime = world.current("shutdown()")
    for pending in list(pending_parameters.unfinished):
        told = runtime.thread.error is not None  # to whoever has called anything since
        try:
            pending.wait_all()
        except Exception as error:
            if not told or not isinstance(error, WfbpError):
                log.error("parameters are not up to date at the end: %s", error)
        pending.release()


world.before_shutdown(_finish)


class OptimizerSync:
    """Reduces gradients, has the optimizer updated, and sees that parameters are read up to date.

    Between :meth:`reduce` and :meth:`step` it holds what was reduced, which may be shards.

    Args:
        runtime: with more than one rank.
        optimizer: the distributed one.
        named: names and parameters, equal on every rank.
        nature: what the optimizer does to its tensors; decides how it is updated.
        step: the optimizer's own step.
        settings: what ``GradientHooks`` takes beside.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        nature: UpdateCoupling,
        step: Step,
        **settings: Any,
    ) -> None:
        self.runtime = runtime
        self._name = settings["name"]
        self._op: Op = settings["op"]
        self._optimizer = optimizer
        decouples = nature is not UpdateCoupling.COUPLED
        sharded = nature is UpdateCoupling.ELEMENTWISE
        self._gradients = gradients = GradientHooks(
            runtime,
            named,
            decouples=decouples,
            shares_update=sharded,
            **settings,
        )
        self._engine = engine = gradients.engine
        self._params = params = gradients.params
        self._held: Reduced | None = None
        self._compared = False
        self._sharding: StateSharding | None = None
        if sharded:
            self._sharding = StateSharding(runtime, gradients.specs, params, optimizer)
            self._update: Update = ShardedUpdate(
                engine, optimizer, params, step, sharding=self._sharding
            )
        else:
            self._update = ReplicatedUpdate(engine, optimizer, params, step)
        gradients.before_release = _letting_go(self._update)
        self.report = engine.report

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return self._gradients.open

    @property
    def shares_state(self) -> bool:
        """Whether this rank has shards of the optimizer's state."""
        return self._sharding is not None and bool(self._sharding.indices)

    @property
    def holds_shards(self) -> bool:
        """Whether gradients were reduced that ``p.grad`` does not show."""
        return self._held is not None

    def reduce(self, wanted: bool = False) -> None:
        """Close the step and wait for what the optimizer needs of its gradients.

        Args:
            wanted: whether the program is about to look at them all.
        """
        self._compare()
        self._update.settle()
        reduced = self._gradients.reduce(whole=False, wanted=wanted)
        shards = any(slot is not None and not slot.whole for slot in reduced)
        self._held = reduced if shards else None

    def synchronize(self) -> bool:
        """Close the step, unless that was done, and have whole gradients and parameters.

        Returns:
            Whether any rank had a gradient.
        """
        self._compare()
        self._update.flush()
        if self._held is not None:
            self.check_settled()
            whole = self._engine.gather_gradients(self._held)
            self._engine.flush()
            self._gradients.take(whole)
        else:
            whole = self._gradients.reduce(whole=True)
        self._held = None
        return any(slot is not None for slot in whole)

    def flush(self) -> None:
        """Have all parameters up to date."""
        self._update.flush()

    def check_settled(self) -> None:
        """Raise unless no gradients have appeared since they were reduced.

        Raises:
            RuntimeError: there are some; whether other ranks have any, this one cannot know.
        """
        if self.open:
            raise RuntimeError(
                f"{self._name}: gradients have appeared since they were averaged. Every backward() "
                "must come before synchronize() or clip_grad_norm_(); a program that leaves out a "
                "step after these must call optimizer.zero_grad(), on every rank, before the next "
                "backward()"
            )

    def step(self) -> Any:
        """Let the optimizer step with what was reduced; what is decoupled travels from here on."""
        reduced, self._held = self._held, None
        try:
            return self._update.apply(reduced)
        finally:
            if self._engine.profiling:
                self._update.flush()  # nothing travels where compute is measured
            else:
                self._update.pending.wait_for_exposed()

    def clip_grad_norm_(self, limit: Limit) -> torch.Tensor:
        """Scale what was reduced; see the optimizer's method of that name."""
        norm = clip(self.runtime, limit, *self._reduced_tensors())
        wide = functools.reduce(torch.promote_types, {p.dtype for p in self._params})
        return torch.tensor(norm, dtype=wide, device=self._params[0].device)

    def combined_loss(self, loss: Any) -> Any:
        """The loss of all ranks, combined as their gradients are; a collective.

        An optimizer that looks at the loss, as in a line search, must find on every rank what
        belongs to the gradients that it finds there.

        Args:
            loss: what a closure returned here; only real numbers and tensors of one are combined,
                over the ranks that have one.

        Returns:
            The same kind of value, the same bits on every rank; anything else as it is.
        """
        held = loss.detach() if isinstance(loss, torch.Tensor) else None
        if held is None:
            number = isinstance(loss, Real) and not isinstance(loss, bool)
        else:
            number = held.numel() == 1 and not held.is_complex()
        mine = struct.pack("d", float(loss if held is None else held)) if number else b""
        losses = self.runtime.exchange(mine, f"{self._name}: the loss of step(closure)")
        if not number:
            return loss
        values = [struct.unpack("d", text)[0] for text in losses if text]
        result = sum(values) / (len(values) if self._op is Op.AVERAGE else 1)
        if held is None:
            return result
        return torch.full_like(
            held, result, dtype=None if held.is_floating_point() else torch.float
        )

    def prepare_whole(self) -> None:
        """For a step with a closure: whole parameters, whole state, whole gradients."""
        self._update.flush()
        self._held = None
        if isinstance(self._update, ShardedUpdate):
            self._update.join()

    def whole_state(self) -> State:
        """The optimizer's state as it would be without other ranks; any rank may ask, alone."""
        self._update.flush()
        if self._sharding is None:
            return self._optimizer.state
        return self._sharding.whole_state()

    def take_whole_state(self) -> None:
        """Let the state be whole here; on the other ranks it is about to be replaced by this."""
        self._update.flush()
        if isinstance(self._update, ShardedUpdate):
            self._update.sharding.take_whole_state()
            self._update.forget()

    def before_another_state(self, state: State) -> None:
        """The optimizer is given other state: updates that are due belong to that before."""
        if self._update.pending.updates_here:  # what an optimizer does itself is its own affair
            return
        self.flush()
        if self._sharding is not None and not self._sharding.lies_in(state):
            self.forget_state()

    def forget_state(self) -> None:
        """Another state has been loaded, on every rank; nothing was under way."""
        if isinstance(self._update, ShardedUpdate):
            self._update.forget()

    def discard(self) -> None:
        """Forget gradients that appeared since the last step."""
        self._held = None
        self._gradients.discard()

    def release(self) -> None:
        """Let the parameters go, up to date, and the state, whole; a collective."""
        self.prepare_whole()
        self._update.pending.release()
        self._gradients.release()

    def _compare(self) -> None:
        """Before anything else of the first step: see that ranks update by the same numbers."""
        if not self._compared:
            check_equal_on_ranks(self.runtime, self._optimizer, self._name)
            self._compared = True

    def _reduced_tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The shards of reduced gradients, and the whole ones."""
        if self._held is None:
            return [], [p.grad for p in self._params if p.grad is not None]
        shards, whole = [], []
        for param, slot in zip(self._params, self._held, strict=True):
            if slot is None:
                continue
            if slot.whole and param.grad is not None:
                whole.append(param.grad)
            elif not slot.whole and len(slot.data):
                shards.append(tensors.shared(slot.data).view(param.dtype))
        return shards, whole


def _letting_go(update: Update) -> Callable[[], None]:
    def let_go() -> None:
        update.flush()
        update.pending.release()

    return let_go
