"""Notices gradients that were changed between their hooks and their reduction.

Three things tell of a change:

* the count of changes in place that PyTorch keeps for each tensor;
* the class :class:`Watched`, which a gradient has from its hook on: through it comes the first use
  from Python that may lead to a change, and checksums of before and after are compared;
* samples, for what neither notices. On the host a few bytes are compared at once. On a device
  samples are compared there, and the host learns the result without waiting.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from wfbp.torch.tensors import is_dense

SAMPLED = 16
"""Elements."""

FIRST_STEPS, EVERY_STEPS = 8, 64
"""Steps that are looked at: a program that changes gradients mostly does so in every step."""


def _on_device(grad: torch.Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(grad.device) if grad.is_cuda else nullcontext()


class DeviceGradientGuard:
    """The first elements of one gradient, before and after; used by the training thread and by
    backward's.

    ``make_event`` makes a device event; ``on_device`` is a context in which the gradient's device
    is the current one.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] = torch.cuda.Event,
        on_device: Callable[[torch.Tensor], AbstractContextManager[Any]] = _on_device,
    ) -> None:
        self._make_event = make_event
        self._on_device = on_device
        self._before: torch.Tensor | None = None
        self._answers: deque[tuple[Any, torch.Tensor, int]] = deque()
        self._num_steps = 0

    def take(self, grad: torch.Tensor) -> None:
        """In some steps, remember a gradient as it is at this point of the stream."""
        number = self._num_steps
        if number < FIRST_STEPS or number % EVERY_STEPS == 0:
            self._before = _first(grad).clone()

    def compare(self, index: int, grad: torch.Tensor) -> None:
        """Compare it with what it has become; the answer comes later."""
        before, self._before = self._before, None
        if before is None:
            return
        with self._on_device(grad):
            changed = (_first(grad) != before).any()
            if before.is_cuda:  # made on backward's stream, which may be another one
                before.record_stream(torch.cuda.current_stream())
            answer = torch.empty((), dtype=torch.bool, pin_memory=grad.is_cuda)
            answer.copy_(changed, non_blocking=True)
            event = self._make_event()
            event.record()
        self._answers.append((event, answer, index))

    def end_step(self) -> None:
        """What was remembered and not compared is forgotten."""
        self._before = None
        self._num_steps += 1

    def changed_index(self) -> int | None:
        """The index of a gradient that was changed in some earlier step, as far as is known."""
        while self._answers and self._answers[0][0].query():
            _, answer, index = self._answers.popleft()
            if answer:
                return index
        return None


def _first(grad: torch.Tensor) -> torch.Tensor:
    """Its first elements in memory, as bytes, which compare equal where NaN would not."""
    count = min(SAMPLED, grad.numel()) if grad.is_contiguous() else 1
    return torch.as_strided(grad.detach(), (count,), (1,)).view(torch.uint8)


_SAMPLE_BYTES = 64
_NUM_SAMPLED = 4
_LOOKED_AT = 16
"""Places at which bytes that are not zero are looked for, and gradients in which."""

_COLUMNS = 1024

Sums = list[torch.Tensor]


