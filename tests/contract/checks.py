"""What every backend does, as checks that each rank runs on its own backend.

A check is a function of a backend; all ranks call the same checks in the same order. The
expected values come from the contributions of all ranks, which every rank can compute.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from tests.contract import segment_checks
from tests.support.hosts import Hosts
from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Backend, HostBackend
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.waiting import wait
from wfbp.core.types import ITEM_BYTES, Op

TIMEOUT_S = 60.0
SIZES = (0, 1, 2, 3, 17, 1000, 8193, 100_003)
FLOATS = ("float32", "float64")
HALVES = ("float16", "bfloat16")
INTEGERS = ("int32", "int64", "uint8")


def widen(bits: Buffer, dtype: str) -> Buffer:
    """Half-precision bits as float32."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Buffer, dtype: str) -> Buffer:
    """Float32 rounded once to half precision, nearest even, as bits."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32)
    bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), bits)


def contribution(rank: int, numel: int, dtype: str) -> Buffer:
    """What a rank brings: different on each, small enough that integers do not overflow."""
    random = np.random.default_rng(1000 * rank + numel % 997)
    if dtype in INTEGERS:
        low = 0 if dtype == "uint8" else -3
        return random.integers(low, 4, numel).astype(dtype)
    values = random.standard_normal(numel)
    if dtype in HALVES:
        return narrow(values.astype(np.float32), dtype)
    return values.astype(dtype)


def fold(parts: list[Buffer], op: Op) -> Buffer:
    """The contributions combined one after the other, in rank order."""
    binary = {Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}.get(op, np.add)
    total = parts[0].copy()
    for part in parts[1:]:
        total = binary(total, part)
    return total


def expected(parts: list[Buffer], dtype: str, op: Op, hosts: Hosts = ()) -> Buffer:
    """What an all-reduce of these contributions has to give; ``hosts`` are added one by one, if
    there are several."""
    if len(hosts) > 1 and dtype in (*FLOATS, *HALVES):
        half, number = dtype in HALVES, np.float32(len(parts))
        outer = Op.SUM if op is Op.AVERAGE else op
        sums = []
        for host in hosts:
            members = [parts[rank] for rank in host]
            if half and op is Op.AVERAGE:  # divided first: the sum may have no float16
                total = fold([widen(part, dtype) for part in members], op) / number
                sums.append(narrow(total, dtype))
            else:
                sums.append(expected(members, dtype, outer))
        total = expected(sums, dtype, outer)
        return total / total.dtype.type(len(parts)) if op is Op.AVERAGE and not half else total
    if dtype in HALVES:
        total = fold([widen(part, dtype) for part in parts], op)
        if op is Op.AVERAGE:
            total = total / np.float32(len(parts))
        return narrow(total, dtype)
    total = fold(parts, op)
    if op is Op.AVERAGE:
        if dtype in INTEGERS:
            return np.array([int(x / len(parts)) for x in total.tolist()], total.dtype)
        return total / np.asarray(len(parts), total.dtype)
    return total


def hosts_of(backend: Backend) -> Hosts:
    """The hosts whose ranks are added first; none if ranks are added in their order."""
    levels = getattr(backend, "_levels", None)
    return backend._topology.hosts if levels and levels.between_hosts else ()  # type: ignore[attr-defined]


def assert_result(backend: Backend, data: Buffer, want: Buffer, dtype: str, where: str) -> None:
    """Bit by bit over MPI; elsewhere sums may be rounded in another order."""
    if isinstance(backend, MpiBackend) or dtype not in FLOATS:
        np.testing.assert_array_equal(data, want, err_msg=where)
    else:
        tolerance = 8 * np.finfo(dtype).eps
        np.testing.assert_allclose(data, want, rtol=tolerance, atol=tolerance, err_msg=where)


def assert_same_bits(backend: Backend, data: Buffer) -> None:
    digest = hashlib.sha256(data.tobytes()).digest()
    digests = wait(backend.all_gather_bytes(digest), timeout_s=TIMEOUT_S)
    assert digests == [digest] * backend.size, "ranks hold different bits"


def all_reduce(backend: Backend, data: Buffer, dtype: str, op: Op) -> None:
    wait(backend.all_reduce(data, dtype, op), timeout_s=TIMEOUT_S)


def held(backend: Backend, values: Buffer) -> Buffer:
    """A copy in memory that the backend has made."""
    data = backend.zeros(values.nbytes).view(values.dtype)
    data[:] = values
    return data


def check_reduce(backend: Backend, dtype: str, op: Op) -> None:
    for numel, own in product(SIZES, (False, True)):
        parts = [contribution(rank, numel, dtype) for rank in range(backend.size)]
        data = held(backend, parts[backend.rank]) if own else parts[backend.rank].copy()
        all_reduce(backend, data, dtype, op)
        want = expected(parts, dtype, op, hosts_of(backend))
        where = f"{dtype} {op.value}, {numel} elements"
        assert_result(backend, data, want, dtype, where)
        assert_same_bits(backend, data)


def check_reinterpreted_bytes(backend: Backend) -> None:
    """A fusion buffer is bytes; the element type comes with the call."""
    data = np.full(1000, backend.rank, np.float32).view(np.uint8)
    all_reduce(backend, data, "float32", Op.SUM)
    assert set(data.view(np.float32)) == {float(sum(range(backend.size)))}


def check_only_this_memory(backend: Backend) -> None:
    """What lies around the buffer is not touched."""
    for numel, own in product((1, 1001, 3_000_001), (False, True)):
        whole = np.full(numel + 2, 7, np.float32)
        whole = held(backend, whole) if own else whole
        whole[1:-1] = backend.rank
        all_reduce(backend, whole[1:-1], "float32", Op.AVERAGE)
        assert whole[0] == whole[-1] == 7
        assert (whole[1:-1] == np.float32((backend.size - 1) / 2)).all()


def check_100_mb(backend: Backend) -> None:
    numel = 25_000_003
    period = np.arange(1021, dtype=np.float32)
    data = np.resize(period + backend.rank, numel)
    all_reduce(backend, data, "float32", Op.SUM)
    want = backend.size * period + sum(range(backend.size))
    assert (data == np.resize(want, numel)).all()


def check_100_mb_of_halves(backend: Backend) -> None:
    """Small integers, whose sums are exact in both types."""
    numel = 50_000_003
    period = np.arange(251, dtype=np.float32) % 61
    for dtype in HALVES:
        data = np.resize(narrow(period + backend.rank, dtype), numel)
        all_reduce(backend, data, dtype, Op.SUM)
        want = narrow(backend.size * period + sum(range(backend.size)), dtype)
        assert (data == np.resize(want, numel)).all(), dtype


def check_several_chunks(backend: Backend) -> None:
    """Operations that a large message must not mix up with a sum."""
    for dtype, op in (
        *((dtype, op) for dtype in ("float32", "bfloat16", "int32") for op in (Op.MIN, Op.MAX)),
        *((dtype, Op.AVERAGE) for dtype in INTEGERS),
    ):
        numel = 9_000_011 // ITEM_BYTES[dtype]
        periods = [contribution(rank, 997, dtype) for rank in range(backend.size)]
        want = np.resize(expected(periods, dtype, op), numel)
        for own in (False, True):
            data = np.resize(periods[backend.rank], numel)
            data = held(backend, data) if own else data
            all_reduce(backend, data, dtype, op)
            assert (data == want).all(), f"{dtype} {op.value}"


def check_nan(backend: Backend) -> None:
    """One rank's NaN reaches every rank, whatever the operation, and nothing else is changed."""
    for dtype in FLOATS + HALVES:
        for op in Op:
            for numel, place in ((5, 2), (70_001, 69_000)):
                values = np.ones(numel, np.float32)
                if backend.rank == backend.size - 1:
                    values[place] = np.nan
                data = narrow(values, dtype) if dtype in HALVES else values.astype(dtype)
                all_reduce(backend, data, dtype, op)
                result = widen(data, dtype) if dtype in HALVES else data
                nan = np.isnan(result)
                assert nan[place], f"{dtype} {op.value}: the NaN was lost"
                assert nan.sum() == 1, f"{dtype} {op.value}: {nan.sum()} NaN from one"


