"""Long waits: reports the places of the other ranks, and ends hopeless waits.

After ``WFBP_STALL_WARNING_S`` a rank asks all others for their places and logs the answers. If
these prove a deadlock (:func:`deadlocked`), and are the same when it asks again, it tells all
ranks. Any other wait ends with a :class:`StallError` ``WFBP_TIMEOUT_S`` after its last progress.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from wfbp.config import Config
from wfbp.core.ranks import name_ranks, name_values
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError

log = logging.getLogger("wfbp")

NOTICES = ("where", "here", "deadlock")
"""Kinds of notices that :class:`StallWatch` exchanges."""

_LEFT_GRACE_S = 2.0
_SECOND_LOOK_S = 1.0
_ANSWER_S = 2.0
"""Ranks that have not answered by then are reported as silent."""
_PAUSE_S = 5.0
"""Longest time between two looks that counts as waiting; the job may have been suspended."""
_MOST_QUIET_S = 1.5
"""A check of a wait counts at most this much time, so that after a pause others can go on first."""


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a collective."""

    number: int = 0  # of the process set; 0 for all ranks
    ranks: tuple[int, ...] | None = None  # ascending; None for all

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
class Need:
    """An operation under way, which cannot end before all of some ranks have begun it.

    Args:
        ranks: these ranks; None for all.
        begun: the least numbers of operations that such a rank has begun, by name; one of them
            suffices.
        heard: a rank's numbers are comparable only if it has these.
    """

    ranks: Sequence[int] | None
    begun: Mapping[str, int]
    heard: Mapping[str, int] = field(default_factory=dict)

    def lacks(self, numbers: Mapping[str, int]) -> bool:
        """Whether a rank with these numbers has not begun it."""
        comparable = all(numbers.get(name) == number for name, number in self.heard.items())
        return comparable and all(
            numbers.get(name, 0) < least for name, least in self.begun.items()
        )


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank's place, whether it is blocked, and what it has begun."""

    place: str
    blocked: bool  # its only thread waits
    num_waits: int = 0
    begun: Mapping[str, int] = field(default_factory=dict)  # numbers that never decrease, by name
    needs: Sequence[Need] | None = None  # of all operations under way; None if one is unknown

    @classmethod
    def read(cls, told: dict[str, Any]) -> RankStatus:
        """A status that has travelled as JSON."""
        needs = told.pop("needs")
        return cls(**told, needs=None if needs is None else [Need(**need) for need in needs])


def deadlocked(statuses: Mapping[int, RankStatus]) -> set[int]:
    """The ranks that can never go on, by what ranks have begun at one moment.

    Of everything that such a rank has under way, each operation has to be begun by another such
    rank, whose only thread waits. Bytes under way change nothing about this.
    """
    stuck = {rank for rank, status in statuses.items() if status.blocked and status.needs}
    while True:
        free = {
            rank
            for rank in stuck
            for need in statuses[rank].needs or ()
            if not any(
                need.lacks(statuses[other].begun)
                for other in stuck
                if need.ranks is None or other in need.ranks
            )
        }
        if not free:
            return stuck
        stuck -= free


