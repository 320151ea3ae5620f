"""Every block of Python in the documentation runs on two ranks, as a reader would copy it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.runs import outcome
from tests.support.snippets import Diff, fenced, snippets

pytest.importorskip("jax")
pytest.importorskip("tensorboardX")

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.timeout(260)]

NAMES = [snippet.name for snippet in snippets()]


TUTORIALS = ("tutorials/jax.md", "tutorials/arrays.md")


def printed(name: str, mpi: str = "mpich") -> str:
    """What rank 0 printed, where no rank failed; under Open MPI the tutorials alone are run."""
    chosen = () if mpi == "mpich" else TUTORIALS
    found = outcome("documents", 2, *chosen, mpi=mpi, timeout=250, preloaded="torch")
    assert found.run.rc == 0, found.run
    for rank, results in enumerate(found.ranks):
        assert not results[name]["error"], f"rank {rank}: {results[name]['error']}"
    text: str = found.ranks[0][name]["printed"]
    return text


@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str) -> None:
    printed(name)


MOVED = ("how-to/move-from-ddp.md#0", "how-to/move-from-ddp.md#1")
PROGRAMS = ("README.md:1", "tutorials/quickstart.md", *MOVED)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_loss_falls(name: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed(name))]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


README, GUIDE = Path("README.md"), Path("docs/how-to/move-from-ddp.md")


def test_the_diff_from_ddp_is_five_lines() -> None:
    """README shows the changed lines, the guide the whole program, which is README's."""
    diff = Diff.of(GUIDE)
    assert diff.after == fenced(README, "python")[0]
    assert diff.changes == Diff.of(README).changes
    assert signs(diff) == (4, 5)


def signs(diff: Diff) -> tuple[int, int]:
    """Lines that are removed and added."""
    removed = sum(line.startswith("-") for line in diff.changes)
    return removed, len(diff.changes) - removed


def test_a_real_program_changes_eight_more_lines() -> None:
    """Six are replaced, one is added and one removed, apart from those of the small program."""
    small, real = Diff.of(GUIDE), Diff.of(GUIDE, 1)
    assert set(small.changes) <= set(real.changes)
    removed, added = signs(real)
    assert (removed - 4, added - 5) == (6 + 1, 6 + 1)


def test_the_readme_shows_what_its_program_prints() -> None:
    assert printed("README.md:1") == fenced(README, "text")[0]


@pytest.mark.parametrize("number", range(2))
def test_ddp_trains_equally(number: int, tmp_path: Path) -> None:
    """The guide's programs for DDP, by torchrun, print the losses of those for wfbp."""
    program = tmp_path / "train.py"
    program.write_text(Diff.of(GUIDE, number).before)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ddp = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(program)],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
    )
    # Not its exit status: PyTorch's gloo sometimes aborts a process that has printed everything.
    losses = [re.findall(r"loss ([\d.]+)", text) for text in (ddp.stdout, printed(MOVED[number]))]
    assert len(losses[0]) == 4, ddp.stderr
    assert losses[0] == losses[1]


def learns(name: str, mpi: str) -> None:
    """Without training the loss is 3.5 and 1.7."""
    (loss,) = re.findall(r"loss ([\d.]+)", printed(name, mpi))
    assert float(loss) < 1.5


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_learns(name: str) -> None:
    learns(name, "mpich")


@pytest.mark.parametrize("mpi", ["openmpi"])
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_learns_under_open_mpi(name: str, mpi: str) -> None:
    learns(name, mpi)
