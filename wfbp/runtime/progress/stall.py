"""Notices that a wait lasts too long, and why it may never end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from wfbp.config import Config
from wfbp.errors import PeerError, StallError, WfbpError

log = logging.getLogger("wfbp")

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
