"""The all-reduce through memory that ranks of one host read of each other."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.host_ranks import WINDOW, channel, connected, group, plain_channel
from wfbp.comm.arrays import Buffer, Segment
from wfbp.comm.mpi.shm_memory import NUM_FLAG_SETS, SharedMemory
from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import MpiWork
from wfbp.comm.mpi.two_level import TAKEN, TwoLevel, TwoLevelTask
from wfbp.core.types import Op
from wfbp.errors import BackendError


@settings(max_examples=25)
@given(st.data())
def test_ranks_may_take_their_steps_in_any_order(data: st.DataObject) -> None:
    """Several works of many chunks, whose parts lie anywhere, against the sum."""
    size = data.draw(st.sampled_from([2, 3, 5]), "ranks")
    memories = connected(size)
    channels = [channel(memories[r], r, size) for r in range(size)]
    wanted: list[Buffer] = []
    works: list[list[MpiWork[None]]] = [[] for _ in range(size)]
    results: list[list[Buffer]] = [[] for _ in range(size)]
    for _ in range(data.draw(st.integers(1, 3), "works")):
        numel = data.draw(st.integers(17, 4000), "elements")
        cuts = sorted(data.draw(st.sets(st.integers(0, numel), max_size=6), "cuts"))
        modes = data.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7), "modes")
        values = [np.arange(numel, dtype=np.int32) * (r + 1) % 101 for r in range(size)]
        wanted.append(np.sum(values, axis=0, dtype=np.int32))
        for r in range(size):
            buffer = memories[r].zeros(4 * numel).view(np.int32)
            buffer[:] = values[r]
            segments, pieces = [], []
            for start, stop, mode in zip([0, *cuts], [*cuts, numel], modes, strict=False):
                slot = buffer[start:stop]
                source = slot.copy() if mode else slot
                result = (None, source, np.zeros_like(slot), None)[mode]
                if mode:
                    slot[:] = -1
                    segments.append(Segment(4 * start, source, (), result))
                pieces.append(slot if result is None else result)
            works[r].append(channels[r][0].all_reduce(buffer, "int32", Op.SUM, segments))
            results[r].append(pieces)  # type: ignore[arg-type]
    chance = np.random.default_rng(data.draw(st.integers(0, 99), "order"))
    # A rank's works move on together; then each in turn, as often as anything could take.
    for r in [*chance.integers(size, size=200), *list(range(size)) * 100]:
        progress_group = channels[r][1].group
        waits, moves = not progress_group.may_progress(), progress_group.moves
        works[r][-1].test()
        assert not waits or progress_group.moves == moves, "it said that it had to wait"
    for r in range(size):
        assert all(work.test() for work in works[r])
        for pieces, want in zip(results[r], wanted, strict=True):
            assert (np.concatenate(pieces) == want).all()


def test_there_are_so_many_channels() -> None:
    memory = connected(1)[0]
    line, alone = plain_channel(group(0, 1), size=1), Topology(((0,),), 0, WINDOW)
    found = [TwoLevel.of(memory, line, alone) for _ in range(NUM_FLAG_SETS)]
    assert found.index(None) == NUM_FLAG_SETS // 2  # the others are for groups of some ranks
    assert found.index(None) > 2 * 500, "two per optimizer"
    assert TwoLevel.of(None, line, alone) is None
    with pytest.raises(BackendError, match="rank 0 of 1: more than 1023 channels"):
        TwoLevel.of(memory, line, Topology(((0,), (1,)), 0, WINDOW))


def ready(size: int, numel: int) -> tuple[list[SharedMemory], list[Buffer], list[MpiWork[None]]]:
    """An all-reduce of one chunk that every rank has begun; rank r contributes r + 1."""
    memories = connected(size)
    buffers, works = [], []
    for rank, memory in enumerate(memories):
        buffer = memory.zeros(4 * numel).view(np.int32)
        buffer[:] = rank + 1
        levels, _ = channel(memory, rank, size)
        works.append(levels.all_reduce(buffer, "int32", Op.SUM, []))
        assert works[-1].remaining == 1
        buffers.append(buffer)
    return memories, buffers, works


def test_who_rests_wakes_when_the_other_rank_is_ready() -> None:
    memories = connected(2)
    buffers = [memory.zeros(4 << 10).view(np.int32) for memory in memories]
    lines = [channel(memory, rank, 2) for rank, memory in enumerate(memories)]

    def begin(rank: int) -> MpiWork[None]:
        return lines[rank][0].all_reduce(buffers[rank], "int32", Op.SUM, [])

    first, one = begin(0), lines[0][1].group
    assert not first.test()
    begun_s = time.monotonic()
    assert one.rest(1e-4, 0.05)
    assert time.monotonic() - begun_s >= 0.05, "nothing has happened"
    timer = threading.Timer(0.05, lambda: begin(1))
    timer.start()
    begun_s = time.monotonic()
    assert one.rest(1e-4, 60.0)
    assert time.monotonic() - begun_s < 30.0
    assert one.may_progress()
    timer.join()


def go_on(works: list[MpiWork[None]]) -> None:
    for work in works * 9:
        work.test()


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_gave_up_is_not_read(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank is held up within its copy of rank 0's part, for longer than rank 0 waits.

    By then rank 0 has taken all that it needs: the last rank would find the chunk complete.
    """
    memories, buffers, works = ready(size, 300)
    late = size - 1
    deliver = TwoLevelTask.deliver
    others = works[:late]

    def held_up(task: TwoLevelTask, owner: int) -> None:
        if task._flags.rank == late and owner == 0:
            for work in others * 3:
                assert not work.test()
            assert all(task._reached(rank, TAKEN) for rank in range(late))
            memories[0].withdraw()
            buffers[0][:] = -1
        deliver(task, owner)

    monkeypatch.setattr(TwoLevelTask, "deliver", held_up)
    with pytest.raises(BackendError, match=f"rank {late} of {size}: .*rank 0 gave up before this"):
        go_on(works)
    for work in others * 9:
        assert not work.test(), "nobody may take it for complete"