def check_infinity(backend: Backend) -> None:
    for dtype in FLOATS + HALVES:
        values = np.array([np.inf, -np.inf, 1.0], np.float32)
        data = narrow(values, dtype) if dtype in HALVES else values.astype(dtype)
        all_reduce(backend, data, dtype, Op.AVERAGE)
        result = widen(data, dtype) if dtype in HALVES else data
        assert result.tolist() == [np.inf, -np.inf, 1.0], dtype


def check_half_overflow(backend: Backend) -> None:
    """An average whose sum has no float16 is still right: the sum is a float32."""
    data = narrow(np.full(100, 60_000.0, np.float32), "float16")
    all_reduce(backend, data, "float16", Op.AVERAGE)
    assert set(widen(data, "float16")) == {60_000.0}


def check_integer_average(backend: Backend) -> None:
    """Truncated toward zero, and right although the sum has no uint8."""
    data = np.full(5, 250, np.uint8)
    all_reduce(backend, data, "uint8", Op.AVERAGE)
    assert set(data) == {250}
    signed = np.full(5, -1 if backend.rank == 0 else 0, np.int32)
    all_reduce(backend, signed, "int32", Op.AVERAGE)
    assert set(signed) == {-1 if backend.size == 1 else 0}


def check_reduce_scatter(backend: Backend) -> None:
    """This rank's block gets what an all-reduce would put there, whatever the sizes."""
    rank, size = backend.rank, backend.size
    of_gradients = not isinstance(backend, HostBackend)  # those of devices combine nothing else
    ops = (Op.SUM, Op.AVERAGE) if of_gradients else (Op.SUM, Op.AVERAGE, Op.MAX)
    for dtype in FLOATS + HALVES if of_gradients else ITEM_BYTES:
        for numels in (
            [0] * size,
            [3] * size,
            [0 if r == size - 1 else 7 * r + 1 for r in range(size)],
            [70_001 if r == 0 else 1_000 for r in range(size)],
        ):
            for op, own in product(ops, (False, True)):
                parts = [contribution(r, sum(numels), dtype) for r in range(size)]
                data = held(backend, parts[rank]) if own else parts[rank].copy()
                counts = [numel * ITEM_BYTES[dtype] for numel in numels]
                wait(backend.reduce_scatter(data, counts, dtype, op), timeout_s=TIMEOUT_S)
                block = slice(sum(numels[:rank]), sum(numels[: rank + 1]))
                want = expected(parts, dtype, op, hosts_of(backend) if own else ())[block]
                assert_result(backend, data[block], want, dtype, f"{dtype} {op.value}, {numels}")


