"""Memory that ranks read of each other, and the all-reduce that goes through it."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wfbp.comm import host_memory
from wfbp.comm.backend import Buffer, Segment
from wfbp.comm.chunking import Chunking
from wfbp.comm.host_memory import HEADER_BYTES, PAGE_BYTES, HostMemory, Room
from wfbp.comm.host_reduce import HostReduces
from wfbp.comm.mpi_channel import Channel, Family, MpiWork
from wfbp.core.types import Op

T = TypeVar("T")
WINDOW = Chunking(window_bytes=4096, small_bytes=64)


class ThreadComm:
    """As much of a communicator as connecting needs, with ranks as threads."""

    def __init__(self, size: int) -> None:
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=10)
        self._here = threading.local()
        self.size = size

    @property
    def rank(self) -> int:
        """Of the thread that asks."""
        rank: int = self._here.rank
        return rank

    def allgather(self, value: T) -> list[T]:
        self._said[self.rank] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found

    def run(self, function: Callable[[], T]) -> list[T]:
        """What the function returns on each rank."""
        found: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            self._here.rank = rank
            found[rank] = function()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def connected(size: int) -> list[HostMemory]:
    """The memory as each rank sees it."""
    comm = ThreadComm(size)
    found = comm.run(lambda: HostMemory.connect(comm))  # type: ignore[arg-type]
    memories = [memory for memory in found if memory is not None]
    if len(memories) < size:
        pytest.skip("this machine has no memory that processes can read of each other")
    return memories


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 99)), max_size=40),
)
def test_ranges_that_are_taken_never_meet(end: int, turns: list[tuple[bool, int, int]]) -> None:
    """Against a list of what is taken, byte by byte; all that is free can be taken."""
    room, used = Room(0, end), [False] * end
    held: list[tuple[int, int]] = []
    for takes, length, chosen in turns:
        if takes:
            wanted = next((k for k in range(end) if not any(used[k : k + length])), end)
            if wanted + length > end:
                with pytest.raises(MemoryError, match=f"no room for {length} bytes"):
                    room.take(length)
                continue
            assert room.take(length) == wanted
            held.append((wanted, length))
        elif held:
            held.pop(chosen % len(held))
            room.give(*_last_given(used, held))
        used = [any(a <= k < a + n for a, n in held) for k in range(end)]


def _last_given(used: list[bool], held: list[tuple[int, int]]) -> tuple[int, int]:
    """The range that is marked as used and no longer held."""
    free = [k for k, here in enumerate(used) if here and not any(a <= k < a + n for a, n in held)]
    return free[0], len(free)


def test_others_read_what_one_writes_and_cannot_write() -> None:
    memories = connected(3)
    mine = memories[1].zeros(1000)
    mine[:] = 5
    offset = memories[1].offset(mine)
    for memory in memories:
        seen = memory.view(1, offset, 1000)
        assert (seen == 5).all()
        assert seen.flags.writeable == (memory is memories[1])
    assert memories[1].holds(mine[10:20])
    assert not memories[0].holds(mine)
    assert not memories[1].holds(np.zeros(5))


def test_freed_memory_is_zero_and_taken_again() -> None:
    memory, other = connected(2)
    data = memory.zeros(3 * PAGE_BYTES)
    part = data[100:200]
    data[:] = 9
    offset = memory.offset(data)
    del data
    gc.collect()
    assert (part == 9).all(), "a part keeps the whole"
    assert memory.zeros(1).any() == 0
    del part
    gc.collect()
    again = memory.zeros(3 * PAGE_BYTES)
    assert memory.offset(again) == offset
    assert not again.any()
    assert not other.view(0, offset, 3 * PAGE_BYTES).any()


def test_a_forked_process_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if forked: real forks warn where a framework has started threads."""
    memory, other = connected(2)
    data = memory.zeros(PAGE_BYTES)
    data[:] = 3
    offset = memory.offset(data)
    here = os.getpid()
    monkeypatch.setattr(host_memory.os, "getpid", lambda: here + 1)
    del data
    gc.collect()
    assert (other.view(0, offset, PAGE_BYTES) == 3).all()
    assert memory.offset(memory.zeros(1)) != offset


def _refuse(*_: Any) -> None:
    raise OSError("not here")


