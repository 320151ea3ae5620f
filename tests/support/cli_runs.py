"""The command line, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from wfbp.cli.app import main

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "wfbp/cli/examples/traces"


class Outcome(NamedTuple):
    """The exit code, and what was printed."""

    code: object
    out: str
    err: str


def wfbp(*arguments: object) -> Outcome:
    """Run ``wfbp`` with these arguments."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as leaving,
    ):
        main([str(a) for a in arguments])
    return Outcome(leaving.value.code, out.getvalue(), err.getvalue())


def answer(*arguments: object) -> Any:
    """The JSON that a successful command prints."""
    outcome = wfbp(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def assert_refused(outcome: Outcome, *words: str) -> None:
    """Bad input: exit code 2, nothing on stdout, one line on stderr that has these words."""
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    assert outcome.err.startswith("wfbp")
    assert "error: " in outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    for word in words:
        assert word in outcome.err, outcome.err


def write(path: Path, data: object) -> Path:
    """A JSON file; text and bytes are written as they are."""
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def cost_file(folder: Path, **changes: object) -> Path:
    """The published cost of 10GbE among 16 workers, with keys replaced."""
    all_reduce = {"alpha_s": 9.081e-4, "beta_s_per_byte": 7.396e-10}
    document = {"format": "wfbp-cost/1", "all_reduce": all_reduce, "kappa": 0} | changes
    return write(folder / "cost.json", document)
