"""Segments, the parts of a buffer with data in other memory, as every backend handles them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from wfbp.comm.arrays import Buffer, Segment
from wfbp.comm.backend import Backend
from wfbp.comm.waiting import wait
from wfbp.core.types import Op

TIMEOUT_S = 60.0
STRIDE = 16
"""Segments begin at multiples of this many elements, so that there are gaps between them."""

SHAPES = (((), 5), ((7,), 0), ((5, 40), 100), ((30_000, 1_100_001, 3), 0), ((6, 70_000), 300_000))
"""Elements of the segments of a message and of what follows: few, and more than a chunk."""


def _starts(lengths: list[int]) -> tuple[list[int], int]:
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // STRIDE) * STRIDE
    return starts, end


def _values(rank: int, numel: int) -> Buffer:
    """Whole numbers, whose sums are exact."""
    return ((np.arange(numel) * (rank + 1)) % 61).astype(np.float32)


def check_reduced_segments(backend: Backend) -> None:
    """They are read where they lie, and not written; results are in the buffer, and all equal."""
    for lengths, rest in SHAPES:
        for dtype, op in (("float32", Op.AVERAGE), ("float32", Op.MAX), ("int32", Op.SUM)):
            starts, end = _starts(list(lengths))
            kind = np.dtype(dtype)
            all_ranks = [_values(r, end + rest).astype(kind) for r in range(backend.size)]
            mine = all_ranks[backend.rank]
            data = np.full(end + rest, -99, kind)
            sources = [
                mine[start : start + length].copy()
                for start, length in zip(starts, lengths, strict=True)
            ]
            segments = [
                Segment(start * kind.itemsize, source.view(np.uint8))
                for start, source in zip(starts, sources, strict=True)
            ]
            data[end:] = mine[end:]
            if sources:  # one lies in the buffer itself: a gradient that was written there
                slot = data[starts[-1] : starts[-1] + lengths[-1]]
                slot[:] = sources[-1]
                segments[-1] = Segment(starts[-1] * kind.itemsize, slot.view(np.uint8))
            wait(backend.all_reduce(data, dtype, op, segments), timeout_s=TIMEOUT_S)
            stacked = np.stack(all_ranks)
            want = stacked.max(0) if op is Op.MAX else stacked.sum(0)
            if op is Op.AVERAGE:
                want = want / np.float32(backend.size)
            where = f"{lengths} and {rest}, {dtype} {op.value}"
            for start, length, source in zip(starts, lengths, sources, strict=True):
                np.testing.assert_array_equal(
                    data[start : start + length], want[start : start + length], where
                )
                np.testing.assert_array_equal(source, mine[start : start + length], where)
            np.testing.assert_array_equal(data[end:], want[end:], where)


def check_delivered_segments(backend: Backend) -> None:
    """Results go where segments want them, also into what they were read from; all are equal.

    Where a backend does not deliver into a buffer, nobody may ask it to.
    """
    for lengths, rest in SHAPES:
        starts, end = _starts(list(lengths))
        data = backend.zeros(4 * (end + rest)).view(np.float32)
        if not backend.copies_segments(data):
            continue
        all_ranks = [_values(r, end + rest) for r in range(backend.size)]
        mine, want = all_ranks[backend.rank], sum(all_ranks)
        data[:] = -99
        data[end:] = mine[end:]
        segments, results = [], []
        for k, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            source = mine[start : start + length].copy()
            slot = data[start : start + length]
            result = (source, np.full(length, 7, np.float32), None)[k % 3]
            if k % 2:  # written there by who made it
                slot[:], source = source, slot
            segments.append(Segment(4 * start, source.view(np.uint8), (), result))
            results.append(slot if result is None else result)
        wait(backend.all_reduce(data, "float32", Op.SUM, segments), timeout_s=TIMEOUT_S)
        for start, result in zip(starts, results, strict=True):
            np.testing.assert_array_equal(result, want[start : start + result.size], str(lengths))
        np.testing.assert_array_equal(data[end:], want[end:], str(lengths))


def check_memory_that_comes_and_goes(backend: Backend) -> None:
    """Buffers of the backend may be dropped as soon as their work is complete."""
    for turn in range(20):
        data = backend.zeros(4 * (20_000 + 90_000 * (turn % 3))).view(np.float32)
        assert not data.any()
        data += backend.rank + turn
        wait(backend.all_reduce(data, "float32", Op.SUM), timeout_s=TIMEOUT_S)
        assert (data == sum(range(backend.size)) + turn * backend.size).all()
        kept = backend.zeros(64 + turn)
        assert not kept.any()


def check_scattered_and_gathered_segments(backend: Backend) -> None:
    """Parts of each rank's block lie elsewhere; the last ranks' may be shorter, or empty."""
    rank, size = backend.rank, backend.size
    for lengths, rest in SHAPES:
        longest = [-(-length // size) for length in lengths]
        starts, end = _starts(longest)
        block = end + rest
        cuts = [
            [min(length, r * most) for r in range(size + 1)]
            for length, most in zip(lengths, longest, strict=True)
        ]
        whole = [[_values(r + k, length) for r in range(size)] for k, length in enumerate(lengths)]
        rests = [_values(r + 9, size * rest).reshape(size, rest) for r in range(size)]
        data = np.full((size, block), -99, np.float32)
        data[:, end:] = rests[rank]
        sources = [ranks[rank].copy() for ranks in whole]
        segments = [
            Segment(4 * start, source, [4 * (b - a) for a, b in pairwise(cut)])
            for start, source, cut in zip(starts, sources, cuts, strict=True)
        ]
        counts = [4 * block] * size
        flat = data.reshape(-1)
        wait(
            backend.reduce_scatter(flat, counts, "float32", Op.SUM, segments),
            timeout_s=TIMEOUT_S,
        )
        where = f"{lengths} and {rest}"
        for k, (start, cut) in enumerate(zip(starts, cuts, strict=True)):
            own = slice(cut[rank], cut[rank + 1])
            found = data[rank, start : start + cut[rank + 1] - cut[rank]]
            np.testing.assert_array_equal(found, sum(whole[k])[own], where)
            np.testing.assert_array_equal(sources[k], whole[k][rank], where)
        np.testing.assert_array_equal(data[rank, end:], sum(r[rank] for r in rests), where)

        for k, cut in enumerate(cuts):
            kept = sources[k][cut[rank] : cut[rank + 1]].copy()
            sources[k][:] = -99
            sources[k][cut[rank] : cut[rank + 1]] = kept
        wait(backend.all_gather(flat, counts, segments), timeout_s=TIMEOUT_S)
        for k, cut in enumerate(cuts):
            want = np.concatenate([whole[k][r][cut[r] : cut[r + 1]] for r in range(size)])
            np.testing.assert_array_equal(sources[k], want, where)
        for r in range(size):
            want = sum(each[r] for each in rests)
            np.testing.assert_array_equal(data[r, end:], want, where)