class Watched(torch.Tensor):
    """A gradient that only its optimizer should change now; otherwise a tensor as any other."""

    guard: Any = None
    """A weak reference, of the class made for each guard."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _READING_FUNCTIONS or "out" in kwargs:
            for grad in _watched((args, kwargs)):
                guard = type(grad).guard()
                grad.__class__ = torch.Tensor  # type: ignore[assignment]
                if guard is not None:
                    guard.used(grad, func, kwargs.get("out") is not None)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class GradientGuard:
    """Gradients as their hooks saw them. Used by the training thread and by backward's."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self._name = name
        self._names = names
        self.grads: list[torch.Tensor | None] = [None] * len(names)
        """By index, written by the hooks; None where no hook has run."""
        self.versions = [0] * len(names)
        """How often each had been changed in place by then."""
        self.watched = type("Watched", (Watched,), {"guard": weakref.ref(self)})
        """The class of these gradients."""
        self.wanted: set[int] = set()
        """Those of which a sample is to be taken."""
        self.uses: dict[int, tuple[str, torch.Tensor | None, Sums]] = {}
        """By index, of gradients that were used since: how, where they lay, and what was there. A
        hook that sees one again removes it."""
        self._indices: dict[int, int] = {}
        self._samples: dict[int, tuple[int, bytes]] = {}
        self._num_steps = 0
        self._device_guard = DeviceGradientGuard()
        self._late_index = -1
        self._is_averaged = False
        self._clean = self.grads[:]
        self._choose()

    def watch(self, index: int, grad: torch.Tensor) -> None:
        """From now on: a gradient that has been averaged, and whose average lies elsewhere."""
        self._is_averaged = True
        self.grads[index] = grad
        self.versions[index] = grad._version
        if index in self.wanted:
            self.sample(index, grad)
        if type(grad) is torch.Tensor:
            grad.__class__ = self.watched

    def refuse(self, index: int, how: str) -> None:
        """Raise ``RuntimeError`` because a gradient was changed."""
        raise self._touched(index, how)

    def sample(self, index: int, grad: torch.Tensor) -> None:
        """Remember some bytes of a gradient that are not all zero; without any, sample another
        gradient."""
        if _is_elsewhere(grad):
            if self._late_index in (-1, index):
                self._late_index = index
                self._device_guard.take(grad)
            return
        self._samples.pop(index, None)
        sampled = _nonzero_sample(grad)
        if sampled is not None:
            self._samples[index] = sampled
        elif len(self.wanted) < _NUM_SAMPLED + _LOOKED_AT:
            self.wanted.update(((index - 1) % len(self._names), (index + 1) % len(self._names)))

    def used(self, grad: torch.Tensor, func: Any, replaces: bool) -> None:
        """A program is about to do something with a gradient that its hook has seen."""
        index = self._indices.get(id(grad), -1)
        if index < 0 or self.grads[index] is not grad:
            self._indices = {id(seen): k for k, seen in enumerate(self.grads)}
            index = self._indices.get(id(grad), -1)
        if index < 0 or index in self.uses:
            return
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        if name in ("__get__", "__set__"):  # of an attribute, whose name is wanted
            name = getattr(getattr(func, "__self__", func), "__name__", name)
        if replaces or _is_in_place(name):
            self.uses[index] = name, None, []
        else:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                kept = grad if grad.is_sparse else grad.detach()
                self.uses[index] = name, kept, _sums(kept)

    def check(self, params: Sequence[torch.Tensor]) -> list[int]:
        """Compare every gradient with what its hook saw; returns the indices of those that are
        gone.

        Raises ``RuntimeError`` if a gradient was changed or replaced, here or, on a device, in an
        earlier step.
        """
        late = self._device_guard.changed_index()
        if late is not None:
            raise self._touched(late, "changed in place, some steps ago,")
        gone = []
        latest: dict[int, int] | None = None
        tensor, watched = torch.Tensor, self.watched
        for index, (seen, param) in enumerate(zip(self.grads, params, strict=True)):
            if seen is None:
                continue
            if type(seen) is watched:
                seen.__class__ = tensor
            grad = param.grad
            if grad is seen:
                if seen._version != self.versions[index]:
                    if latest is None:
                        latest = self._latest_versions()
                    if seen.is_sparse or seen._version != latest[_memory(seen)]:
                        raise self._touched(index, "changed in place")
            elif grad is None:
                gone.append(index)
            else:
                raise self._touched(index, "replaced")
        self._compare_uses(gone)
        for index, (place, sample) in self._samples.items():
            seen = self.grads[index]
            if seen is None or index in gone:
                continue
            if ctypes.string_at(seen.data_ptr() + place, len(sample)) != sample:
                raise self._touched(index, "changed in place")
        index = self._late_index
        if index >= 0 and index not in gone and (seen := self.grads[index]) is not None:
            self._device_guard.compare(index, seen)
        return gone

    def _latest_versions(self) -> dict[int, int]:
        """What the last hook saw of each memory.

        Gradients of parameters that were concatenated, for example, are parts of one tensor, and
        count their changes together: one that is accumulated after another changes the other's
        count.
        """
        latest: dict[int, int] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for seen, version in zip(self.grads, self.versions, strict=True):
                if seen is not None and not seen.is_sparse:
                    place = _memory(seen)
                    latest[place] = max(version, latest.get(place, version))
        return latest

    def clear(self) -> None:
        """Forget all gradients. The lists stay the same ones."""
        tensor, watched = torch.Tensor, self.watched
        for seen in self.grads:
            if type(seen) is watched:
                seen.__class__ = tensor
        self.grads[:] = self._clean
        self.uses.clear()
        self._samples.clear()
        self._late_index = -1
        self._is_averaged = False
        self._device_guard.end_step()
        self._num_steps += 1
        self._choose()

    def _choose(self) -> None:
        """Have gradients sampled that are spread over all, and so over the groups."""
        count = len(self._names)
        stride = max(1, count // _NUM_SAMPLED)
        self.wanted.clear()
        self.wanted.update(range(self._num_steps % stride, count, stride))

    def _compare_uses(self, gone: Sequence[int]) -> None:
        for index, (name, kept, before) in self.uses.items():
            seen = self.grads[index]
            if seen is None or index in gone:
                continue
            if kept is None:
                raise self._touched(index, f"changed in place, by {name}(),")
            same_memory = seen.is_sparse or seen.data_ptr() == kept.data_ptr()
            now = _sums(kept)
            if not (
                same_memory
                and len(now) == len(before)
                and all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
            ):
                raise self._touched(index, f"changed in place, since a use of {name},")

    def _touched(self, index: int, how: str) -> RuntimeError:
        if self._is_averaged:
            return RuntimeError(
                f"{self._name}: the gradient of {self._names[index]} was {how} behind "
                "clip_grad_norm_(), where the schedule leaves averages in shards that p.grad does "
                "not show. Call optimizer.synchronize() before clip_grad_norm_(), then change "
                "gradients; to forget gradients, call optimizer.zero_grad()"
            )
        return RuntimeError(
            f"{self._name}: the gradient of {self._names[index]} was {how} after backward and "
            "before it was averaged over the ranks. Call optimizer.synchronize() first, then "
            "change gradients, then step inside 'with optimizer.skip_synchronize():'; to forget "
            "gradients, call optimizer.zero_grad()"
        )


def _memory(grad: torch.Tensor) -> int:
    return grad.untyped_storage().data_ptr()


def _watched(value: Any) -> Iterator[Watched]:
    """The watched tensors in an operation's arguments."""
    if isinstance(value, Watched):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _watched(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _watched(inner)


def _is_in_place(name: str) -> bool:
    """Whether an operation of this name changes its tensor, or one of them, in any case."""
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE_OPERATORS
    return name.endswith("_") and name != "requires_grad_"


_IN_PLACE_OPERATORS = frozenset(
    f"__i{op}__"
    for op in (
        "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor",
        "lshift", "rshift",
    )
)  # fmt: skip

_READING_FUNCTIONS = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_cuda", "is_leaf",
                "requires_grad", "grad_fn", "nbytes", "itemsize",
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                "size", "stride", "dim", "numel", "nelement", "element_size", "is_contiguous",
                "storage_offset", "is_floating_point", "is_complex", "norm", "sum", "mean", "abs",
                "max", "min", "isfinite", "isnan", "isinf", "square", "clone", "__len__",
            )
        ),
        torch.norm, torch.linalg.vector_norm, torch._foreach_norm, torch.sum, torch.mean,
        torch.abs, torch.max, torch.min, torch.isfinite, torch.isnan, torch.isinf, torch.square,
        torch.clone, torch.is_floating_point, torch.is_complex,
    ]
)  # fmt: skip
"""Operations after which a gradient is as it was, and which lead to nothing in its memory."""


