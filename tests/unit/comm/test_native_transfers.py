"""Transfers by the extension, over an MPI library that does what the test says."""

from __future__ import annotations

import ctypes
import gc
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_mpi import IN_STATUS, STATUS_BYTES, TRUNCATED, UNDEFINED, FakeError, FakeMpi
from wfbp import native
from wfbp.comm.mpi import transfers
from wfbp.comm.mpi.transfers import load_transfers
from wfbp.errors import BackendError

Array = npt.NDArray[Any]


@pytest.fixture(params=[(4, 16), (8, 8)], ids=["ints", "pointers"])
def mpi(request: pytest.FixtureRequest) -> FakeMpi:
    """A library like MPICH, and one like Open MPI."""
    return FakeMpi(*request.param)


def address(array: Array) -> int:
    return int(array.ctypes.data)


def test_what_has_arrived_is_combined_and_sent_on(mpi: FakeMpi) -> None:
    transfers = native.Transfers(**mpi.told)
    own, other = np.int32([7, -8, 20]), np.zeros(3, np.int32)
    back = np.zeros(4, np.uint8)
    transfer = transfers.begin(
        mpi.comm,
        10,
        [(other, 1, True), (back, 1, False)],
        "int32",
        "sum",
        2.0,
        [([own, other], own)],
        [(own, 1, False), (back, 1, True)],
    )
    mpi.end(0)
    assert transfers.progress() == 1
    assert own.tolist() == [7, -8, 20], "while its stage is not over"
    mpi.end(1)
    assert transfers.progress() == 1
    assert own.tolist() == [3, -4, 9]
    assert not transfer.done
    assert [(kind, at, tag) for kind, at, _, _, tag, _ in mpi.begun[2:]] == [
        ("send", address(own), 11),
        ("receive", address(back), 11),
    ]
    mpi.end(3, 2)
    assert transfers.progress() == 2
    assert transfer.done


def test_a_rest_ends_with_a_transfer_and_not_with_its_first_stage(mpi: FakeMpi) -> None:
    transfers = native.Transfers(**mpi.told)
    data = np.zeros(4, np.uint8)
    transfer = transfers.begin(mpi.comm, 0, [(data, 1, True)], then=[(data, 1, False)])
    other = transfers.begin(mpi.comm, 4, [(data, 1, False)])
    mpi.end(0)
    assert transfers.rest(nap_s=1e-4, most_s=0.2) == 1
    assert len(mpi.begun) == 3, "the second stage begins while it rests"
    assert mpi.num_tests > 1, "and it goes on resting"
    assert not transfer.done
    mpi.num_tests = 0
    mpi.end(2)
    assert transfers.rest(nap_s=1e-4, most_s=10.0) == 1
    assert (mpi.num_tests, transfer.done, other.done) == (1, True, False)
    mpi.end(1)
    assert transfers.rest(nap_s=1e-4, most_s=10.0) == 1
    assert other.done
    assert transfers.rest(nap_s=1e-4, most_s=10.0) == 0, "nothing is under way"


def test_a_watch_is_of_all_flags_or_of_any() -> None:
    flags = np.int64([5, 7])
    views = [memoryview(flags[k : k + 1]) for k in range(2)]
    for least, any_of, wanted in (
        (5, False, True),
        (6, False, False),
        (6, True, True),
        (8, True, False),
    ):
        assert native.any_reached([(views, least, any_of)]) is wanted, (least, any_of)
    assert not native.any_reached([((), 0, True)])
    assert native.any_reached([((), 0, False)])
    assert not native.any_reached([])
    assert native.any_reached([(views, 9, True), (views[1:], 7, False)])
    for wrong in (memoryview(np.int32([1])), memoryview(np.int64([]))):
        with pytest.raises(ValueError, match="a flag must be"):
            native.any_reached([([wrong], 0, True)])


def test_a_rest_ends_when_a_watch_is_reached(mpi: FakeMpi) -> None:
    transfers = native.Transfers(**mpi.told)
    flag = np.zeros(1, np.int64)
    watch = [memoryview(flag)], 3, False
    assert transfers.rest(nap_s=1e-4, most_s=0.01, watches=[watch]) == 0
    transfers.begin(mpi.comm, 0, [(np.zeros(4, np.uint8), 1, True)])

    def count_up() -> None:
        flag[0] = 3

    thread = threading.Timer(0.01, count_up)
    thread.start()
    assert transfers.rest(nap_s=1e-3, most_s=60.0, watches=[watch]) == 0
    assert flag[0] == 3
    thread.join()