@pytest.mark.parametrize("function", ["memfd_create", "ftruncate", "open"])
def test_where_one_rank_cannot_none_does(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    connected(2)
    comm = ThreadComm(2)
    before = len(os.listdir("/proc/self/fd"))
    real = getattr(os, function)
    monkeypatch.setattr(
        host_memory.os, function, lambda *args: (real if comm.rank else _refuse)(*args)
    )
    assert comm.run(lambda: HostMemory.connect(comm)) == [None, None]  # type: ignore[arg-type]
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before, "files are left open"


def test_another_process_of_that_number_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As across containers, each with numbers of its own."""
    connected(2)
    comm = ThreadComm(2)
    monkeypatch.setattr(
        host_memory.secrets, "token_bytes", lambda n: bytes([comm.rank]) * n, raising=True
    )
    opened = host_memory._open
    monkeypatch.setattr(
        host_memory,
        "_open",
        lambda process, file, token, mine: opened(process, file, b"x" * len(token), mine),
    )
    assert comm.run(lambda: HostMemory.connect(comm)) == [None, None]  # type: ignore[arg-type]


def test_another_process_s_pipe_is_not_opened() -> None:
    """It has our file's number in another container; to read it would block, or steal from it."""
    read, write = os.pipe()
    os.write(write, b"for somebody else")
    with pytest.raises(ValueError, match="is another one"):
        host_memory._open(os.getpid(), read, b"t" * 16, mine=False)
    assert os.read(read, 99) == b"for somebody else"
    os.close(read)
    os.close(write)


def test_a_python_without_the_call_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(host_memory.os, "memfd_create", raising=False)
    comm = ThreadComm(2)
    assert comm.run(lambda: HostMemory.connect(comm)) == [None, None]  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", ["refuses", "does nothing"])
def test_where_memory_cannot_be_given_back_there_is_none(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    class Keeps(mmap.mmap):
        def madvise(self, advice: int, *where: int) -> None:
            if advice == mmap.MADV_REMOVE and answer == "refuses":
                raise OSError("not here")

    connected(2)
    monkeypatch.setattr(host_memory.mmap, "mmap", Keeps)
    comm = ThreadComm(2)
    assert comm.run(lambda: HostMemory.connect(comm)) == [None, None]  # type: ignore[arg-type]


def test_core_dumps_leave_it_out() -> None:
    """They would touch all of it: twice what the machine has."""
    kept = connected(2)
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [after for before, after in pairwise(maps) if "/memfd:wfbp" in before]
    assert len(flags) >= 4, kept
    assert all("dd" in text.split("\n")[0].split() for text in flags)


def test_on_processors_that_reorder_stores_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "ORDERED", False)
    comm = ThreadComm(1)
    assert comm.run(lambda: HostMemory.connect(comm)) == [None]  # type: ignore[arg-type]


def channel(memory: HostMemory, rank: int, size: int) -> tuple[HostReduces, Channel]:
    family = Family()
    reduces = HostReduces.of(memory, family, rank, size, WINDOW)
    assert reduces is not None
    return reduces, Channel(WINDOW, f"rank {rank}", family)


@settings(deadline=None, max_examples=25)
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
            reduces, line = channels[r]
            jobs = reduces.all_reduce(buffer, segments, "int32", Op.SUM)
            works[r].append(line.submit(MpiWork(line, buffer.nbytes, lambda: None), jobs))
            results[r].append(pieces)  # type: ignore[arg-type]
    chance = np.random.default_rng(data.draw(st.integers(0, 99), "order"))
    # A rank's works move on together; then each in turn, as often as anything could take.
    for r in [*chance.integers(size, size=200), *list(range(size)) * 100]:
        works[r][-1].test()
    for r in range(size):
        assert all(work.test() for work in works[r])
        for pieces, want in zip(results[r], wanted, strict=True):
            assert (np.concatenate(pieces) == want).all()


def test_small_and_foreign_buffers_go_other_ways() -> None:
    memory = connected(1)[0]
    reduces, _ = channel(memory, 0, 1)
    assert reduces.carries(memory.zeros(65))
    assert not reduces.carries(memory.zeros(64))
    assert not reduces.carries(np.zeros(65, np.uint8))


def test_there_are_so_many_channels() -> None:
    memory = connected(1)[0]
    found = [HostReduces.of(memory, Family(), 0, 1, WINDOW) for _ in range(300)]
    assert found.index(None) == HEADER_BYTES // 4096 - 1
    assert HostReduces.of(None, Family(), 0, 1, WINDOW) is None
