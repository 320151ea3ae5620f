"""Ranks and counts as messages show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MOST_RANKS = 16
_MOST_VALUES = 4


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
