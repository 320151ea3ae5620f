"""Local steps: ranks train by themselves, and average now and then what they have learnt.

After some steps a rank's parameters have moved away from the *common* ones, which all ranks have.
The average of these changes over the ranks is the gradient of an *outer* optimizer, which moves the
common parameters (DiLoCo, arXiv:2311.08105, algorithm 1). The model is cut into *fragments*, which
are exchanged at different steps, each while the next steps compute (Streaming DiLoCo,
arXiv:2501.18512, sections 2.2 and 2.3).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.errors import DisagreementError
from wfbp.runtime import process, signals
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Choice, wires_of
from wfbp.torch.optimizer import DistributedOptimizerBase
from wfbp.torch.original import check_params, named_params
from wfbp.torch.wrapping import check_optimizer, named_pairs

Outer = str | Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OUTER: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.9, momentum=0.5, nesterov=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
}
"""The best of seven choices in short runs (docs/benchmarks/training.md), and the plain average."""
_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_MOST_DELAY = 5
_SMALL_BYTES = 4096
"""Smaller tensors travel together."""


class LocalSteps:
    """Lets an optimizer take steps on this rank alone, and averages parameters every few steps.

    The optimizer stays as it is: schedulers, ``GradScaler`` and ``step()`` work as without it. It
    sends ``1 / every`` of the bytes that averaging gradients would, but trains differently, and
    needs its own learning rates. Every rank must take the same number of steps. Buffers, such as
    the statistics of ``BatchNorm``, are not averaged.

    Args:
        optimizer: any ``torch.optim.Optimizer``, but no :func:`DistributedOptimizer`.
        named_parameters: ``model.named_parameters()``, for messages and rules of ``compression``.
        every: steps from one exchange of a fragment to its next one.
        fragments: parts of the model, exchanged at different steps; at most ``every``.
        outer: ``"nesterov"`` (learning rate 0.9, momentum 0.5) or ``"sgd"`` (the plain average); or
            a function that makes an optimizer of a list of tensors. DiLoCo's SGD with 0.7 and 0.9
            needs many thousand steps.
        compression: how changes are sent, as in :func:`DistributedOptimizer`, without ``auto``.
        delay: steps that compute while a fragment travels; by default at most 5, and fewer than
            ``every / fragments``. With 0 every exchange is waited for.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optimizer, or one that averages gradients already.
        ValueError: a bad argument, or a parameter that cannot be sent.
        DisagreementError: ranks passed different parameters or settings, or have different values.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> local = wfbp.LocalSteps(optimizer, model.named_parameters(), every=2, fragments=1)
        >>> for batch in torch.ones(4, 8, 2):
        ...     optimizer.zero_grad()
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
        >>> local.synchronize()
        >>> local.num_exchanges
        3
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        every: int = 30,
        fragments: int = 4,
        outer: Outer = "nesterov",
        compression: Choice = "int4",
        delay: int | None = None,
    ) -> None:
        runtime = process.current("LocalSteps()")
        if isinstance(optimizer, DistributedOptimizerBase):
            raise TypeError(
                "LocalSteps was given a distributed optimizer, which averages gradients in every "
                "step; pass the optimizer that it was made of"
            )
        check_optimizer(optimizer)
        known = None if named_parameters is None else named_pairs(named_parameters)
        named = named_params(optimizer, known, complete=True)
        delay = _checked(every, fragments, delay, len(named))
        make = OUTER.get(outer) if isinstance(outer, str) else outer
        if not callable(make):
            raise ValueError(f"outer is {outer!r}; expected {', '.join(OUTER)} or a function")
        self._every, self._delay = every, delay
        self._num_steps, self._shows_common = 0, False
        self.num_exchanges = 0
        """Fragments that were exchanged so far."""
        self._ids = {id(p) for _, p in named}
        if optimizer in _attached:
            raise ValueError(f"this {type(optimizer).__name__} has LocalSteps already")
        cuts = _cuts([p.numel() for _, p in named], fragments)
        settings = {
            "every": every,
            "fragments": fragments,
            "delay": delay,
            "outer": outer if isinstance(outer, str) else getattr(outer, "__qualname__", ""),
        }
        self._fragments = [
            Fragment(runtime, named[first:last], make, compression, settings, number)
            for number, (first, last) in enumerate(pairwise(cuts))
        ]
        self._sends_at = [every * (number + 1) // fragments for number in range(fragments)]
        _attached.add(optimizer)
        optimizer.register_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))

    @uncompiled
    @signals.deferred
    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin and end the exchanges that are due."""
        if self._shows_common:
            raise RuntimeError(f"{type(optimizer).__name__}: step() within LocalSteps.averaged()")
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if id(param) not in self._ids and param.is_floating_point():
                raise RuntimeError(
                    f"{type(optimizer).__name__} has got a parameter of shape {tuple(param.shape)} "
                    "since LocalSteps was made for it, which ranks do not average: add parameters "
                    "before"
                )
        self._num_steps += 1
        for fragment, at in zip(self._fragments, self._sends_at, strict=True):
            if self._num_steps >= at and not (self._num_steps - at) % self._every:
                fragment.send(self._num_steps)
            since = self._num_steps - self._delay - at
            if since >= 0 and not since % self._every and fragment.is_under_way:
                self._receive(fragment)

    def _receive(self, fragment: Fragment) -> None:
        fragment.receive(carries_on=self._delay > 0)
        self.num_exchanges += 1

    @uncompiled
    @signals.deferred
    def synchronize(self) -> None:
        """Exchange all fragments and wait for them; parameters are then equal on all ranks.

        For the end of training. Every rank must call it, after the same step.

        Raises:
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        for fragment in self._fragments:
            if fragment.is_under_way:
                self._receive(fragment)
            fragment.send(self._num_steps)
            fragment.receive(carries_on=False)
            self.num_exchanges += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the model has the common parameters, which are the same on every rank: for
        evaluation. Any rank may use it alone. ``step()`` within it is an error."""
        kept = [p.detach().clone() for fragment in self._fragments for p in fragment.params]
        for fragment in self._fragments:
            fragment.show_common()
        self._shows_common = True
        try:
            yield
        finally:
            self._shows_common = False
            params = [p for fragment in self._fragments for p in fragment.params]
            for param, value in zip(params, kept, strict=True):
                param.detach().copy_(value)

    @signals.deferred
    def state_dict(self) -> dict[str, Any]:
        """The common parameters, the outer optimizer's state, and rounding errors. Save them with
        the model's and the optimizer's state. Waits for exchanges under way.

        Each rank's own state continues exactly. If all ranks load that of one rank, the errors of
        rounding that the others have kept are lost.
        """
        return {
            "steps": self._num_steps,
            "exchanges": self.num_exchanges,
            "fragments": [fragment.state() for fragment in self._fragments],
        }

    @signals.deferred
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, after the model and the optimizer have loaded theirs.

        Every rank must call it, with states of the same step.

        Raises:
            ValueError: a state of other fragments.
        """
        saved = state_dict["fragments"]
        shapes = [[tuple(t.shape) for t in each["common"]] for each in saved]
        mine = [[tuple(t.shape) for t in fragment.common] for fragment in self._fragments]
        if shapes != mine:
            raise ValueError(
                f"the state is of {len(saved)} fragments with parameters of shapes {shapes}; "
                f"expected {mine}: pass the same fragments and parameters as when it was saved"
            )
        self._num_steps, self.num_exchanges = state_dict["steps"], state_dict["exchanges"]
        for fragment, each in zip(self._fragments, saved, strict=True):
            fragment.load(each)


