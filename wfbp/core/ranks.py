"""Ranks, counts and differences between ranks, as messages show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

_MOST_RANKS = 16
_MOST_VALUES = 4
_MOST_DIFFERENCES = 5


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()

Sections = Sequence[Mapping[str, object]]
"""Values that must be equal on all ranks, by name: causes first, then what follows from them."""


def counted(number: int, noun: str) -> str:
    """A number and its noun, for one or for several.

    >>> counted(1, "group"), counted(2048, "worker")
    ('1 group', '2,048 workers')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Some ranks, of many only the first.

    >>> name_ranks([1]), name_ranks([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def name_values(values: Mapping[int, object]) -> str:
    """Each value after the ranks that have it, of many values only the first.

    >>> name_values({0: "SGD", 1: "Adam", 2: "SGD"})
    'ranks 0, 2: SGD; rank 1: Adam'
    """
    holders: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        holders.setdefault(value, []).append(rank)
    parts = [f"{name_ranks(ranks)}: {value}" for value, ranks in holders.items()]
    more = [f"and {len(parts) - _MOST_VALUES} more"] if len(parts) > _MOST_VALUES else []
    return "; ".join(parts[:_MOST_VALUES] + more)


def differences(by_rank: Mapping[int, Sections]) -> str:
    """The values that differ, in the first section with a difference; empty if none differs.

    >>> differences({0: [{"op": "sum", "root": 0}], 1: [{"op": "max", "root": 0}]})
    'op (rank 0: sum; rank 1: max)'
    """
    for sections in zip(*by_rank.values(), strict=False):
        shown = []
        for name in dict.fromkeys(chain.from_iterable(sections)):
            values = [section.get(name, _MISSING) for section in sections]
            # As text, because NaN then equals NaN. But "1" is not 1.
            if len({(isinstance(value, str), str(value)) for value in values}) > 1:
                texts = list(map(str, values))
                if len(set(texts)) == 1:
                    texts = list(map(repr, values))
                by_value = name_values(dict(zip(by_rank, texts, strict=True)))
                shown.append(f"{name} ({by_value})")
        if shown:
            more = len(shown) - _MOST_DIFFERENCES
            return ", ".join(shown[:_MOST_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")
        for number, names in enumerate(zip(*sections, strict=True), 1):
            if len(set(names)) > 1:
                by_value = name_values(dict(zip(by_rank, names, strict=True)))
                return f"the order, from number {number} on ({by_value})"
    return ""
