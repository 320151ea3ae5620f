"""Waits that last: where the other ranks are, and whether ranks wait for each other.

A collective ends when every rank has begun it. Calls follow one another on one backend, so their
count tells which ranks have come to one; a lane's collectives follow its plan, and are counted,
too. A rank *needs* another where it waits for a collective that the other has not begun and, being
in a wait itself, will not begin before that is over. Ranks that need one another in a circle never
go on; a rank that is only slow is in no circle, because it does not wait.

A rank that has waited for long asks all others, reports their answers, and where these show a
circle, asks once more. Every first answer was given before the second question, every second one
after it: where none has changed, all were true at once. Then nothing can move any of these ranks
any more, and the asker tells all. :class:`StallWatch` judges every other wait by its length.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from wfbp.config import Config
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError

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


log = logging.getLogger("wfbp")


class DeadlockDetector:
    """One rank's questions and answers. For turns.

    Args:
        rank: of this process.
        size: number of ranks.
        where: who this is, for messages ("rank 1 of 4").
        place: where this rank is.
        send: sends a notice to all other ranks.

    Attributes:
        other_threads: whether anything may be begun on threads that have not communicated before.
            Whether this rank can go on by itself is then not known, and it is never judged.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        where: str,
        place: Callable[[], RankStatus],
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._where = where
        self._own_status = place
        self._send = send
        self.other_threads = False
        self._number = 0
        self._again = False
        self._answers: dict[int, RankStatus] = {}
        self._before: list[RankStatus] = []

    def ask(self) -> None:
        """Ask, because a wait lasts; an earlier question is dropped."""
        self._ask(again=False)

    def handle_notice(self, sender: int, notice: dict[str, Any]) -> DisagreementError | None:
        """A question, an answer or a verdict of another rank.

        Returns:
            What this rank has to end with, if all is known.
        """
        if notice["kind"] == "where":
            answer = {"kind": "here", "to": sender, "number": notice["number"]}
            self._send({**answer, "place": self._here().encode()})
        elif notice["kind"] == "entangled":
            return DisagreementError(f"{self._where}: {notice['text']}")
        elif notice["to"] == self._rank and notice["number"] == self._number:
            return self._note(sender, RankStatus.decode(notice["place"]))
        return None

    @property
    def answers(self) -> str:
        """Where the others were when they were asked, in sentences; empty if they were not."""
        if not self._number:
            return ""
        sentences = []
        if self._answers:
            places = [self._answers.get(rank) or self._here() for rank in range(self._size)]
            known = describe_statuses(places, sorted(self._answers))
            sentences.append(f"When they were asked, others were here: {known}.")
        silent = [str(r) for r in range(self._size) if r not in self._answers and r != self._rank]
        if silent:
            sentences.append(
                f"No answer came from rank{'s' * (len(silent) > 1)} {', '.join(silent)}: stopped, "
                "killed, or busy without letting other threads run."
            )
        return " ".join(sentences)

    def _here(self) -> RankStatus:
        place = self._own_status()
        return replace(place, waits=False) if self.other_threads else place

    def _ask(self, again: bool) -> None:
        self._number += 1
        self._again = again
        self._answers = {}
        self._send({"kind": "where", "number": self._number})

    def _note(self, sender: int, place: RankStatus) -> DisagreementError | None:
        self._answers[sender] = place
        if not self._again:
            log.warning("%s hears from rank %d: %s", self._where, sender, place.text)
        if len(self._answers) < self._size - 1:
            return None
        places = [self._answers.get(rank) or self._here() for rank in range(self._size)]
        ranks = find_deadlock(places)
        if not ranks:
            return None
        if not self._again:
            self._before = places
            self._ask(again=True)
            return None
        if places != self._before:
            return None
        text = (
            f"ranks wait for each other in different places: {describe_statuses(places, ranks)}. "
            "Every rank "
            "must make the same calls in the same order: look for one that only some ranks make, "
            "such as under `if rank() == 0`, or with fewer batches"
        )
        self._send({"kind": "entangled", "text": text})
        return DisagreementError(f"{self._where}: {text}")


_LEFT_GRACE_S = 2.0


class StallWatch:
    """Judges what a rank waits for. For the communication thread.

    Args:
        config: after how long to warn and to give up.
        where: who this is, for messages ("rank 1 of 4").
        activity: a number that changes whenever anything moved on (``Backend.activity``): who
            has left may have done its part, and the others be in the middle of theirs.
    """

    def __init__(self, config: Config, where: str, activity: Callable[[], int] = lambda: 0) -> None:
        self._config = config
        self._where = where
        self._next_s: dict[str, float] = {}
        self._activity = activity
        self._seen = activity()
        self._quiet_since = 0.0
        self.gone: dict[int, str] = {}
        self.on_stall: Callable[[], None] = lambda: None
        self.answers: Callable[[], str] = lambda: ""
        """What the other ranks said when they were asked, in sentences."""

    def note_gone(self, rank: int, how: str) -> None:
        """A rank will take part in nothing any more."""
        self._quiet_since = time.monotonic()
        self.gone[rank] = how

    def check(self, waits: Sequence[tuple[float, str]], now: float) -> WfbpError | None:
        """Look at what is waited for.

        Args:
            waits: since when, and for what.
            now: ``time.monotonic``.

        Returns:
            The error to end with, if the wait is hopeless or too long.
        """
        activity = self._activity()
        if activity != self._seen:
            self._seen = activity
            self._quiet_since = now
        if not waits:
            self._next_s.clear()
            return None
        since, what = min(waits)
        waited = now - since
        if self.gone and min(waited, now - self._quiet_since) > _LEFT_GRACE_S:
            left = ", ".join(f"rank {r} {how}" for r, how in sorted(self.gone.items()))
            return PeerError(
                f"{self._where} waits ({what}), but {left}. Every rank must make the same calls: "
                "let none end earlier, with fewer batches or steps than the others"
            )
        if waited > self._config.timeout_s:
            answers = self.answers()
            asked = f" {answers}" if answers else ""
            return StallError(
                f"{self._where} waited {waited:.0f} s ({what}); some rank does not take part."
                f"{asked} Look for a call that only some ranks make, and at what the ranks "
                "reported above; WFBP_TIMEOUT_S sets the limit."
            )
        if waited > self._next_s.get(what, self._config.stall_warning_s):
            # Again and again, ever more seldom: another rank may have come to its wait only now.
            self._next_s[what] = 2 * waited
            log.warning("%s has waited %.0f s: %s", self._where, waited, what)
            self.on_stall()
        return None
