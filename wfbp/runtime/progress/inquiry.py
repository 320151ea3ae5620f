"""Asks where the other ranks are when a wait lasts, and ends one that can never be over.

A rank that has waited for long asks all others, reports their answers, and where these show ranks
that wait for each other in different places, asks once more. Every first answer was given before
the second question, every second one after it: where none has changed, all were true at once. Then
nothing can move any of these ranks any more, and the asker tells all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wfbp.errors import DisagreementError
from wfbp.runtime.progress.places import RankStatus, describe_statuses, find_deadlock

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