class StallWatch:
    """Judges the waits of this rank; the progress loop owns and calls it under its lock."""

    def __init__(
        self,
        rank: int,
        size: int,
        config: Config,
        where: str,
        send: Callable[[str, Any, Sequence[int] | None], None],
        activity: Callable[[], int] = lambda: 0,
    ) -> None:
        self._rank = rank
        self._size = size
        self._config = config
        self._where = where
        self._send = send
        self._activity = activity
        self.left: dict[int, str] = {}  # ranks that left, and how; others may still be busy
        self._last: dict[int, RankStatus] = {}  # of those
        self.other_threads = False  # if they may begin collectives, never blocked
        self._now = 0.0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=100)  # from when to when
        self._last_activity = activity()
        self._quiet_s = 0.0
        self.reported = ""  # the current wait, once it is old
        self._warn_at_s = 0.0
        # The last question to the other ranks, their answers, and those to the question before.
        self._question = 0
        self._answers: dict[int, RankStatus] = {}
        self._suspicion: dict[int, RankStatus] = {}
        self._own_place = ""
        self._report_at_s = math.inf  # when to report even if some ranks have not answered
        self._second_look = 0.0

    def note_left(self, rank: int, how: str, last: RankStatus | None = None) -> None:
        """A rank takes part in nothing any more."""
        self._quiet_s = 0.0
        self.left[rank] = how
        if last is not None:
            self._last[rank] = last

    def without_done(self, members: Members, needs: Sequence[Need] | None) -> Members:
        """The members but those that left after they had done their part of all these."""
        done = {
            rank
            for rank, last in self._last.items()
            if needs and last.needs == [] and not any(need.lacks(last.begun) for need in needs)
        }
        if not done:
            return members
        ranks = members.among(range(self._size))
        return Members(members.number, tuple(rank for rank in ranks if rank not in done))

    def check(self, waits: Sequence[Wait], now: float, passed_s: float) -> WfbpError | None:
        """Judge all waits at ``now`` (``time.monotonic``), ``passed_s`` after the loop's last look.

        The loop calls this once a wait is old or a rank has left. Returns the error to end with.
        """
        self._now = now
        if passed_s > _PAUSE_S:
            self._pauses.append((now - passed_s + _PAUSE_S, now))
        activity = self._activity()
        self._quiet_s += min(passed_s, _MOST_QUIET_S)
        if activity != self._last_activity:
            self._last_activity, self._quiet_s = activity, 0.0
        if not waits:
            self.reported = ""
            return None
        for since, what, members in waits if self.left else ():
            left = members.among(self.left)
            if left and min(self._quiet_s, self._waited_s(since)) > _LEFT_GRACE_S:
                who = ", ".join(f"rank {r} {self.left[r]}" for r in left)
                return PeerError(
                    f"{self._where} waits ({what}), but {who}. Every rank must make the same "
                    "calls: none may end earlier, with fewer batches or steps than the others"
                )
        since, what, _ = min(waits, key=lambda wait: wait[:2])
        waited_s = self._waited_s(since)
        if what != self.reported:
            self.reported, self._warn_at_s = what, 0.0
            self._suspicion = {}
        if waited_s > self._config.timeout_s:
            answers = f" {self.answers}" if self.answers else ""
            return StallError(
                f"{self._where} waited {waited_s:.0f} s ({what}); some rank does not take part."
                f"{answers} Look for a call that only some ranks make, and at what the ranks "
                "reported above; WFBP_TIMEOUT_S sets the limit."
            )
        if waited_s > max(self._warn_at_s, self._config.stall_warning_s):
            # Warn again at twice the time: another rank may have begun its wait only now.
            self._warn_at_s = 2 * waited_s
            log.warning("%s has waited %.0f s: %s", self._where, waited_s, what)
            self._suspicion = {}
            self._ask()
            self._report_at_s = now + _ANSWER_S
        elif now > self._report_at_s:
            self._report_places()
        elif self._suspicion and now > self._second_look:
            self._second_look = now + self._config.timeout_s
            self._ask()
        return None

    def handle_notice(
        self, kind: str, sender: int, notice: Any, own: RankStatus
    ) -> DisagreementError | None:
        """Handle another rank's notice, of :data:`NOTICES`; returns the error to end with."""
        if self.other_threads:
            own = replace(own, blocked=False)
        self._own_place = own.place
        if kind == "where":
            self._send("here", {"number": notice, "status": asdict(own)}, [sender])
        elif kind == "deadlock":
            return DisagreementError(f"{self._where}: {notice}")
        elif notice["number"] == self._question:
            self._answers[sender] = RankStatus.read(notice["status"])
            if len(self._answers) == self._size - 1:
                if self._report_at_s < math.inf:
                    self._report_places()
                return self._compare(own)
        return None

    @property
    def answers(self) -> str:
        """Other ranks' places when asked, in sentences; empty if they were not asked."""
        if not self._question:
            return ""
        sentences = []
        if self._answers:
            known = _places(self._answers)
            sentences.append(f"When asked, other ranks were here: {known}.")
        silent = [r for r in range(self._size) if r not in self._answers and r != self._rank]
        if silent:
            sentences.append(
                f"No answer came from {name_ranks(silent)}: stopped, killed, or busy without "
                "letting other threads run."
            )
        return " ".join(sentences)

    def _waited_s(self, since: float) -> float:
        lost_s = sum(max(end - max(begin, since), 0.0) for begin, end in self._pauses)
        return self._now - since - lost_s

    def _ask(self) -> None:
        self._question += 1
        self._answers = {}
        self._send("where", self._question, None)

    def _report_places(self) -> None:
        """Warn where the other ranks are; of ranks that wait in one place, the first does so."""
        self._report_at_s = math.inf
        before = [s.place for rank, s in self._answers.items() if rank < self._rank]
        if self._own_place not in before:
            log.warning("%s: %s", self._where, self.answers)

    def _compare(self, own: RankStatus) -> DisagreementError | None:
        """All have answered: judge whether ranks wait for each other."""
        statuses = {rank: self._answers.get(rank, own) for rank in range(self._size)}
        stuck = {rank: statuses[rank] for rank in deadlocked(statuses)}
        before, self._suspicion = self._suspicion, {}
        if not before:
            # Answers are of different moments. If they stay the same, all hold at one in between.
            self._suspicion = stuck
            self._second_look = self._now + min(_SECOND_LOOK_S, self._config.stall_warning_s)
            return None
        if not stuck or stuck != before:
            return None
        text = (
            f"ranks wait for each other in different places: {_places(statuses)}. "
            "Every rank must make the same calls in the "
            "same order: look for one that only some ranks make, such as under `if rank() == 0`, "
            "or with fewer batches"
        )
        self._send("deadlock", text, None)
        return DisagreementError(f"{self._where}: {text}")


def _places(statuses: Mapping[int, RankStatus]) -> str:
    """Places of ranks for messages, such as 'ranks 0, 2: SGD; rank 1: in barrier'."""
    return name_values({rank: status.place for rank, status in statuses.items()})