def test_what_was_read_before_a_rank_gave_up_counts() -> None:
    memories, buffers, works = ready(2, 300)
    while not works[1].test():
        works[0].test()
    memories[0].withdraw()
    buffers[0][:] = -1
    assert (buffers[1] == 3).all()


@settings(max_examples=10)
@given(st.data())
def test_more_tasks_than_there_are_rows(data: st.DataObject) -> None:
    """Some ranks complete a task long before others do."""
    size = data.draw(st.sampled_from([2, 3]), "ranks")
    window = replace(WINDOW, window_bytes=1 << 20, window_tasks=200)
    memories = connected(size)
    lines = [channel(memories[r], r, size, window) for r in range(size)]
    works: list[list[MpiWork[None]]] = [[] for _ in range(size)]
    buffers: list[list[Buffer]] = [[] for _ in range(size)]
    for number in range(150):
        for rank, (levels, _) in enumerate(lines):
            buffer = memories[rank].zeros(80).view(np.int32)
            buffer[:] = number * (rank + 1)
            works[rank].append(levels.all_reduce(buffer, "int32", Op.SUM, []))
            buffers[rank].append(buffer)
    chance = np.random.default_rng(data.draw(st.integers(0, 99), "order"))
    for rank in [*chance.integers(size, size=30), *list(range(size)) * 30]:
        works[rank][-1].test()
    for rank in range(size):
        assert all(work.test() for work in works[rank])
        found = np.array(buffers[rank])
        assert (found == np.arange(150)[:, None] * (size * (size + 1) // 2)).all()


def test_sizes_beyond_four_gigabytes_are_cut_and_announced() -> None:
    """By arithmetic alone: nothing of it is touched."""
    memory = connected(1)[0]
    levels, line = channel(memory, 0, 1, replace(WINDOW, window_bytes=1 << 29))
    try:
        low, buffer = memory.zeros(3 << 30), memory.zeros(5 << 30)
    except MemoryError:
        pytest.skip("this machine has less memory")
    data = buffer.view(np.float32)
    assert memory.offset(buffer) - memory.offset(low) == 3 << 30
    start = line._fill
    line._fill = lambda: None  # type: ignore[method-assign]
    levels.all_reduce(data, "float32", Op.SUM, [Segment(9 << 29, buffer[9 << 29 :])])
    assert [task.nbytes for task in line.queue] == [1 << 28] * 20
    bounds = [task._bounds for task in line.queue]  # type: ignore[attr-defined]
    assert bounds == [[(k << 26, (k + 1) << 26)] for k in range(20)]
    last = line.queue[-1]
    assert isinstance(last, TwoLevelTask)
    line.queue.clear()
    line.queue.append(last)
    start()
    announced = last._view(0, 0, 8)
    assert memory.offset(announced) == memory.offset(buffer)
