"""Control channels between ranks that come to things in different orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import QUICK, all_well, run_ranks
from tests.support.trainer import Trainer, make_specs
from wfbp.errors import DisagreementError, PeerError
from wfbp.runtime.runtime import Runtime


def side_by_side(*bodies: Callable[[], Any]) -> list[Any]:
    """What each returned on a training thread of its own."""
    found: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            found[number] = bodies[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a training thread hangs"
    return all_well(found)


def test_channels_do_not_wait_for_each_other() -> None:
    """Each rank comes to another one first, and to the second only when the first is over."""

    def body(runtime: Runtime) -> list[list[bytes]]:
        channels = [
            runtime.channel,
            *(runtime.channel_on(runtime.lease(runtime.channel)[0]) for _ in range(2)),
        ]

        def say(number: int) -> list[bytes]:
            time.sleep(0.05 * ((number + runtime.rank) % 3))
            return channels[number].exchange(bytes([number]), f"channel {number}")

        return side_by_side(*(lambda k=k: say(k) for k in range(3)))

    wanted = [[bytes([number])] * 3 for number in range(3)]
    assert all_well(run_ranks(3, body)) == [wanted] * 3


def test_one_holder_after_another_in_rank_0s_order() -> None:
    def body(runtime: Runtime) -> list[str]:
        channels = {name: runtime.channel_on(runtime.lease(runtime.channel)[0]) for name in "abc"}
        begun: list[str] = []
        before = {"a": "b", "c": "a"} if runtime.rank == 0 else {}  # each comes when that has begun

        def act(name: str) -> None:
            while (first := before.get(name, "")) and first not in begun:
                time.sleep(1e-3)
            if runtime.rank:
                time.sleep({"a": 0.05, "b": 0.1, "c": 0.0}[name])
            with runtime.in_turn(channels[name], name):
                begun.append(name)
                # Blocks the turn until all ranks are here.
                runtime.lease(channels[name])
                begun.append(name)

        side_by_side(*(lambda name=name: act(name) for name in channels))
        return begun

    assert all_well(run_ranks(3, body)) == [list("bbaacc")] * 3


def test_a_lock_whose_holder_fails_is_released() -> None:
    def body(runtime: Runtime) -> None:
        for _ in range(2):
            with (
                pytest.raises(DisagreementError),
                runtime.in_turn(runtime.channel, "it"),
            ):
                runtime.channel.exchange(b"", str(runtime.rank))

    all_well(run_ranks(2, body))


@pytest.mark.parametrize("schedule", ["auto", "layerwise"])
def test_engines_side_by_side(schedule: str) -> None:
    """A new plan at every other step; ranks come to their steps' borders in any order."""

    def body(runtime: Runtime) -> None:
        trainers = [
            Trainer(runtime, make_specs([3, 4 + k]), schedule=schedule, name=f"engine {k}")
            for k in range(3)
        ]

        def train(number: int) -> None:
            for step in range(12):
                trainer = trainers[number]
                trainer.zero()
                trainer.accumulate(1, float(step))
                time.sleep(0.002 * ((number + step + runtime.rank) % 3))
                trainer.accumulate(0, float(runtime.rank))
                assert trainer.synchronize() == [1.0, step]

        side_by_side(*(lambda k=k: train(k) for k in range(3)))

    all_well(run_ranks(3, body, QUICK))


@pytest.mark.parametrize(("error", "text"), [(ValueError("bad"), "bad"), (KeyError(), "KeyError")])
@pytest.mark.parametrize("other", ["it", "another"])
def test_an_error_of_one_rank_reaches_the_others(error: Exception, text: str, other: str) -> None:
    """Also one without a text, and if the others have called something else."""

    def body(runtime: Runtime) -> None:
        if runtime.rank == 1:
            with pytest.raises(type(error)), runtime.channel.sharing_errors("it"):
                raise error
            return
        where = "rank 1" if other == "it" else "rank 1 in it, which this rank did not call"
        with pytest.raises(PeerError, match=f"{other}: {where}: {text}"):
            runtime.channel.exchange(b"", other, same=[{"x": 1}])

    all_well(run_ranks(3, body))