def test_a_reduction_without_messages_is_done_at_once(mpi: FakeMpi) -> None:
    transfers = native.Transfers(**mpi.told)
    own, out = np.float64([1.0, 2.0]), np.zeros(2)
    pieces = [([own, own], out)]
    assert transfers.begin(mpi.comm, 0, [], "float64", "product", 1.0, pieces).done
    assert out.tolist() == [1.0, 4.0]
    after = transfers.begin(mpi.comm, 0, [], pieces=[], then=[(out, 0, False)])
    assert not after.done
    mpi.end(0)
    transfers.progress()
    assert after.done


@settings(max_examples=60)
@given(
    handle_bytes=st.sampled_from([4, 8]),
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6),
    chance=st.randoms(use_true_random=False),
)
def test_any_number_in_any_order(
    handle_bytes: int, shapes: list[tuple[int, int]], chance: Any
) -> None:
    """Each stage begins when the one before is over, and each message belongs to its transfer."""
    mpi = FakeMpi(handle_bytes, 0)
    transfers = native.Transfers(**mpi.told)
    data = np.zeros(64, np.uint8)
    waiting = [(k, *shape) for k, shape in enumerate(shapes)]
    begun: dict[int, Any] = {}
    left: dict[int, list[int]] = {}
    ended: set[int] = set()
    while waiting or len(ended) < len(mpi.begun):
        if waiting and (chance.random() < 0.5 or len(ended) == len(mpi.begun)):
            k, first, second = waiting.pop(0)
            messages = [(data[i : i + 1], k, True) for i in range(first)]
            then = [(data[i : i + 2], k, False) for i in range(second)]
            begun[k] = transfers.begin(mpi.comm, 2 * k, messages, then=then)
            left[k] = [first, second]
        else:
            under_way = [r for r in range(len(mpi.begun)) if r not in ended]
            chosen = chance.sample(under_way, chance.randint(0, len(under_way)))
            mpi.end(*chosen)
            ended.update(chosen)
            assert transfers.progress() == len(chosen)
            for request in chosen:
                tag = mpi.begun[request][4]
                left[tag // 2][tag % 2] -= 1
        for k, (first, second) in left.items():
            assert begun[k].done == (first == second == 0)
            sent_on = [m for m in mpi.begun if m[3:5] == (k, 2 * k + 1)]
            assert len(sent_on) == (shapes[k][1] if first == 0 else 0)
    assert all(transfer.done for transfer in begun.values())


def test_nothing_is_kept_of_what_is_over(mpi: FakeMpi) -> None:
    class Kept(np.ndarray[Any, Any]):
        """An array that can be referred to weakly."""

    transfers = native.Transfers(**mpi.told)
    data = np.zeros(4, np.uint8).view(Kept)
    seen = weakref.ref(data)
    pieces = [([data], data)]
    transfer = transfers.begin(
        mpi.comm, 0, [(data, 0, True)], pieces=pieces, then=[(data, 0, False)]
    )
    del data, pieces
    gc.collect()
    assert seen() is None, "the caller keeps what is under way"
    del transfer
    assert transfers.progress() == 0


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"errors": {1: TRUNCATED}}, TRUNCATED),
        ({"code": IN_STATUS}, IN_STATUS),
        ({"code": TRUNCATED, "found": UNDEFINED}, TRUNCATED),
        ({"found": 3}, "no longer knows 2 messages"),
        ({"found": 2, "reports": [0, 0]}, "twice"),
        ({"found": 1, "reports": [2]}, "vector"),
    ],
)
def test_what_is_wrong_is_told(mpi: FakeMpi, broken: dict[str, Any], told: str | int) -> None:
    transfers = native.Transfers(**mpi.told)
    data = np.zeros(4, np.uint8)
    transfer = transfers.begin(mpi.comm, 0, [(data, 1, True), (data, 1, False)])
    for name, value in broken.items():
        setattr(mpi, name, value)
    if "reports" not in broken:
        mpi.end(0, 1)
    with pytest.raises((FakeError, RuntimeError, IndexError)) as caught:
        transfers.progress()
    if isinstance(told, int):
        assert caught.value.args == (told,)
    else:
        assert told in str(caught.value)
    assert not transfer.done


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_message_that_does_not_begin(mpi: FakeMpi, refused: int) -> None:
    transfers = native.Transfers(**mpi.told)
    data = np.zeros(4, np.uint8)
    mpi.refuses = {refused}
    messages = [(data, 1, True), (data, 1, False)]
    if refused < 2:
        with pytest.raises(FakeError, match=str(TRUNCATED)):
            transfers.begin(mpi.comm, 0, messages)
        assert len(mpi.begun) == refused
        return
    transfer = transfers.begin(mpi.comm, 0, messages, then=[(data, 1, False)])
    mpi.end(0, 1)
    with pytest.raises(FakeError, match=str(TRUNCATED)):
        transfers.progress()
    assert not transfer.done


