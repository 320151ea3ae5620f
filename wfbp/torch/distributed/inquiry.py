"""Where the ranks of a group are, once operations differ or one is overdue.

The ranks of the group then tell each other their places. The first of them that has heard enough
composes one text, and the group fails with it on all ranks. (``runtime/progress/stall`` judges
waits of the whole runtime, which end it; a group can be destroyed, and others go on.)
"""

from __future__ import annotations

import time

from wfbp.core.ranks import name_values

_ANSWER_S, _TURN_S = 1.0, 0.5
"""How long ranks wait for each other's places, and then for the ranks before them to judge."""


class Inquiry:
    """The places of ranks, for one operation; overdue by 0 s if operations differ."""

    def __init__(self, rank: int, size: int, number: int, overdue_s: float) -> None:
        self.number, self.overdue_s = number, overdue_s
        self.places: dict[int, str] = {}
        self._rank, self._size = rank, size
        self._since = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is this rank's turn to judge."""
        grace_s = 0.0 if len(self.places) == self._size else _ANSWER_S
        return time.monotonic() - self._since > self._rank * _TURN_S + grace_s

    def verdict(self, group: str) -> str:
        """What happened, where every rank is, and what to do."""
        silent = "does not answer: stopped, killed, or busy"
        places = name_values({rank: self.places.get(rank, silent) for rank in range(self._size)})
        what = f"operation {self.number} of {group}"
        if self.overdue_s:
            return (
                f"{what} timed out after {self.overdue_s:.1f} s ({places}). Every rank of the "
                "group must call it, in time: look for a call that only some ranks make, or raise "
                "the timeout of init_process_group or new_group"
            )
        return (
            f"ranks called different operations as {what} ({places}). Every rank of the group "
            "must call the same operations in the same order with the same element types and "
            "sizes"
        )