def _sums(grad: torch.Tensor) -> Sums:
    """Checksums that show any single change: sums along rows and columns of most bytes, and the
    rest as it is.

    (An undetected change needs others against it in the same row and column.)
    """
    if grad.is_sparse:
        return [*_sums(grad._values()), *_sums(grad._indices())]
    if not grad.numel():
        return []
    flat = _in_memory_order(grad)
    wide = flat
    if flat.element_size() < 8 and flat.storage_offset() * flat.element_size() % 8 == 0:
        whole = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
        wide, rest = flat[:whole], flat[whole:]
        wide = wide.view(torch.int64)
    else:
        rest = flat[:0]
        wide = flat.view(_INTEGERS[flat.element_size()])
    rows = wide.numel() // _COLUMNS
    sums = [wide[rows * _COLUMNS :].clone(), rest.clone().view(_INTEGERS[rest.element_size()])]
    if rows:
        table = wide[: rows * _COLUMNS].view(rows, _COLUMNS)
        per_row = table.sum(1, dtype=torch.int64)
        places = torch.arange(1, rows + 1, device=grad.device)
        sums += [table.sum(0, dtype=torch.int64), (per_row * places).sum(), per_row.sum()]
    return sums


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _in_memory_order(grad: torch.Tensor) -> torch.Tensor:
    """All elements as one row; shared, where they fill their memory."""
    if is_dense(grad):
        return torch.as_strided(grad, (grad.numel(),), (1,))
    return grad.contiguous().view(-1)


def _is_elsewhere(grad: torch.Tensor) -> bool:
    """Whether the host would have to wait for a gradient's values."""
    return grad.device.type != "cpu" and not grad.is_sparse and bool(grad.numel())


def _nonzero_sample(grad: torch.Tensor) -> tuple[int, bytes] | None:
    """Some bytes that are not all zero, searched all over a gradient, and their offset; None
    without any."""
    if grad.is_sparse or grad.device.type != "cpu" or not grad.is_contiguous():
        return None
    address, nbytes = grad.data_ptr(), grad.numel() * grad.element_size()
    length = min(_SAMPLE_BYTES, nbytes)
    step = max(length, (nbytes - length) // (_LOOKED_AT - 1)) if nbytes else 1
    for place in range(0, nbytes - length + 1, step) if nbytes else ():
        sampled = ctypes.string_at(address + place, length)
        if any(sampled):
            return place, sampled
    return None