def test_wrong_arguments_start_nothing(mpi: FakeMpi) -> None:
    transfers = native.Transfers(**mpi.told)
    good = np.zeros(8, np.uint8)
    read_only = good.copy()
    read_only.flags.writeable = False
    fine = (good, 1, True)
    wrong: list[tuple[list[Any], dict[str, Any], str]] = [
        ([fine, (b"12", 1, False)], {}, "must be an array"),
        ([fine, (good[::2], 1, False)], {}, "contiguous"),
        ([fine, (read_only, 1, True)], {}, "writeable where it arrives"),
        ([fine, (good, 1)], {}, r"is \(array, peer, incoming\)"),
        ([fine], {"then": [(read_only, 1, True)]}, "writeable"),
        ([fine], {"dtype": "complex64"}, "complex64"),
        ([fine], {"op": "mean"}, "mean"),
        ([fine], {"op": "max", "divisor": 2.0}, "only a sum"),
        ([fine], {"pieces": [([good, good[:4]], good)]}, "4 bytes, its result 8"),
        ([fine], {"pieces": [([], good)]}, "contributions"),
        ([fine], {"pieces": [([good[:3]], good[:3])], "dtype": "float32"}, "whole elements"),
        ([fine], {"pieces": [(good,)]}, r"is \(contributions, result\)"),
    ]
    for messages, options, told in wrong:
        with pytest.raises((ValueError, TypeError), match=told):
            transfers.begin(mpi.comm, 0, messages, **options)
    assert mpi.begun == []
    transfers.begin(mpi.comm, 0, [(read_only, 1, False)])
    for name, value in (("handle_bytes", 2), ("error_at", 17)):
        with pytest.raises(ValueError, match=r"handles of 2|within a status"):
            native.Transfers(**{**mpi.told, name: value})


@pytest.mark.skipif(sys.platform == "win32", reason="asks the C library to sleep")
def test_other_threads_run_while_the_library_does(mpi: FakeMpi) -> None:
    """A test takes a second here: the library's function is one that sleeps."""
    slow = ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p).value
    transfers = native.Transfers(**{**mpi.told, "testsome": slow or 0})
    data = np.zeros(1, np.uint8)
    transfers.begin(mpi.comm, 0, [(data, 1, True)])
    asked, ran = threading.Event(), threading.Event()

    def other() -> None:
        asked.wait(10)
        time.sleep(0.1)
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    asked.set()
    transfers.progress()
    meanwhile = ran.is_set()
    thread.join()
    assert meanwhile


ENDING = """
import builtins, ctypes, threading, time
import numpy as np
from tests.support.fake_mpi import FakeMpi
from wfbp import native

class Last:
    def __del__(self, sleep=time.sleep, say=print):
        sleep(1.5)
        say("ended")

builtins.last = Last()  # goes when the interpreter has ended for other threads
mpi = FakeMpi(4, 16)
slow = ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p).value
transfers = native.Transfers(**{**mpi.told, "testsome": slow})
data = np.zeros(1, np.uint8)
transfers.begin(mpi.comm, 0, [(data, 1, True)])
asked = threading.Event()
threading.Thread(target=lambda: (asked.set(), transfers.progress()), daemon=True).start()
asked.wait()
time.sleep(0.1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks the C library to sleep")
def test_the_interpreter_may_end_while_the_library_is_asked() -> None:
    """A thread that comes back then is ended, and the process is not."""
    run = subprocess.run(
        [sys.executable, "-c", ENDING],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "ended\n", "")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of ``mpi4py.MPI`` as finding its functions needs."""
    library = Mock()
    library.__file__ = "libmpi"
    library.COMM_SELF.Get_errhandler.return_value = library.ERRORS_RETURN
    library.SUCCESS = 0
    library._sizeof = lambda kind: STATUS_BYTES if kind is library.Status else 8
    library._handleof = lambda _: 7
    library.Exception = FakeError
    status = ctypes.create_string_buffer(STATUS_BYTES)
    library.Status.return_value.Set_error = lambda code: struct.pack_into("=i", status, 12, code)
    library._addressof = lambda _: ctypes.addressof(status)
    functions = {f"MPI_{name}": ctypes.CDLL(None).abs for name in ("Isend", "Irecv", "Testsome")}
    monkeypatch.setattr(transfers.ctypes, "CDLL", lambda _: SimpleNamespace(**functions))
    library.functions = functions
    return library


