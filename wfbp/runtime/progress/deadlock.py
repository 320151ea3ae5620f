"""Long waits: where the other ranks are, and whether ranks wait for each other.

A collective ends when every rank has begun it. Calls follow one another on one backend, so their
count tells which ranks have begun one; a lane's collectives follow its plan, and are counted, too.
A rank *needs* another where it waits for a collective that the other has not begun and, being in a
wait itself, will not begin before that is over. Ranks that need one another in a circle are in a
deadlock; a rank that is only slow is in no circle, because it does not wait.

A rank that has waited for long asks all others, reports their answers, and where these show a
circle, asks once more. Every first answer was given before the second question, every second one
after it: answers that have not changed were all true at the same time. Then none of these ranks can
go on, and the asking rank tells all. Every other wait is judged by its length.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from wfbp.config import Config
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError

_MAX_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that take part in a collective.

    Args:
        number: of their process set, the same on every rank; 0 for all ranks.
        ranks: ascending; None for all.
    """

    number: int = 0
    ranks: tuple[int, ...] | None = None

    def root(self, root_rank: int) -> int:
        """The root's number among the members; ``ValueError`` if it is none of them."""
        if self.ranks is None:
            return root_rank
        if root_rank not in self.ranks:
            shown = ", ".join(map(str, self.ranks))
            raise ValueError(f"root_rank is {root_rank}; expected one of the ranks {shown}")
        return self.ranks.index(root_rank)

    def among(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that are members, ascending."""
        return sorted(r for r in ranks if self.ranks is None or r in self.ranks)


ALL_RANKS = Members()

Wait = tuple[float, str, Members]
"""Since when (``time.monotonic``), for what, and with whom."""


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """How far a lane has come.

    Args:
        number: of the lane, the same on every rank.
        started: collectives begun.
        completed: collectives done; they end in order, as the lane counts them.
        dry: whether nothing is under way or queued: the lane starts no collective until its
            training thread acts.
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
        waits: whether every thread that could begin a collective here is in a wait.
        num_waits: waits begun so far; two equal statuses with equal counts are one wait.
        calls: begun so far among all ranks.
        call: label of the one under way, if any; labels are the same on every rank.
        lanes: of all engines.
        awaits: the named operation that its training thread waits for, if any.
        submitted: named operations that are pending here.
        outside: process sets that this rank is not in.
        call_set: process set of the call under way.
        set_calls: calls begun so far in process sets, as pairs of its number and their count.
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
    call_set: int = 0
    set_calls: tuple[tuple[int, int], ...] = ()

    def calls_in(self, process_set: int) -> int:
        """Calls begun so far in a process set."""
        return dict(self.set_calls).get(process_set, 0) if process_set else self.calls

    def needs(self, other: RankStatus) -> bool:
        """Whether this rank waits for what the other has not begun, and cannot by itself."""
        if self.call:
            if self.call_set in other.outside:
                return False
            begun, reached = self.calls_in(self.call_set), other.calls_in(self.call_set)
            elsewhere = other.call_set == self.call_set and other.call not in ("", self.call)
            return reached < begun or (reached == begun and elsewhere)
        if self.awaits:
            members = self.awaits.partition(":")[0]
            joined = f"{members}:" in other.submitted  # a join has no name
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
        return cls(
            **{
                **encoded,
                "lanes": lanes,
                "submitted": tuple(encoded["submitted"]),
                "outside": tuple(encoded["outside"]),
                "set_calls": tuple((number, calls) for number, calls in encoded["set_calls"]),
            }
        )


def find_deadlock(statuses: Sequence[RankStatus]) -> list[int]:
    """The ranks that can never go on: those that need one another in a circle, and those that need
    one of these. None while any rank does not wait.

    ``statuses`` are of all ranks, at one time.

    Example:
        >>> barrier = RankStatus("in barrier", True, 3, 2, "barrier")
        >>> step = RankStatus("SGD", True, 3, 1, "", (LaneStatus(0, 5, 4, False),))
        >>> find_deadlock([step, barrier])
        []
    """
    if not all(status.waits for status in statuses):
        return []
    left = list(range(len(statuses)))
    while True:
        kept = [r for r in left if any(statuses[r].needs(statuses[s]) for s in left if s != r)]
        if len(kept) == len(left):
            return kept
        left = kept


def describe_statuses(statuses: Mapping[int, RankStatus]) -> str:
    """Where ranks are, those in the same place together."""
    holders: dict[str, list[str]] = {}
    for rank, status in sorted(statuses.items()):
        holders.setdefault(status.text, []).append(str(rank))
    parts = [
        f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {text}" for text, who in holders.items()
    ]
    more = [f"and {len(parts) - _MAX_SHOWN} more places"] if len(parts) > _MAX_SHOWN else []
    return "; ".join(parts[:_MAX_SHOWN] + more)


log = logging.getLogger("wfbp")

_LEFT_GRACE_S = 2.0
_PAUSE_S = 5.0
"""There are many looks a second: if so long passes between two, this process did not run."""
_MOST_PAUSES = 3
"""Of one wait: where looks are always so rare, something else keeps the process from looking."""
_SAME_WAIT_S = 1.0
"""Waits that began so close together are one: of some, only the length is known."""


class DeadlockDetector:
    """Judges waits of this rank: by their length, by ranks that have left, and by circles of waits.

    Owned by the progress loop, and called under its lock. ``send`` sends a notice to all other
    ranks; ``activity`` changes whenever anything moves on (``Backend.activity``): a rank that has
    left may have done its part, and the others are still busy with theirs.

    Attributes:
        gone: ranks that have left, and how.
        other_threads: whether threads that have not communicated yet may begin a collective; this
            rank is then never found to be in a deadlock.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        config: Config,
        where: str,
        send: Callable[[dict[str, Any]], None],
        activity: Callable[[], int] = lambda: 0,
    ) -> None:
        self._rank = rank
        self._size = size
        self._config = config
        self._where = where
        self._send = send
        self._activity = activity
        self.gone: dict[int, str] = {}
        self.other_threads = False
        # How long things have been waited for.
        self._next_warning_s: dict[str, float] = {}
        self._last_activity = activity()
        self._quiet_since = 0.0
        # When this process last looked, and when it last went on after a pause.
        self._looked_s: float | None = None
        self._resumed_s = 0.0
        self._paused_wait_s = 0.0  # when the wait began in which it paused
        self._num_pauses = 0
        # The last question to the other ranks, and their answers.
        self._question = 0
        self._is_second = False
        self._answers: dict[int, RankStatus] = {}
        self._first_statuses: list[RankStatus] = []

    def note_gone(self, rank: int, how: str) -> None:
        """A rank takes part in nothing any more."""
        self._quiet_since = time.monotonic()
        self.gone[rank] = how

    def check(self, waits: Sequence[Wait], now: float) -> WfbpError | None:
        """Judge all waits of this rank at ``now`` (``time.monotonic``): warn and ask the other
        ranks if they last.

        Returns the error to end with, if a wait is hopeless or too long.
        """
        if self._looked_s is not None and now - self._looked_s > _PAUSE_S:
            # As in a job that was suspended: the others have yet to go on.
            self._note_pause(min((since for since, *_ in waits), default=now), now)
        self._looked_s = now
        activity = self._activity()
        if activity != self._last_activity:
            self._last_activity = activity
            self._quiet_since = now
        if not waits:
            self._next_warning_s.clear()
            return None
        waits = sorted(waits, key=lambda wait: wait[:2])
        if self.gone and now - self._quiet_since > _LEFT_GRACE_S:
            for since, what, members in waits:
                gone = members.among(self.gone)
                if gone and now - since > _LEFT_GRACE_S:
                    left = ", ".join(f"rank {r} {self.gone[r]}" for r in gone)
                    return PeerError(
                        f"{self._where} waits ({what}), but {left}. Every rank must make the same "
                        "calls: let none end earlier, with fewer batches or steps than the others"
                    )
        since, what, _ = waits[0]
        waited = now - max(since, self._resumed_s)
        if waited > self._config.timeout_s:
            answers = f" {self.answers}" if self.answers else ""
            return StallError(
                f"{self._where} waited {waited:.0f} s ({what}); some rank does not take part."
                f"{answers} Look for a call that only some ranks make, and at what the ranks "
                "reported above; WFBP_TIMEOUT_S sets the limit."
            )
        if waited > self._next_warning_s.get(what, self._config.stall_warning_s):
            # Again and again, ever more seldom: another rank may have come to its wait only now.
            self._next_warning_s[what] = 2 * waited
            log.warning("%s has waited %.0f s: %s", self._where, waited, what)
            self._ask(second=False)
        return None

    def _note_pause(self, wait_s: float, now: float) -> None:
        """This process goes on after a pause; ``wait_s`` is when its oldest wait began."""
        if abs(wait_s - self._paused_wait_s) > _SAME_WAIT_S:
            self._paused_wait_s, self._num_pauses = wait_s, 0
        self._num_pauses += 1
        if self._num_pauses <= _MOST_PAUSES:
            self._resumed_s = self._quiet_since = now

    def handle_notice(
        self, sender: int, notice: dict[str, Any], own: RankStatus
    ) -> DisagreementError | None:
        """A question, an answer or a verdict of another rank, of a kind in :data:`NOTICES`.

        ``own`` is this rank's status now. Returns the error to end with, if a deadlock is certain.
        """
        if self.other_threads:
            own = replace(own, waits=False)
        if notice["kind"] == "where":
            answer = {"kind": "here", "to": sender, "number": notice["number"]}
            self._send({**answer, "status": own.encode()})
        elif notice["kind"] == "deadlock":
            return DisagreementError(f"{self._where}: {notice['text']}")
        elif notice["to"] == self._rank and notice["number"] == self._question:
            return self._note_answer(sender, RankStatus.decode(notice["status"]), own)
        return None

    @property
    def answers(self) -> str:
        """Where the others were when they were asked, in sentences; empty if they were not."""
        if not self._question:
            return ""
        sentences = []
        if self._answers:
            known = describe_statuses(self._answers)
            sentences.append(f"When they were asked, others were here: {known}.")
        silent = [str(r) for r in range(self._size) if r not in self._answers and r != self._rank]
        if silent:
            sentences.append(
                f"No answer came from rank{'s' * (len(silent) > 1)} {', '.join(silent)}: stopped, "
                "killed, or busy without letting other threads run."
            )
        return " ".join(sentences)

    def _ask(self, second: bool) -> None:
        """Ask all ranks where they are; an earlier question is dropped."""
        self._question += 1
        self._is_second = second
        self._answers = {}
        self._send({"kind": "where", "number": self._question})

    def _note_answer(
        self, sender: int, status: RankStatus, own: RankStatus
    ) -> DisagreementError | None:
        self._answers[sender] = status
        if not self._is_second:
            log.warning("%s hears from rank %d: %s", self._where, sender, status.text)
        if len(self._answers) < self._size - 1:
            return None
        statuses = [self._answers.get(rank, own) for rank in range(self._size)]
        ranks = find_deadlock(statuses)
        if not ranks:
            return None
        if not self._is_second:
            self._first_statuses = statuses
            self._ask(second=True)
            return None
        if statuses != self._first_statuses:
            return None
        text = (
            "ranks wait for each other in different places: "
            f"{describe_statuses({rank: statuses[rank] for rank in ranks})}. Every rank must make "
            "the same calls in the same order: look for one that only some ranks make, such as "
            "under `if rank() == 0`, or with fewer batches"
        )
        self._send({"kind": "deadlock", "text": text})
        return DisagreementError(f"{self._where}: {text}")


NOTICES = ("where", "here", "deadlock")
"""Kinds of notices that detectors exchange."""
