"""Messages under way in a process group: which of them a look tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wfbp.torch.distributed.group_lane import GroupLane


class Sent:
    """A message with one request, which is its number."""

    def __init__(self, number: int) -> None:
        self.requests, self.ended = [number], False

    def advance(self) -> bool:
        return self.ended


@pytest.mark.parametrize("blocked", [0, 40])
def test_a_look_finds_what_mpi_has_ended_however_many_messages_wait(blocked: int) -> None:
    """MPI ends one request per test, in their order; others may wait for long."""
    messages = [Sent(number) for number in range(1000)]
    waiting, most = messages[blocked:], 0

    def test(requests: list[int]) -> bool:
        nonlocal most
        most = max(most, len(requests))
        if waiting[0].requests[0] not in requests:
            return False
        waiting.pop(0).ended = True
        return True

    lane: Any = SimpleNamespace(
        _messages=list(messages), _turn=0, _exchange=SimpleNamespace(test=test)
    )
    looks = 0
    while waiting:
        GroupLane._advance_messages(lane)
        looks += 1
        assert looks < 100_000
    assert lane._messages == messages[:blocked]
    assert most <= 64
    if not blocked:
        assert looks == len(messages)  # none in vain, after which the loop would nap