def test_a_library_is_used_that_has_all_that_is_needed(library: Any) -> None:
    assert isinstance(load_transfers(library), native.Transfers)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda lib: lib.functions.pop("MPI_Testsome"), "MPI_Testsome"),
        (
            lambda lib: setattr(lib, "_sizeof", lambda kind: 4 if kind is lib.Comm else 8),
            r"handles of \[4, 8\] bytes",
        ),
        (
            lambda lib: setattr(lib.Status.return_value, "Set_error", lambda code: None),
            "keeps no error",
        ),
        (
            lambda lib: setattr(lib.COMM_SELF.Get_errhandler, "return_value", lib.ERRORS_ARE_FATAL),
            "COMM_SELF",
        ),
    ],
)
def test_another_library_is_refused(library: Any, spoil: Callable[[Any], None], told: str) -> None:
    spoil(library)
    with pytest.raises(BackendError, match=f"cannot be called directly.*{told}"):
        load_transfers(library)


def undelivered(libraries: list[FakeMpi], ended: list[set[int]]) -> list[tuple[int, int, int, int]]:
    """Messages that have been sent and are received: sender, its request, receiver, its request.

    Messages with one peer and tag match by their order.
    """
    places: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    for rank, mpi in enumerate(libraries):
        for number, (kind, _, _, peer, tag, _) in enumerate(mpi.begun):
            key = (rank, peer, tag) if kind == "send" else (peer, rank, tag)
            places.setdefault(key, ([], []))[kind == "receive"].append(number)
    return [
        (sender, sent, receiver, received)
        for (sender, receiver, _), pair in places.items()
        for sent, received in zip(*pair, strict=False)
        if sent not in ended[sender]
    ]


@given(st.data(), st.randoms(use_true_random=False))
def test_ranks_exchange_what_they_have(data: st.DataObject, chance: Any) -> None:
    """Blocks and pieces of any sizes; sums in the order of the agents, which is no matter of time.

    A message that nobody receives, or of another size, or a rank that waits for one too many, is
    found here.
    """
    size = data.draw(st.integers(1, 4))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    ends = np.cumsum([0, *counts])
    order, agents = (data.draw(st.permutations(range(size))) for _ in range(2))
    shares = [(owner, int(ends[owner]), int(ends[owner + 1])) for owner in order]
    cuts = data.draw(st.lists(st.integers(0, max(0, int(ends[-1]) - 1)), max_size=3))
    starts = sorted({0, *cuts})
    combines, tags = data.draw(st.booleans()), range(0, 2 * data.draw(st.integers(1, 4)), 2)
    gathers = not combines or data.draw(st.booleans())
    values = np.random.default_rng(len(cuts)).standard_normal((size, ends[-1])).astype("f4")
    libraries = [FakeMpi(8, 8) for _ in range(size)]
    transfers = [native.Transfers(**mpi.told) for mpi in libraries]
    works, results, kept = [], [], []  # the caller keeps what is under way
    for rank, mpi in enumerate(libraries):
        pieces = [piece.copy() for piece in np.split(values[rank], starts[1:])]
        sources = (starts, pieces) if combines else None
        found = ([0], [np.zeros(ends[-1], np.float32)]) if combines else (starts, pieces)
        works.append(
            transfers[rank].exchange(
                None, mpi.comm, tags, rank, agents, shares, sources, found, gathers,
                "float32", "sum", 1.0,
            )
        )  # fmt: skip
        results.append(found[1])
        kept.append(pieces)
    ended: list[set[int]] = [set() for _ in range(size)]
    while not all(work.done for work in works):
        messages = undelivered(libraries, ended)
        assert messages, "all wait"
        for sender, sent, receiver, received in chance.sample(
            messages, chance.randint(1, len(messages))
        ):
            (_, source, nbytes, *_), target = libraries[sender].begun[sent], receiver
            _, place, room, *_ = libraries[target].begun[received]
            assert nbytes == room
            libraries[sender].end(sent)
            libraries[target].end(received)
            ctypes.memmove(place, source, nbytes)
            ended[sender].add(sent)
            ended[target].add(received)
        for each in transfers:
            each.progress()
    assert [len(mpi.begun) for mpi in libraries] == list(map(len, ended))
    for owner, start, stop in shares:
        wanted = values[owner, start:stop]
        if combines:
            wanted = np.zeros(stop - start, np.float32)
            for number, agent in enumerate(agents):
                part = values[agent, start:stop]
                wanted = wanted + part if number else part
        for rank in range(size) if gathers else [owner]:
            np.testing.assert_array_equal(np.concatenate(results[rank])[start:stop], wanted)