class Fragment:
    """Some parameters of a model, with the common ones on the host, and their exchange."""

    def __init__(
        self,
        runtime: Runtime,
        named: Sequence[tuple[str, torch.Tensor]],
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        compression: Choice,
        settings: dict[str, object],
        number: int,
    ) -> None:
        self.params = [p for _, p in named]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self.params]
        self.common = [
            p.detach().to("cpu", t, copy=True).contiguous()
            for p, t in zip(self.params, wide, strict=True)
        ]
        """The same on every rank, in float32 or float64."""
        self._outer = make(self.common)
        self._sent: list[torch.Tensor] | None = None
        """This rank's changes, while they are under way."""
        self._arrived: list[torch.Tensor] | None = None
        """Averages of those under way, if they have arrived already."""
        # Small tensors travel as one. The last message leaves when the step is closed, so it is
        # one without content: all others leave before.
        self._large = [k for k, t in enumerate(self.common) if t.nbytes >= _SMALL_BYTES]
        small = [k for k, t in enumerate(self.common) if t.nbytes < _SMALL_BYTES]
        dtypes = dict.fromkeys(self.common[k].dtype for k in small)
        self._small = [[k for k in small if self.common[k].dtype is t] for t in dtypes]
        names = [named[k][0] for k in self._large]
        joined = self._joined(self.common)
        names += [f"small {t.dtype}" for t in joined[len(names) :]]
        specs = [tensors.spec(name, t) for name, t in zip(names, joined, strict=True)]
        self._end = torch.zeros(1)
        last = tensors.spec("end of the exchange", self._end)
        wire, wires = wires_of(compression, named)
        name = f"fragment {number} of LocalSteps"
        options = ReducerOptions("layerwise", 1, Op.AVERAGE, name=name, wire=wire, wires=wires)
        check_params(named, options)
        if len(options.choices) > 1:
            raise ValueError(f"compression is {compression!r}; LocalSteps needs one without auto")
        digest = 0
        for tensor in self.common:
            digest = zlib.crc32(tensors.raw(tensor).data, digest)
        self._reducer: Reducer | None = None
        if runtime.size > 1:
            compared = settings | {"initial parameters": digest}
            self._reducer = Reducer(runtime, [last, *specs], options, compared=compared)
            weakref.finalize(self, self._reducer.close)

    @property
    def is_under_way(self) -> bool:
        return self._sent is not None

    def send(self, step: int) -> None:
        """Begin to average how far this rank's parameters are from the common ones."""
        self._closing_call = step % 63 + 1  # which ranks compare
        self._sent = [
            t - p.detach().to("cpu", t.dtype).contiguous()
            for t, p in zip(self.common, self.params, strict=True)
        ]
        if self._reducer is not None:
            for index, tensor in reversed(list(enumerate(self._joined(self._sent), 1))):
                self._reducer.mark_ready(index, tensor.data_ptr(), tensor)

    def _joined(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors as they travel."""
        small = [torch.cat([values[k].view(-1) for k in keys]) for keys in self._small]
        return [values[k] for k in self._large] + small

    def _arrive(self) -> list[torch.Tensor]:
        """The averages of what is under way, once they are here."""
        assert self._sent is not None
        if self._arrived is not None:
            return self._arrived
        if self._reducer is None:
            self._arrived = self._sent
            return self._sent
        self._reducer.mark_ready(0, self._end.data_ptr(), self._end)
        try:
            _, *views = self._reducer.synchronize(closing_call=self._closing_call)
        except DisagreementError as error:
            raise DisagreementError(
                f"{error}. Under LocalSteps every rank must have taken as many steps as the others"
            ) from error
        self._arrived = averages = [torch.empty_like(t) for t in self.common]
        for view, keys in zip(views, [[k] for k in self._large] + self._small, strict=True):
            assert view is not None
            dtype = self.common[keys[0]].dtype
            flat = tensors.shared(view.data).view(dtype)
            parts = torch.split(flat, [averages[k].numel() for k in keys])
            for k, part in zip(keys, parts, strict=True):
                averages[k].view(-1).copy_(part)
        return averages

    def receive(self, carries_on: bool) -> None:
        """Move the common parameters, and this rank's: to them, or by as much as they differ from
        what was sent, so that steps made meanwhile are kept."""
        averages, sent = self._arrive(), self._sent
        assert sent is not None
        self._sent = self._arrived = None
        before = [t - s for t, s in zip(self.common, sent, strict=True)] if carries_on else []
        for tensor, average in zip(self.common, averages, strict=True):
            tensor.grad = average
        self._outer.step()
        self._outer.zero_grad()
        if not carries_on:
            self.show_common()
            return
        for param, tensor, own in zip(self.params, self.common, before, strict=True):
            param.detach().add_((tensor - own).to(param.device, param.dtype))

    def show_common(self) -> None:
        """Set the model's parameters to the common ones."""
        for param, tensor in zip(self.params, self.common, strict=True):
            param.detach().copy_(tensor)

    def state(self) -> dict[str, Any]:
        if self.is_under_way:
            self._arrive()
        errors = [] if self._reducer is None else self._reducer.errors_of_encoding()
        return {
            "common": [t.clone() for t in self.common],
            "outer": self._outer.state_dict(),
            "sent": self._sent,
            "arrived": self._arrived,
            "errors": [torch.from_numpy(e.copy()) for e in errors],
        }

    def load(self, state: dict[str, Any]) -> None:
        if self.is_under_way:
            self._arrive()
        for tensor, value in zip(self.common, state["common"], strict=True):
            tensor.copy_(value)
        self._outer.load_state_dict(state["outer"])
        self._sent, self._arrived = state["sent"], state["arrived"]
        if self._reducer is not None:
            kept = self._reducer.errors_of_encoding()
            for error, value in zip(kept, state["errors"], strict=False):
                error[:] = value.numpy()


def _checked(every: object, fragments: object, delay: object, num_params: int) -> int:
    """The delay in steps; ``ValueError`` for numbers that do not fit."""
    numbers = {"every": every, "fragments": fragments}
    for name, value in (numbers | ({} if delay is None else {"delay": delay})).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (name != "delay"):
            raise ValueError(f"{name} is {value!r}; expected a whole number above zero")
    assert isinstance(every, int)
    assert isinstance(fragments, int)
    if fragments > min(every, num_params):
        raise ValueError(
            f"fragments is {fragments}; expected at most every ({every}) and the number of "
            f"parameters ({num_params})"
        )
    most = every // fragments - 1
    if delay is None:
        return min(_MOST_DELAY, most)
    assert isinstance(delay, int)
    if delay > most:
        raise ValueError(f"delay is {delay}; expected at most {most}, fewer than every / fragments")
    return delay


def _cuts(sizes: Sequence[int], count: int) -> list[int]:
    """The bounds of so many runs of entries of about equal sizes, none of them empty."""
    ends = list(accumulate(sizes))
    cuts = [0]
    for number in range(1, count):
        wanted = ends[-1] * number / count
        nearest = 1 + min(range(len(ends)), key=lambda k: abs(ends[k] - wanted))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(ends) - (count - number)))
    return [*cuts, len(ends)]
