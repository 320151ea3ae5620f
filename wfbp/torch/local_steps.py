"""Local steps: ranks train by themselves, and average now and then what they have learnt.

After some steps a rank's parameters have moved away from the *common* ones, which all ranks have.
The average of these changes over the ranks is the gradient of an *outer* optimizer, which moves the
common parameters (DiLoCo, arXiv:2311.08105, algorithm 1). The model is cut into *fragments*, which
are exchanged at different steps, each while the next steps compute (Streaming DiLoCo,
arXiv:2501.18512, sections 2.2 and 2.3).
"""

from __future__ import annotations

import copy
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from wfbp.core.checks import whole
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, StallError
from wfbp.runtime import process, signals
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Choice, wires_of
from wfbp.torch.optimizer import DistributedOptimizerBase
from wfbp.torch.original import check_params, named_params, wrapped_of
from wfbp.torch.wrapping import check_optimizer, named_pairs, stepping_locally

Outer = str | Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OUTER: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.9, momentum=0.5, nesterov=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
}
"""The best of six choices in short runs (docs/benchmarks/training.md), and the plain average."""
_MOST_DELAY = 5
_SMALL_BYTES = 4096
"""Smaller tensors travel together."""


class LocalSteps:
    """Lets an optimizer take steps on this rank alone, and averages parameters every few steps.

    The optimizer stays as it is, and so do schedulers and ``step()``. Ranks send ``1 / every`` of
    the bytes that averaging gradients would. Training differs, and needs its own learning rates.
    Every rank must take the same number of steps; so ``GradScaler``, which skips some on one rank,
    does not fit. Load and broadcast parameters before. Buffers, such as the statistics of
    ``BatchNorm``, are not averaged. A copy of the optimizer has no local steps.

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
        2
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
        if isinstance(optimizer, DistributedOptimizerBase) or wrapped_of(optimizer) is not None:
            raise TypeError(
                "LocalSteps was given an optimizer that averages gradients in every step; make it "
                "of another one, instead of a DistributedOptimizer"
            )
        check_optimizer(optimizer)
        known = None if named_parameters is None else named_pairs(named_parameters)
        named = named_params(optimizer, known, complete=True)
        self._ids = {id(p) for _, p in named}
        named = [(name, p) for name, p in named if p.numel()]
        whole("every", every, 1)
        place = "fragments (at most every, and one per parameter)"
        most = every // whole(place, fragments, 1, min(every, len(named))) - 1
        if delay is None:
            delay = min(_MOST_DELAY, most)
        whole("delay (fewer than every / fragments)", delay, 0, most)
        make = OUTER.get(outer) if isinstance(outer, str) else outer
        if not callable(make):
            raise ValueError(f"outer is {outer!r}; expected {', '.join(OUTER)} or a function")
        self._every, self._delay = every, delay
        self._num_steps, self._shows_common = 0, False
        self.num_exchanges = 0
        """Fragments that were exchanged so far."""
        cuts = _cuts([p.numel() for _, p in named], fragments)
        self._settings = {"every": every, "fragments": fragments, "delay": delay}
        self._fragments = [
            Fragment(runtime, named[first:last], named, make, compression, self._settings, number)
            for number, (first, last) in enumerate(pairwise(cuts))
        ]
        self._sends_at = [every * (number + 1) // fragments for number in range(fragments)]
        stepping_locally.add(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._has_begun = False
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda opt, *_: self._after_step(opt)),
        ]

    def close(self) -> None:
        """Let the optimizer step alone again. Every rank must call it, after the same step."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            stepping_locally.discard(optimizer)

    @uncompiled
    def _before_step(self) -> None:
        """Raise if parameters were loaded later, which would count as progress of this rank."""
        self._check_own("step()")
        for fragment in self._fragments:
            if not (self._has_begun or fragment.shows_common()):
                raise RuntimeError(
                    "parameters have changed since LocalSteps was made: load and broadcast them "
                    "before it is made"
                )
        self._has_begun = True

    def _check_own(self, what: str) -> None:
        if self._shows_common:
            raise RuntimeError(f"{what} within LocalSteps.averaged()")

    @uncompiled
    @signals.deferred
    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin and end the exchanges that are due."""
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if id(param) not in self._ids and (param.is_floating_point() or param.is_complex()):
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
        """Exchange what has changed, and wait for it; all ranks then have the common parameters.

        For the end of training. Every rank must call it, after the same step. Without steps in
        between, a second call exchanges nothing.

        Raises:
            RuntimeError: within :meth:`averaged`.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        self._check_own("synchronize()")
        for fragment in self._fragments:
            if fragment.is_under_way:
                self._receive(fragment)
            if fragment.sent_at < self._num_steps:
                fragment.send(self._num_steps)
                fragment.receive(carries_on=False)
                self.num_exchanges += 1
            else:
                fragment.show_common()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the model has the common parameters, which are the same on every rank: for
        evaluation. Any rank may use it alone. ``step()`` within it is an error."""
        self._check_own("averaged()")
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
        """The common parameters, the outer optimizer's state, and this rank's rounding errors. Save
        them with the model's and the optimizer's state. Any rank may call it, alone.

        Each rank's own state continues with the same bits, unless a fragment is under way: that is
        exchanged later. If all ranks load the state of one, its rounding errors count for all.
        """
        return {
            "settings": dict(self._settings),
            "steps": self._num_steps,
            "exchanges": self.num_exchanges,
            "fragments": [fragment.state() for fragment in self._fragments],
        }

    @signals.deferred
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, after the model and the optimizer have loaded theirs.

        Every rank must call it, with states of the same step. The number of ranks may differ.

        Raises:
            RuntimeError: within :meth:`averaged`.
            ValueError: a state of something else, or of other settings or parameters.
        """
        self._check_own("load_state_dict()")
        found = {
            **state_dict.get("settings", {}),
            "parameters": [list(each["names"]) for each in state_dict.get("fragments", [])],
        }
        mine = self._settings | {"parameters": [fragment.names for fragment in self._fragments]}
        if found != mine:
            what = [name for name in mine if found.get(name) != mine[name]]
            raise ValueError(
                f"the state to load differs in {', '.join(what)}: found "
                f"{[found.get(name) for name in what]}, expected {[mine[name] for name in what]}"
            )
        self._has_begun = True
        self._num_steps, self.num_exchanges = state_dict["steps"], state_dict["exchanges"]
        for fragment, each in zip(self._fragments, state_dict["fragments"], strict=True):
            fragment.load(each)