@given(st.integers(1, 3), st.integers(1, 64), st.randoms(use_true_random=False))
def test_chunks_fill_the_window_in_order(most_chunks: int, most_bytes: int, random: Any) -> None:
    mpi = FakeMpi(4, 16)
    transfers, window = native.Transfers(**mpi.told), native.Window(most_bytes, most_chunks)
    data = np.zeros(24, np.uint8)
    shares, arrays = [(1, 0, 12), (0, 12, 24)], ([0], [data])
    exchanges = [
        transfers.exchange(
            window, mpi.comm, tags, 0, [0, 1], shares, None, arrays, True, "uint8", "sum", 1.0
        )
        for tags in ([0, 2, 4], [6, 8, 10, 12])
    ]
    sizes = [8, 8, 8, 6, 6, 6, 6]  # a message each way per chunk
    under_way, num_started = set[int](), 0
    while not exchanges[1].done or not exchanges[0].done:
        started = range(num_started, len(mpi.begun) // 2)
        num_started = started.stop
        under_way |= set(started)
        nbytes = sum(sizes[chunk] for chunk in under_way)
        assert len(under_way) == 1 or (len(under_way) <= most_chunks and nbytes <= most_bytes)
        if num_started < len(sizes) and len(under_way) < most_chunks:
            assert nbytes + sizes[num_started] > most_bytes, "there was room"
        ends = random.choice(sorted(under_way))
        under_way.remove(ends)
        mpi.end(2 * ends, 2 * ends + 1)
        assert transfers.progress() == 2
    assert [tag for *_, tag, _ in mpi.begun[::2]] == [0, 2, 4, 6, 8, 10, 12]


ABANDONING = """
import ctypes
import numpy as np
from tests.support.fake_mpi import FakeMpi
from wfbp import native

mpi = FakeMpi(8, 8)
transfers = native.Transfers(**mpi.told)
data = np.zeros(1 << 25, np.uint8)  # so much that the system would take it back at once
shares = [(0, 0, data.size), (1, data.size, data.size)]
mine = [0], [data]
transfers.exchange(
    None, mpi.comm, [0], 0, [0, 1], shares, mine, mine, False, "uint8", "sum", 1.0
)
del transfers
kind, at, nbytes, *_ = mpi.begun[0]
ctypes.memset(at, 1, nbytes)
print(kind, nbytes)
"""


def test_memory_of_messages_under_way_is_never_freed() -> None:
    run = subprocess.run(
        [sys.executable, "-c", ABANDONING],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, f"receive {1 << 25}\n", "")


def test_an_exchange_that_cannot_be_is_refused(mpi: FakeMpi) -> None:
    transfers = native.Transfers(**mpi.told)
    data = np.zeros(4, np.float32)
    good: dict[str, Any] = {
        "tags": [0], "rank": 0, "agents": [0, 1], "shares": [(0, 0, 2), (1, 2, 4)],
        "sources": ([0], [data]), "results": ([0], [data]), "gathers": True,
        "dtype": "float32", "op": "sum", "divisor": 1.0,
    }  # fmt: skip
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    for change, told in (
        ({"tags": []}, "no chunk"),
        ({"agents": [1, 2]}, "rank 0 is no agent"),
        ({"results": ([0, 2], [data[:2], data[2:]])}, "one array of results, found 2"),
        ({"results": ([0], [fixed])}, "writeable where results arrive"),
        ({"sources": ([0], [np.zeros((4, 2))[:, 0]])}, "must be contiguous"),
        ({"sources": ([0, 1], [data])}, "each array needs a start"),
        ({"shares": [(0, 0, 1 << 32)]}, "longer than MPI can count"),
        ({"dtype": "int3"}, "int3"),
        ({"sources": ([0], [b"12"])}, "must be arrays"),
    ):
        with pytest.raises((ValueError, TypeError), match=told):
            transfers.exchange(None, mpi.comm, **{**good, **change})
    assert not mpi.begun
