"""Memory that ranks of one host read of each other."""

from __future__ import annotations

import gc
import mmap
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.host_ranks import ThreadComm, connected
from wfbp.comm.mpi import shm_memory
from wfbp.comm.mpi.shm_memory import PAGE_BYTES, FreeList, SharedMemory


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 99)), max_size=40),
)
def test_ranges_that_are_taken_never_meet(end: int, turns: list[tuple[bool, int, int]]) -> None:
    """Against a list of what is taken, byte by byte; all that is free can be taken."""
    room, used = FreeList(0, end), [False] * end
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
    monkeypatch.setattr(shm_memory.os, "getpid", lambda: here + 1)
    del data
    gc.collect()
    assert (other.view(0, offset, PAGE_BYTES) == 3).all()
    assert memory.offset(memory.zeros(1)) != offset


def _refuse(*_: Any) -> None:
    raise OSError("not here")


@pytest.mark.parametrize("function", ["memfd_create", "ftruncate", "open"])
def test_where_one_rank_cannot_none_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    caplog.set_level("INFO", "wfbp")
    connected(2)
    comm = ThreadComm(2)
    gc.collect()  # no file of an earlier test is closed within this one
    before = len(os.listdir("/proc/self/fd"))
    real = getattr(os, function)
    monkeypatch.setattr(
        shm_memory.os, function, lambda *args: (real if comm.rank else _refuse)(*args)
    )
    assert comm.run(lambda: SharedMemory.connect(comm)) == [None, None]  # type: ignore[arg-type]
    monkeypatch.undo()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before, "files are left open"
    what = "that of rank 0 cannot be mapped" if function == "open" else "it cannot be made"
    told = (
        f"ranks of this host do not read each other's memory, and send messages (rank 0: {what}: "
    )
    rank0, rank1 = sorted(caplog.messages)
    assert rank0.startswith(f"rank 0 of 2: {told}not here)")
    assert rank1.startswith(f"rank 1 of 2: {told}not here)")
    assert "set WFBP_SHARED_MEMORY=0" in rank0
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert (levels[rank0], levels[rank1]) == ("WARNING", "INFO")


def test_where_one_rank_does_not_want_it_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wfbp")
    connected(2)
    comm = ThreadComm(2)
    found = comm.run(lambda: SharedMemory.connect(comm, comm.rank == 0))  # type: ignore[arg-type]
    assert found == [None, None]
    assert len(caplog.messages) == 2
    assert all("(rank 1: WFBP_SHARED_MEMORY switches it off)" in m for m in caplog.messages)
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_another_process_of_that_number_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As across containers, each with numbers of its own."""
    connected(2)
    comm = ThreadComm(2)
    monkeypatch.setattr(
        shm_memory.secrets, "token_bytes", lambda n: bytes([comm.rank]) * n, raising=True
    )
    opened = shm_memory.open_map
    monkeypatch.setattr(
        shm_memory,
        "open_map",
        lambda process, file, token, mine: opened(process, file, b"x" * len(token), mine),
    )
    assert comm.run(lambda: SharedMemory.connect(comm)) == [None, None]  # type: ignore[arg-type]


def test_another_process_s_pipe_is_not_opened() -> None:
    """It has our file's number in another container; to read it would block, or steal from it."""
    read, write = os.pipe()
    os.write(write, b"for somebody else")
    with pytest.raises(ValueError, match="is another one"):
        shm_memory.open_map(os.getpid(), read, b"t" * 16, mine=False)
    assert os.read(read, 99) == b"for somebody else"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("answer", ["refuses", "does nothing"])
def test_where_memory_cannot_be_given_back_there_is_none(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    def discard(mapped: mmap.mmap, start: int, nbytes: int) -> None:
        if answer == "refuses":
            raise OSError("not here")

    connected(2)
    monkeypatch.setattr(shm_memory, "discard", discard)
    comm = ThreadComm(2)
    assert comm.run(lambda: SharedMemory.connect(comm)) == [None, None]  # type: ignore[arg-type]


def test_core_dumps_leave_it_out() -> None:
    """They would touch all of it: twice what the machine has."""
    kept = connected(2)
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [after for before, after in pairwise(maps) if "/memfd:wfbp" in before]
    assert len(flags) >= 4, kept
    assert all("dd" in text.split("\n")[0].split() for text in flags)


def test_on_processors_that_reorder_stores_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_memory, "ORDERED", False)
    comm = ThreadComm(1)
    assert comm.run(lambda: SharedMemory.connect(comm)) == [None]  # type: ignore[arg-type]
