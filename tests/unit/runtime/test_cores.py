"""Warnings of ranks that share cores, and of more threads than cores."""

from __future__ import annotations

import pytest

from wfbp.runtime.cores import advice, num_threads, part_of_cores


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "words"),
    [
        (3, 2, 1, ("3 ranks use the same 2 cores", "Slurm: --cpus-per-task")),
        (2, 1, 1, ("2 ranks use one core",)),
        (2, 8, 8, ("2 ranks with 8 threads each use the same 8 cores", "OMP_NUM_THREADS=4")),
        (1, 2, 4, ("4 threads use 2 cores", "OMP_NUM_THREADS=2")),
    ],
)
def test_what_is_wrong(ranks: int, cores: int, threads: int, words: tuple[str, ...]) -> None:
    assert all(word in advice(ranks, cores, threads) for word in words)


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(2, 2, 1), (1, 8, 8), (4, 8, 2)])
def test_nothing_is_wrong(ranks: int, cores: int, threads: int) -> None:
    assert advice(ranks, cores, threads) == ""


@pytest.mark.parametrize(("told", "threads"), [("4", 4), ("4,2", 4), ("", None), ("many", None)])
def test_threads(told: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert num_threads() == threads


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "part"),
    [
        (2, 2, 1, 1.0),
        (3, 2, 1, 1.0),  # they take turns
        (1, 1, 1, 1.0),
        (1, 16, 16, 1 / 16),
        (2, 16, 8, 1 / 8),
        (1, 16, 15, 0.0),
        (2, 4, 1, 0.0),
        (1, 16, None, 1 / 16),  # as frameworks do, it uses all
    ],
)
def test_what_a_communication_thread_takes(
    ranks: int, cores: int, threads: int | None, part: float
) -> None:
    assert part_of_cores(ranks, cores, threads) == part