def check_reduce_scatter_and_all_gather(backend: Backend) -> None:
    """Together they are an all-reduce; in many chunks, in place, and around nothing else."""
    numel = 2_500_001 * backend.size
    whole = np.full(numel + 2, 7, np.float32)
    data = whole[1:-1]
    period = np.arange(1021, dtype=np.float32)
    data[:] = np.resize(period + backend.rank, numel)
    counts = [4 * 2_500_001] * backend.size
    wait(backend.reduce_scatter(data, counts, "float32", Op.AVERAGE), timeout_s=TIMEOUT_S)
    wait(backend.all_gather(data, counts), timeout_s=TIMEOUT_S)
    want = period + np.float32((backend.size - 1) / 2)
    assert (data == np.resize(want, numel)).all()
    assert whole[0] == whole[-1] == 7


def check_reduce_scatter_rejects(backend: Backend) -> None:
    size = backend.size
    data = np.zeros(2 * size, np.float32)
    for counts in ([8] * (size + 1), [8] * (size - 1) + [4], [8] * (size - 1) + [-8], [6] * size):
        try:
            backend.reduce_scatter(data, counts, "float32", Op.SUM)
        except ValueError:
            continue
        raise AssertionError(f"counts {counts} were accepted")


def check_broadcast(backend: Backend) -> None:
    for root in range(backend.size):
        for numel in (0, 1, 1001, 2_500_001):
            want = np.random.default_rng(root).integers(0, 256, numel, np.uint8)
            data = want.copy() if backend.rank == root else np.zeros(numel, np.uint8)
            wait(backend.broadcast(data, root), timeout_s=TIMEOUT_S)
            assert (data == want).all(), f"{numel} bytes from rank {root}"
    wide = np.full(9, backend.rank, np.float64)
    wait(backend.broadcast(wide, backend.size - 1), timeout_s=TIMEOUT_S)
    assert (wide == backend.size - 1).all()


