"""Options of gradient reduction and their checks; the same on one rank as on many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from numbers import Integral

from wfbp.core.planners import check_schedule
from wfbp.core.types import (
    AUTO_WIRES,
    CODECS,
    COMPRESSIONS,
    WIRE_DTYPES,
    Op,
    TensorSpec,
    may_encode,
    wire_type,
)

GUARDS = ("warn", "fallback", "off")
WIRES = (*WIRE_DTYPES, *CODECS, *AUTO_WIRES)

FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """Settings of a reducer, equal on every rank."""

    schedule: str  # a planner's name, or ``auto``
    threshold_bytes: int  # for the ``threshold`` planner, and for others' first plan
    op: Op = Op.AVERAGE
    passes: int = 1  # backward passes per step; a tensor is ready after so many gradients
    decouples: bool = False  # whether each rank may update its shards, and ``Gathers`` sends them
    name: str = "optimizer"  # for messages
    wire: str = ""  # of WIRES, how gradients are sent; empty for their own type
    wires: tuple[tuple[str, str], ...] = ()  # exceptions: a tensor's name, and how it is sent
    guard: str = "warn"  # of GUARDS: what to do if encoding loses too much

    @property
    def choices(self) -> tuple[str, ...]:
        """The wires of plans that may be tried, the most precise first."""
        wires = (self.wire, *dict(self.wires).values())
        return max((AUTO_WIRES.get(wire, ("",)) for wire in wires), key=len)

    def wire_of(self, spec: TensorSpec, num_ranks: int, chosen: str) -> str:
        """How a tensor's gradients are sent between so many ranks by a plan that has ``chosen`` one
        of :attr:`choices`: as one of WIRE_DTYPES or CODECS, or empty."""
        wire = _by_name(self.wires).get(spec.name, self.wire)
        if wire in AUTO_WIRES:
            admitted = AUTO_WIRES[wire]
            wire = chosen if chosen in admitted else admitted[-1]
        if wire in CODECS:
            return wire if spec.encodable(num_ranks) else ""
        return wire if wire and wire_type(spec.real_dtype, wire) != spec.real_dtype else ""

    def sent_bytes(
        self, specs: Iterable[TensorSpec], num_ranks: int, chosen: str
    ) -> tuple[int, dict[str, int]]:
        """Bytes of these tensors as they are sent, and by codec, before that, of the encoded."""
        sent = [(spec, self.wire_of(spec, num_ranks, chosen)) for spec in specs]
        encoded = Counter[str]()
        for spec, wire in sent:
            if wire in CODECS:
                encoded[wire] += spec.nbytes
        return sum(spec.wire_bytes(wire) for spec, wire in sent), encoded

    def without_codecs(self) -> ReducerOptions:
        """The same, but nothing is encoded: no message leaves the host."""
        return self._without_codecs("")

    def in_16_bits(self) -> ReducerOptions:
        """The same, but what would be encoded is sent as bfloat16."""
        return self._without_codecs("bfloat16")

    def _without_codecs(self, instead: str) -> ReducerOptions:
        def other(wire: str) -> str:
            if not may_encode(wire):
                return wire
            return "auto:bfloat16" if wire in AUTO_WIRES else instead

        wires = tuple((name, other(wire)) for name, wire in self.wires)
        return replace(self, wire=other(self.wire), wires=wires)

    def check(self, specs: Sequence[TensorSpec], user: str = "") -> None:
        """Raise unless these tensors' gradients can be reduced; ``user`` is for messages."""
        check_schedule(self.schedule, self.decouples, user)
        _check_whole("threshold_bytes", self.threshold_bytes)
        _check_whole("backward_passes_per_step", self.passes)
        if self.threshold_bytes < 1:
            raise ValueError(f"threshold_bytes is {self.threshold_bytes}; expected at least 1")
        if self.op not in (Op.AVERAGE, Op.SUM):
            raise ValueError(
                f"op is {self.op}; gradients can be combined by {Op.AVERAGE} or {Op.SUM}"
            )
        for wire in {self.wire, *dict(self.wires).values()} - {""}:
            if wire not in WIRES:
                raise ValueError(f"wire is {wire!r}; expected one of {', '.join(WIRES)}")
        if self.guard not in GUARDS:
            known = ", ".join(map(repr, GUARDS))
            raise ValueError(f"compression_guard is {self.guard!r}; expected one of {known}")
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step is {self.passes}; expected at least 1")
        if not specs:
            raise ValueError("there are no tensors to reduce")
        twice = [name for name, times in Counter(s.name for s in specs).items() if times > 1]
        if twice:
            raise ValueError(f"tensor names must be unique; found twice: {', '.join(twice)}")
        for spec in specs:
            if spec.dtype not in FLOATING:
                raise ValueError(f"{spec.name} is {spec.dtype}; expected one of {FLOATING}")


@lru_cache
def _by_name(wires: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return dict(wires)


Compression = str | Mapping[str, str]
"""One of ``core.types.COMPRESSIONS``, or rules: these by patterns of tensors' names."""


def wires_of(
    compression: object,
    names: Sequence[str],
    exempt: Collection[str] = (),
    known: Sequence[str] = (),
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """How gradients of these names are sent, as ``ReducerOptions.wire`` and ``wires``.

    Of rules the first whose pattern matches counts; without one for ``*`` the rest are sent as
    they are. ``names`` are empty while they are unknown. ``exempt`` tensors are only encoded if
    another pattern than ``*`` names them. ``known`` are further names that rules may be for.
    """
    given = compression if isinstance(compression, Mapping) else {"*": compression}
    rules = {str(pattern): _wire_of(value) for pattern, value in given.items()}
    for pattern in rules:
        if names and pattern != "*" and not any(_matches(name, pattern) for name in known or names):
            raise ValueError(
                f"compression has a rule for {pattern!r}, which matches no name; there are "
                f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
            )
    rest = rules.get("*", "")
    exceptions = []
    for name in names:
        pattern = next((p for p in rules if _matches(name, p)), "*")
        if pattern != "*":
            exceptions.append((name, rules[pattern]))
        elif name in exempt and may_encode(rest):
            exceptions.append((name, ""))
    return rest, tuple(exceptions)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)  # JAX's names have brackets


def _wire_of(value: object) -> str:
    if not isinstance(value, str) or value not in COMPRESSIONS:
        known = ", ".join(map(repr, COMPRESSIONS))
        shown = getattr(value, "__name__", None) or repr(value)
        raise ValueError(
            f"compression is {shown}; expected one of {known}, or a mapping from patterns of names "
            "to these: gradients are encoded while they are packed, so no other compressor is "
            "called"
        )
    return COMPRESSIONS[value]


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; expected a whole number")
