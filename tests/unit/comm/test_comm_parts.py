"""The small pure parts below the backends: chunks, buffers, arithmetic, the channel's order."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.checks import contribution, expected
from tests.support.host_ranks import group, plain_channel
from wfbp.comm.arrays import combine, split
from wfbp.comm.mpi.transfers import (
    NUM_TAGS,
    Channel,
    Chunking,
    MpiWork,
    Pace,
    Task,
    Watch,
    chunks,
)
from wfbp.core.types import ITEM_BYTES, Op
from wfbp.errors import BackendError


@given(st.integers(0, 10**7), st.integers(1, 64))
def test_split_covers_evenly(total: int, parts: int) -> None:
    ranges = split(total, parts)
    assert len(ranges) == parts
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    lengths = [end - start for start, end in ranges]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8]), st.integers(64, 10**5))
def test_chunks_fit(numel: int, item_bytes: int, chunk_bytes: int) -> None:
    ranges = chunks(numel, item_bytes, chunk_bytes)
    # Equal elements per chunk may round up to one element beyond the limit.
    assert all((b - a) * item_bytes < chunk_bytes + item_bytes for a, b in ranges)
    assert ranges[-1][1] == numel


@given(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.sampled_from(Op),
    st.integers(1, 5),
    st.integers(0, 40),
    st.integers(0, 4),
)
def test_combine_is_in_rank_order_wherever_the_result_goes(
    dtype: str, op: Op, num_ranks: int, numel: int, place: int
) -> None:
    parts = [contribution(rank, numel, dtype) for rank in range(num_ranks)]
    want = expected(parts, dtype, op)
    for target in (place % num_ranks, None):
        shards = [part.copy() for part in parts]
        out = np.zeros_like(parts[0]) if target is None else shards[target]
        combine(shards, out, dtype, op)
        np.testing.assert_array_equal(out, want)
        if target is None:
            assert all((s == p).all() for s, p in zip(shards, parts, strict=True))


class Recorded(Task):
    """A task that is complete when told to, and writes down when it starts."""

    def __init__(self, name: int, nbytes: int, log: list[int]) -> None:
        self.name, self.nbytes, self.log, self.complete = name, nbytes, log, False

    def start(self) -> None:
        self.log.append(self.name)

    def step(self) -> bool:
        if self.nbytes == 13:
            raise OSError("the cable is cut")
        return self.complete

    def awaited(self) -> Watch | None:
        return None if self.step() else ((), 0, True)


def work_of(channel: Channel, jobs: list[Recorded]) -> MpiWork[None]:
    return channel.submit(sum(job.nbytes for job in jobs), jobs)


def test_chunks_that_wait_share_no_tag_with_other_tasks() -> None:
    channel = plain_channel(group(0, 2))
    waiting = channel.chunk_tags(NUM_TAGS)
    others = {channel.next_tag() for _ in range(NUM_TAGS)}
    assert others.isdisjoint(waiting)
    assert all(tag % 2 == 0 and 0 <= tag < 2 * NUM_TAGS for tag in others.union(waiting))
    assert waiting[:3] == [0, 2, 4]
    assert channel.chunk_tags(1) == [0], "in turn"


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_jobs_start_in_order_within_the_window(sizes: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    window = Chunking(chunk_bytes=64, window_bytes=20, window_tasks=3)
    progress_group = group(0, 2)
    channel = plain_channel(progress_group, window)
    log: list[int] = []
    jobs: list[Recorded] = []
    works: list[tuple[MpiWork[None], list[Recorded]]] = []
    for together in sizes:
        mine = [Recorded(len(jobs) + k, nbytes, log) for k, nbytes in enumerate(together)]
        jobs += mine
        works.append((work_of(channel, mine), mine))
    while not all(job.complete for job in jobs):
        started = [jobs[name] for name in log]
        assert log == list(range(len(log)))
        under_way = [job for job in started if not job.complete]
        assert len(under_way) == 1 or sum(job.nbytes for job in under_way) <= 20
        assert 1 <= len(under_way) <= 3
        random.choice(under_way).complete = True
        moves = progress_group.moves
        next(work for work, _ in works if work.remaining).test()
        assert progress_group.moves == moves + 1
    for work, mine in works:
        assert work.test() == all(job.complete for job in mine)


def test_channels_fail_together_and_start_nothing_after_that() -> None:
    progress_group = group(1, 2)
    broken, sound = (
        plain_channel(progress_group, Chunking()),
        plain_channel(progress_group, Chunking(window_tasks=1)),
    )
    log: list[int] = []
    fine = Recorded(0, 1, log)
    good = work_of(sound, [fine])
    fine.complete = True
    assert good.test()
    bad, held = work_of(broken, [Recorded(1, 13, log)]), work_of(sound, [Recorded(2, 1, log)])
    assert progress_group.may_progress(), "which finds it, and does not say so"
    for work in (bad, held, work_of(sound, [Recorded(3, 1, log)])):
        with pytest.raises(BackendError, match=r"rank 1 of 2.*the cable is cut") as caught:
            work.test()
        assert isinstance(caught.value.__cause__, OSError)
    assert good.test()
    assert log == [0, 1, 2]


@pytest.mark.parametrize("finds", ["test", "may_progress"])
def test_an_error_of_transfers_reaches_who_waits(finds: str) -> None:
    progress_group = group(1, 2)
    work = work_of(plain_channel(progress_group), [Recorded(0, 1, [])])
    assert not work.test()
    sound = progress_group.transfers
    progress_group.transfers = Mock()
    progress_group.transfers.progress.side_effect = ZeroDivisionError("chained to nothing")
    if finds == "may_progress":
        assert progress_group.may_progress()
        progress_group.transfers = sound  # the library need not say it twice
    for _ in range(2):
        with pytest.raises(BackendError, match="chained to nothing"):
            work.test()


def test_what_is_under_way_at_a_failure_is_kept_and_nothing_else() -> None:
    """MPI may still write to its memory, whoever forgets the backend."""
    progress_group = group(1, 2)
    jobs = [Recorded(k, 1, []) for k in range(5)]
    channel = plain_channel(progress_group, Chunking(window_tasks=2))
    work = work_of(channel, jobs[:4])
    jobs[0].complete = True
    work.test()
    kept = [weakref.ref(job) for job in jobs]
    progress_group.fail(OSError("gone"))
    later = work_of(channel, jobs[4:])
    with pytest.raises(BackendError, match="gone"):
        later.test()
    del progress_group, channel, work, later, jobs
    gc.collect()
    assert [ref() is None for ref in kept] == [True, False, False, True, True]


def test_the_fastest_large_message_tells_how_long_a_byte_takes() -> None:
    pace = Pace()
    for nbytes, seconds in ((1 << 20, 1e-6), (4 << 20, 800.0), (8 << 20, 400.0), (8 << 20, 500.0)):
        begun_s = time.monotonic() - seconds
        pace.note_end(MpiWork(Mock(), 0, None, nbytes, begun_s=begun_s))
    assert pace.least_s_per_byte == pytest.approx(400.0 / (8 << 20), rel=0.1)


def test_leaving_with_messages_under_way_ends_the_progress_group() -> None:
    """What is begun for them would otherwise go on, in memory that is gone."""
    progress_group = group(1, 2)
    leaving, staying = (
        plain_channel(progress_group, Chunking()),
        plain_channel(progress_group, Chunking()),
    )
    job = Recorded(0, 1, [])
    work_of(leaving, [job])
    work = work_of(staying, [Recorded(1, 1, [])])
    kept = weakref.ref(job)
    leaving.leave()
    with pytest.raises(BackendError, match="abandoned with messages under way"):
        work.test()
    del job, leaving
    gc.collect()
    assert kept() is not None


def test_a_work_that_is_complete_is_so_whatever_fails_beside_it() -> None:
    progress_group = group(1, 2)
    sound, broken = (
        plain_channel(progress_group, Chunking()),
        plain_channel(progress_group, Chunking()),
    )
    job = Recorded(0, 1, [])
    work = work_of(sound, [job])
    work_of(broken, [Recorded(1, 13, [])])
    job.complete = True
    assert work.test()
    assert progress_group.failure is not None