def check_all_gather(backend: Backend) -> None:
    """Every block is filled in place from its owner, whatever the sizes; nothing around it is."""
    rank, size = backend.rank, backend.size
    for counts in (
        [0] * size,
        [1] * size,
        [4096] * size,
        [0 if r == 0 else 3 * r + 1 for r in range(size)],
        [5 if r == size - 1 else 0 for r in range(size)],
        [17_000_003 if r == size - 1 else r for r in range(size)],
        [5_000_001 + 1000 * r for r in range(size)],
    ):
        parts = [
            np.random.default_rng([r, count % 997]).integers(0, 256, count, np.uint8)
            for r, count in enumerate(counts)
        ]
        want = np.concatenate(parts)
        whole = np.full(want.size + 2, 7, np.uint8)
        data = whole[1:-1]
        start = sum(counts[:rank])
        data[start : start + counts[rank]] = parts[rank]
        wait(backend.all_gather(data, counts), timeout_s=TIMEOUT_S)
        assert (data == want).all(), f"{counts} bytes"
        assert whole[0] == whole[-1] == 7


def check_all_gather_reinterpreted(backend: Backend) -> None:
    """Elements may be of any type; counts are bytes."""
    data = np.full(3 * backend.size, -1.0)
    np.split(data, backend.size)[backend.rank][:] = backend.rank
    wait(backend.all_gather(data, [24] * backend.size), timeout_s=TIMEOUT_S)
    assert data.tolist() == [rank for rank in range(backend.size) for _ in range(3)]


def check_all_gather_rejects(backend: Backend) -> None:
    size = backend.size
    whole = np.zeros(4 * size, np.uint8)
    fixed = whole.copy()
    fixed.flags.writeable = False
    rejected = [
        (whole, [4] * size + [0]),
        (whole, [4] * (size - 1) + [3]),
        (whole, [-4, *([4] * (size - 1))]),
    ]
    if isinstance(backend, HostBackend):  # others only get buffers that they made
        rejected += [
            (np.zeros((2, 2 * size), np.uint8), [4] * size),
            (np.zeros(8 * size, np.uint8)[::2], [4] * size),
            (fixed, [4] * size),
        ]
    for data, counts in rejected:
        try:
            backend.all_gather(data, counts)
        except ValueError:
            continue
        raise AssertionError(f"{counts} of {data.shape} were accepted")


def check_all_gather_bytes(backend: Backend) -> None:
    for unit in (0, 1, 1000, 1_000_001):
        want = [bytes([rank]) * (rank * unit) for rank in range(backend.size)]
        got = wait(backend.all_gather_bytes(want[backend.rank]), timeout_s=TIMEOUT_S)
        assert got == want


def check_all_to_all(backend: Backend) -> None:
    """Block r of every rank reaches rank r, whatever the sizes; nothing around it is touched."""
    assert isinstance(backend, HostBackend)
    rank, size = backend.rank, backend.size
    for unit in (0, 1, 3, 10_007, 700_001):

        def block(sender: int, receiver: int, unit: int = unit) -> Buffer:
            numel = unit * ((sender + 2 * receiver) % 4)
            return np.full(numel, 16 * sender + receiver, np.uint8)

        out = [block(rank, peer) for peer in range(size)]
        want = [block(peer, rank) for peer in range(size)]
        whole = np.full(sum(part.size for part in want) + 2, 255, np.uint8)
        outgoing = np.concatenate(out)
        outgoing.flags.writeable = False
        work = backend.all_to_all(
            outgoing, [p.size for p in out], whole[1:-1], [p.size for p in want]
        )
        wait(work, timeout_s=TIMEOUT_S)
        assert (whole[1:-1] == np.concatenate(want)).all(), unit
        assert whole[0] == whole[-1] == 255
    try:
        backend.all_to_all(np.zeros(1, np.uint8), [1] * size, np.zeros(size, np.uint8), [2] * size)
    except ValueError:
        return
    raise AssertionError("sizes that do not fit were accepted")


