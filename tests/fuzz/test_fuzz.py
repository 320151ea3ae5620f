"""A sample of random programs, what was found before, and the tools around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fuzz.draw import draw
from tests.fuzz.driver import reductions, run_job
from tests.fuzz.interpreter import Run, difference, rounding_decides
from tests.fuzz.ordinary import MODES, programs
from tests.fuzz.program import Layer, Optimizer, Program, Step, dumps, loads, size_of

CASES = sorted(Path(__file__).with_name("cases").glob("*.json"))

PLAIN = Program(
    seed=3,
    ranks=2,
    layers=(Layer("linear"), Layer("linear", late=True), Layer("linear without bias")),
    optimizers=(Optimizer("momentum"),),
    actions=(Step(), Step(passes=(1, 0, 1))),
)


def right(programs: Sequence[Program], mpi: str) -> None:
    try:
        count, failure = run_job(programs, mpi)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert failure is None, f"{failure.problem}\n{dumps(failure.program)}"
    assert count == len(programs)


@pytest.mark.parallel
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "mpi", "count"), [(2, "mpich", 5), (3, "mpich", 5), (2, "openmpi", 3)]
)
def test_random_programs(ranks: int, mpi: str, count: int) -> None:
    right([draw(f"sample {mpi}/{k}", ranks) for k in range(count)], mpi)


@pytest.mark.parallel
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", MODES)
def test_ordinary_programs(mode: str) -> None:
    right(programs(mode), "mpich")


@pytest.mark.parallel
@pytest.mark.timeout(400)
def test_what_failed_before() -> None:
    stored = [loads(file.read_text()) for file in CASES]
    for ranks in sorted({p.ranks for p in stored}):
        right([p for p in stored if p.ranks == ranks], "mpich")


def test_programs_are_stored_as_they_are() -> None:
    for k in range(200):
        program = draw(f"stored/{k}", 2 + k % 2)
        assert loads(dumps(program)) == program
        assert draw(f"stored/{k}", 2 + k % 2) == program


def test_reductions_end() -> None:
    program = draw("reductions", 3)
    count = 0
    while True:
        smaller = [p for p in reductions(program) if size_of(p) < size_of(program)]
        if not smaller:
            break
        program = smaller[-1]
        count += 1
        assert loads(dumps(program)) == program
    assert count > 5
    assert program.ranks == 2
    assert len(program.layers) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, seed=4),
        replace(PLAIN, actions=(Step(), Step())),
        replace(PLAIN, optimizers=(Optimizer("sgd"),)),
        replace(PLAIN, layers=(Layer("linear"), Layer("linear"), Layer("linear without bias"))),
    ],
)
def test_another_program_is_noticed(other: Program) -> None:
    run = Run(PLAIN, None)
    run.run()
    same = Run(PLAIN, None)
    same.run()
    assert not difference(run, same)
    different = Run(other, None)
    different.run()
    assert difference(run, different)


def test_a_wrong_result_in_bfloat16_is_no_rounding() -> None:
    half = replace(PLAIN, dtype="bfloat16")
    run, reference, wrong = (Run(p, None) for p in (half, half, replace(half, seed=4)))
    for one in (run, reference, wrong):
        one.run()
    shaken = Run(half, None, shaken=1)
    shaken.run()
    assert not difference(run, reference)
    assert any(
        isinstance(a, torch.Tensor) and not torch.equal(a, b)
        for (_, found), (_, expected) in zip(shaken.seen, reference.seen, strict=True)
        for a, b in zip(found, expected, strict=True)
    )
    assert difference(wrong, reference)
    assert not rounding_decides(wrong, reference)


@pytest.mark.parallel
def test_a_job_that_fails_is_told() -> None:
    impossible = replace(PLAIN, actions=(replace(PLAIN.actions[0], zero="never"),))
    count, failure = run_job([PLAIN, impossible, PLAIN])
    assert count == 1
    assert failure is not None
    assert failure.program == impossible
    assert "zero is 'never'" in failure.problem
