"""Where ranks are, and whether they wait for each other in a circle.

A collective ends when every rank has begun it. Calls follow one another on one backend, so their
count tells which ranks have come to one; a lane's collectives follow its plan, and are counted,
too; named operations are known by their names. A rank *needs* another where it waits for a
collective that the other has not begun and, being in a wait itself, will not begin before that is
over. Ranks that need one another in a circle never go on; whoever is only slow is in no circle,
because it does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_MAX_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """How far a lane has come.

    Args:
        number: of the lane, the same on every rank.
        started: collectives begun.
        completed: collectives done; they end in their order, as far as the lane takes note.
        dry: whether it begins nothing more before its training thread has done something.
    """

    number: int
    started: int
    completed: int
    dry: bool


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank is.

    Args:
        text: for people.
        waits: whether all that could begin a collective here is in a wait.
        num_waits: waits begun so far; two equal places with equal counts are one wait.
        calls: begun so far.
        call: label of the one under way, if any; labels are the same on every rank.
        lanes: of all engines.
        awaits: the named operation that its training thread waits for, if any.
        submitted: named operations that are pending here.
        outside: process sets that this rank is not in.
    """

    text: str
    waits: bool
    num_waits: int
    calls: int
    call: str
    lanes: tuple[LaneStatus, ...] = ()
    awaits: str = ""
    submitted: tuple[str, ...] = ()
    outside: tuple[int, ...] = ()

    def needs(self, other: RankStatus) -> bool:
        """Whether this rank waits for what the other has not begun, and cannot by itself."""
        if self.call:
            behind = other.calls < self.calls
            return behind or (other.calls == self.calls and other.call not in ("", self.call))
        if self.awaits:
            members = self.awaits.partition(":")[0]
            joined = f"{members}:join" in other.submitted
            return not (self.awaits in other.submitted or joined or int(members) in other.outside)
        # Which of its lanes it waits for is not known here: each of them must need the other.
        theirs = {lane.number: lane for lane in other.lanes}
        under_way = [lane for lane in self.lanes if lane.started > lane.completed]
        return bool(under_way) and all(
            (their_lane := theirs.get(lane.number)) is not None
            and their_lane.dry
            and their_lane.started <= lane.completed
            for lane in under_way
        )

    def encode(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def decode(cls, encoded: dict[str, Any]) -> RankStatus:
        """What :meth:`encode` gave, after a journey as JSON."""
        lanes = tuple(LaneStatus(**lane) for lane in encoded["lanes"])
        submitted, outside = tuple(encoded["submitted"]), tuple(encoded["outside"])
        return cls(**{**encoded, "lanes": lanes, "submitted": submitted, "outside": outside})


def find_deadlock(places: Sequence[RankStatus]) -> list[int]:
    """The ranks that can never go on, because they need one another in a circle.

    Args:
        places: of all ranks, at one time.

    Returns:
        Those in a circle and those that need one of these; none while any rank does not wait.

    Example:
        >>> barrier = Place("in barrier", True, 3, 2, "barrier")
        >>> step = Place("SGD", True, 3, 1, "", (LanePlace(0, 5, 4, False),))
        >>> entangled([step, barrier])
        []
    """
    if not all(place.waits for place in places):
        return []
    left = list(range(len(places)))
    while True:
        kept = [r for r in left if any(places[r].needs(places[s]) for s in left if s != r)]
        if len(kept) == len(left):
            return kept
        left = kept


def describe_statuses(places: Sequence[RankStatus], ranks: Sequence[int]) -> str:
    """Where some ranks are, those in the same place together."""
    holders: dict[str, list[str]] = {}
    for rank in ranks:
        holders.setdefault(places[rank].text, []).append(str(rank))
    parts = [
        f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {text}" for text, who in holders.items()
    ]
    more = [f"and {len(parts) - _MAX_SHOWN} more places"] if len(parts) > _MAX_SHOWN else []
    return "; ".join(parts[:_MAX_SHOWN] + more)