def check_subset(backend: Backend) -> None:
    """Some of the ranks among themselves, while the others do something else."""
    assert isinstance(backend, HostBackend)
    rank, size = backend.rank, backend.size
    for ranks in ([0], list(range(0, size, 2)), list(range(1, size)) or [0], list(range(size))):
        part = backend.subset(ranks)
        assert (part is not None) == (rank in ranks)
        if part is None:
            continue
        assert (part.rank, part.size) == (ranks.index(rank), len(ranks))
        said = wait(part.all_gather_bytes(b"%d" % rank), timeout_s=TIMEOUT_S)
        assert said == [b"%d" % r for r in ranks]
        for numel in (3, 300_000):
            data = np.full(numel, rank, np.float32)
            all_reduce(part, data, "float32", Op.SUM)
            assert (data == sum(ranks)).all()
        data = np.full(9, rank, np.uint8)
        wait(part.broadcast(data, len(ranks) - 1), timeout_s=TIMEOUT_S)
        assert (data == ranks[-1]).all()
        part.close()


def check_many_in_flight(backend: Backend) -> None:
    """Works of all kinds and sizes under way at once, on a backend and on duplicates."""
    duplicates = [backend.duplicate() for _ in range(2)] if isinstance(backend, HostBackend) else []
    lanes = [backend, *duplicates]
    total = float(sum(range(backend.size)))
    pending: list[tuple[Any, Callable[[Any], bool]]] = []
    for turn in range(30):
        lane = lanes[turn % len(lanes)]
        numel = (1, 5_000, 300_000, 2_500_000)[turn % 4]
        data = np.full(numel, backend.rank + turn, np.float32)
        data = held(backend, data) if turn % 2 else data
        want = total + turn * backend.size
        work = lane.all_reduce(data, "float32", Op.SUM)
        pending.append((work, lambda _, data=data, want=want: bool((data == want).all())))
        part = 1 + numel // 10
        blocks = np.full(backend.size * part, backend.rank + turn, np.float32)
        mine = np.split(blocks, backend.size)[backend.rank]
        counts = [4 * part] * backend.size
        work = lane.reduce_scatter(blocks, counts, "float32", Op.SUM)
        pending.append((work, lambda _, mine=mine, want=want: bool((mine == want).all())))
        parts = np.zeros(backend.size * part, np.float32)
        np.split(parts, backend.size)[backend.rank][:] = backend.rank
        whole = np.repeat(np.arange(backend.size), part)
        work = lane.all_gather(parts, counts)
        pending.append((work, lambda _, parts=parts, whole=whole: bool((parts == whole).all())))
        name = b"%d" % turn
        pending.append(
            (lane.all_gather_bytes(name), lambda got, name=name: got == [name] * backend.size)
        )
        half = narrow(np.full(numel // 3, turn, np.float32), "bfloat16")
        pending.append(
            (
                lane.all_reduce(half, "bfloat16", Op.AVERAGE),
                lambda _, half=half, turn=turn: bool((widen(half, "bfloat16") == turn).all()),
            )
        )
    # Each rank waits in an order of its own.
    order = np.random.default_rng(backend.rank).permutation(len(pending))
    for index in order:
        work, good = pending[index]
        assert good(wait(work, timeout_s=TIMEOUT_S)), f"work {index}"
        assert work.test(), "a complete work stays complete"
    for lane in duplicates:
        lane.close()


def check_testing_only_when_it_may_progress_misses_nothing(backend: Backend) -> None:
    """All kinds of works at once, on a backend and a duplicate; another rank comes late."""
    other = backend.duplicate()
    counts = [400_000] * backend.size
    for late in range(backend.size):
        if backend.rank == late:
            time.sleep(0.02)
        works: list[Any] = [
            backend.all_reduce(np.ones(10, np.float32), "float32", Op.SUM),
            other.all_gather_bytes(b"%d" % late),
            backend.all_reduce(np.ones(700_000, np.float32), "float32", Op.AVERAGE),
            backend.all_reduce(held(backend, np.ones(700_000, np.float32)), "float32", Op.SUM),
            other.reduce_scatter(np.ones(sum(counts), np.uint8), counts, "uint8", Op.SUM),
            backend.all_gather(np.ones(sum(counts), np.uint8), counts),
            other.broadcast(np.ones(300_000, np.uint8), late),
        ]
        deadline = time.monotonic() + TIMEOUT_S
        while not all(work.test() for work in works):
            while not backend.may_progress():
                assert time.monotonic() < deadline
                time.sleep(50e-6)
    other.close()


def check_who_rests_between_tests_misses_nothing(backend: Backend) -> None:
    """Whether the backend can sleep or not; a rest ends in time where nothing moves."""
    rank, size = backend.rank, backend.size
    assert not backend.rest(1e-4, 1e-3), "nothing is under way"
    values = [np.full(900_000, 1.0 + k + rank, np.float32) for k in range(2)]
    data = [held(backend, each) for each in values]
    counts = [values[0].nbytes // 4 // size * 4] * size
    whole = held(backend, np.full(sum(counts) // 4, float(rank), np.float32))
    works = [backend.all_reduce(each, "float32", Op.SUM) for each in data]
    works.append(backend.all_gather(whole, counts))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(work.test() for work in works):
        assert time.monotonic() < deadline_s
        backend.rest(1e-4, 5e-3)
    for k, each in enumerate(data):
        np.testing.assert_array_equal(each, np.float32(sum(1 + k + r for r in range(size))))
    np.testing.assert_array_equal(whole[:: counts[0] // 4], np.arange(size))
    assert_same_bits(backend, whole)


def check_a_late_rank(backend: Backend) -> None:
    """No rank completes before the last one has joined."""
    wait(backend.all_gather_bytes(b""), timeout_s=TIMEOUT_S)
    if backend.rank == 0:
        time.sleep(0.2)
        joined_s = time.time()
    else:
        joined_s = 0.0
    data = np.ones(100_000, np.float32)
    all_reduce(backend, data, "float32", Op.SUM)
    done_s = time.time()
    stamps = wait(backend.all_gather_bytes(np.float64([joined_s, done_s]).tobytes()))
    times = np.array([np.frombuffer(stamp) for stamp in stamps])
    assert (times[:, 1] >= times[0, 0]).all()


def check_notices(backend: Backend) -> None:
    """Each reaches the one rank that it is for, those of each sender in their order."""
    assert isinstance(backend, HostBackend)
    rank = backend.rank
    others = [peer for peer in range(backend.size) if peer != rank]
    assert backend.poll_notices() == []
    wait(backend.all_gather_bytes(b""), timeout_s=TIMEOUT_S)
    sizes = [10, 3_000_000, 0, 50_000]
    for peer in others:
        for size in sizes[peer % 2 :]:
            backend.send_notice(peer, b"%d to %d: " % (rank, peer) + b"." * size)
    wanted = {
        sender: [b"%d to %d: " % (sender, rank) + b"." * n for n in sizes[rank % 2 :]]
        for sender in others
    }
    got: dict[int, list[bytes]] = {sender: [] for sender in others}
    deadline = time.monotonic() + TIMEOUT_S
    while got != wanted and time.monotonic() < deadline:
        for sender, payload in backend.poll_notices():
            got[sender].append(payload)
        time.sleep(1e-4)
    assert got == wanted
    # Large notices need this rank's calls until they are sent.
    work = backend.all_gather_bytes(b"")
    while not work.test() or backend.sends_notices:
        assert backend.poll_notices() == []


def check_identity(backend: Backend) -> None:
    ranks = wait(backend.all_gather_bytes(b"%d of %d" % (backend.rank, backend.size)))
    assert ranks == [b"%d of %d" % (rank, backend.size) for rank in range(backend.size)]
    assert 0 <= backend.local_rank < backend.local_size <= backend.size


def check_bad_buffers(backend: Backend) -> None:
    for data, dtype in (
        (np.zeros((2, 2), np.float32), "float32"),
        (np.zeros(8, np.float32)[::2], "float32"),
        (np.zeros(3, np.uint8), "float32"),
        (np.zeros(4, np.float32), "complex64"),
        (np.frombuffer(b"abcd", np.float32), "float32"),
    ):
        try:
            backend.all_reduce(data, dtype, Op.SUM)
        except ValueError:
            continue
        raise AssertionError(f"{dtype} buffer {data!r} was accepted")


def checks() -> Iterator[tuple[str, Callable[[Backend], None]]]:
    """Every check with its name."""
    for dtype in ITEM_BYTES:
        for op in Op:
            yield f"{dtype}-{op.value}", lambda b, dtype=dtype, op=op: check_reduce(b, dtype, op)
    for name, function in sorted({**globals(), **vars(segment_checks)}.items()):
        if name.startswith("check_") and name != "check_reduce":
            yield name.removeprefix("check_"), function


CHECKS = dict(checks())

LARGEST = frozenset({"100_mb", "100_mb_of_halves"})
"""Those whose size is what they are about; others have several chunks too."""