class Fragment:
    """Some parameters of a model, with the common ones on the host, and their exchange."""

    def __init__(
        self,
        runtime: Runtime,
        named: Sequence[tuple[str, torch.Tensor]],
        known: Sequence[tuple[str, torch.Tensor]],  # of all fragments
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        compression: Choice,
        settings: Mapping[str, object],
        number: int,
    ) -> None:
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self.params]
        self.common = [
            p.detach().to("cpu", t, copy=True).contiguous()
            for p, t in zip(self.params, wide, strict=True)
        ]
        """The same on every rank, in float32 or float64."""
        self._outer = make(self.common)
        if not isinstance(self._outer, torch.optim.Optimizer):
            raise TypeError(f"outer made {self._outer!r}; expected a torch.optim.Optimizer")
        self.sent_at = 0
        """The step of the last exchange."""
        self._sent: list[torch.Tensor] | None = None
        """This rank's changes, while they are under way."""
        self._own: list[torch.Tensor] = []
        """Its parameters, as they were then."""
        wire, wires = wires_of(compression, named, known)
        name = f"fragment {number} of LocalSteps"
        options = ReducerOptions("layerwise", 1, Op.AVERAGE, name=name, wire=wire, wires=wires)
        check_params(named, options)
        if len(options.choices) > 1:
            raise ValueError(f"compression is {compression!r}; LocalSteps needs one without auto")
        # Small tensors that are sent alike travel as one. The last message leaves when the step is
        # closed, so it is one without content: all others leave before.
        self._large = [k for k, t in enumerate(self.common) if t.nbytes >= _SMALL_BYTES]
        small: dict[tuple[torch.dtype, str], list[int]] = {}
        for k, t in enumerate(self.common):
            if t.nbytes < _SMALL_BYTES:
                sent_as = options.wire_of(tensors.spec(self.names[k], t), runtime.size, "")
                small.setdefault((t.dtype, sent_as), []).append(k)
        self._small = list(small.values())
        names = [self.names[k] for k in self._large]
        names += [f"small {dtype}, sent as {sent_as or 'it is'}" for dtype, sent_as in small]
        joined = self._joined(self.common)
        specs = [tensors.spec(name, t) for name, t in zip(names, joined, strict=True)]
        ways = [sent_as for _, sent_as in small]
        exceptions = zip(names[len(self._large) :], ways, strict=True)
        options = replace(options, wires=(*wires, *exceptions))
        self._end = torch.zeros(1)
        last = tensors.spec("end of the exchange", self._end)
        digest = 0
        for tensor in self.common:
            digest = zlib.crc32(tensors.raw(tensor).data, digest)
        self._reducer: Reducer | None = None
        if runtime.size > 1:
            compared = {
                **settings,
                "outer": f"{type(self._outer).__name__} {self._outer.defaults}",
                "initial parameters, which broadcast_parameters() makes equal": digest,
            }
            self._reducer = Reducer(runtime, [last, *specs], options, compared=compared)
            weakref.finalize(self, self._reducer.close)

    @property
    def is_under_way(self) -> bool:
        return self._sent is not None

    def send(self, step: int) -> None:
        """Begin to average how far this rank's parameters are from the common ones."""
        self.sent_at = step
        # As the common ones are shown: rounding to the parameter's type is no progress.
        shown = [t.to(p.dtype).to(t.dtype) for t, p in zip(self.common, self.params, strict=True)]
        self._own = [
            p.detach().to("cpu", t.dtype, copy=True).contiguous()
            for t, p in zip(self.common, self.params, strict=True)
        ]
        self._sent = [t - own for t, own in zip(shown, self._own, strict=True)]
        if self._reducer is not None:
            for index, tensor in reversed(list(enumerate(self._joined(self._sent), 1))):
                self._reducer.mark_ready(index, tensor.data_ptr(), tensor)

    def _joined(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors as they travel."""
        small = [torch.cat([values[k].view(-1) for k in keys]) for keys in self._small]
        return [values[k] for k in self._large] + small

    def _averages(self) -> list[torch.Tensor]:
        """The averages of what is under way, once they are here."""
        sent, self._sent = self._sent, None
        assert sent is not None
        if self._reducer is None:
            return sent
        self._reducer.mark_ready(0, self._end.data_ptr(), self._end)
        try:
            _, *views = self._reducer.synchronize(closing_call=self.sent_at % 63 + 1)
        except (DisagreementError, StallError) as error:
            raise type(error)(
                f"{error}. Under LocalSteps every rank must have taken as many steps as the others "
                f"(here {self.sent_at} before this exchange)"
            ) from error
        averages = [torch.empty_like(t) for t in self.common]
        for view, keys in zip(views, [[k] for k in self._large] + self._small, strict=True):
            assert view is not None
            flat = tensors.shared(view.data).view(self.common[keys[0]].dtype)
            parts = torch.split(flat, [averages[k].numel() for k in keys])
            for k, part in zip(keys, parts, strict=True):
                averages[k].view(-1).copy_(part)
        return averages

    def receive(self, carries_on: bool) -> None:
        """Move the common parameters, and this rank's: to them, or by as much as they differ from
        what this rank had, so that steps made meanwhile are kept."""
        for tensor, average in zip(self.common, self._averages(), strict=True):
            tensor.grad = average
        self._outer.step()
        self._outer.zero_grad()
        own, self._own = self._own, []
        if not carries_on:
            self.show_common()
            return
        for param, tensor, before in zip(self.params, self.common, own, strict=True):
            param.detach().add_((tensor - before).to(param.device, param.dtype))

    def shows_common(self) -> bool:
        """Whether the model's parameters are the common ones."""
        pairs = zip(self.params, self.common, strict=True)
        return all(torch.equal(p.detach().cpu(), t.to(p.dtype)) for p, t in pairs)

    def show_common(self) -> None:
        """Set the model's parameters to the common ones."""
        for param, tensor in zip(self.params, self.common, strict=True):
            param.detach().copy_(tensor)

    def state(self) -> dict[str, Any]:
        errors = {}
        if self._reducer is not None and not self.is_under_way:  # else they are being written
            errors = self._reducer.errors_of_encoding()
        return {
            "names": list(self.names),
            "sent_at": 0 if self.is_under_way else self.sent_at,
            "common": [t.clone() for t in self.common],
            "outer": copy.deepcopy(self._outer.state_dict()),
            "errors": {name: torch.from_numpy(each.copy()) for name, each in errors.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        if self.is_under_way:
            self._averages()
        self.sent_at, self._own = state["sent_at"], []
        for tensor, value in zip(self.common, state["common"], strict=True):
            tensor.copy_(value)
        self._outer.load_state_dict(copy.deepcopy(state["outer"]))
        if self._reducer is None:
            return
        for name, error in self._reducer.errors_of_encoding().items():
            value = state["errors"].get(name)
            if value is not None and value.numel() == error.size:
                error[:] = value.numpy()
            else:  # of another number of ranks, or sent in another way
                error.fill(0.0)


def _cuts(sizes: Sequence[int], count: int) -> list[int]:
    """The bounds of so many runs of entries of about equal sizes, none of them empty."""
    ends = list(accumulate(sizes))
    cuts = [0]
    for number in range(1, count):
        wanted = ends[-1] * number / count
        nearest = 1 + min(range(len(ends)), key=lambda k: abs(ends[k] - wanted))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(ends) - (count - number)))
    return [*cuts, len(ends)]
