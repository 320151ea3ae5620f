"""Tables in a terminal: nothing is cut, and texts fold where the terminal is narrow."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.support.cli_runs import TRACES, cost_file
from wfbp.cli.app import main
from wfbp.cli.tables import print_table
from wfbp.core.planners import PLANNERS


class Terminal(io.StringIO):
    """What is printed to a terminal of 80 columns without colours."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    return Terminal()


def shown(terminal: Terminal, *arguments: object) -> str:
    """The output of a command there."""
    with contextlib.redirect_stdout(terminal), pytest.raises(SystemExit) as leaving:
        main([str(a) for a in arguments])
    assert leaving.value.code == 0
    text = terminal.getvalue()
    assert "…" not in text
    return text


def test_a_plan_keeps_its_columns_and_reasons(terminal: Terminal, tmp_path: Path) -> None:
    trace, cost = TRACES / "resnet-50.json", cost_file(tmp_path)
    text = shown(terminal, "plan", trace, "--cost", cost, "--schedule", "independent")
    assert "80: fc.1 ... down.2" in text
    assert re.search(r" 3 +all_gather +2: conv1\.0 .* 169\.512 *\n", text)
    assert re.search(r" 3 +0\.468 +leaves when forward starts; ", text)
    assert max(map(len, text.splitlines())) <= 80


def test_all_schedules_fit_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    trace, cost = TRACES / "resnet-50.json", cost_file(tmp_path)
    text = shown(terminal, "simulate", trace, "--cost", cost, "--schedule", "all")
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("workers ") == 3  # each part has the first column
    assert all(f" {name}" in text for name in (*PLANNERS, "LB", "speed-up"))


def test_a_wide_table_stays_whole_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [f"heading {k}" for k in range(40)]
    print_table("title", columns, [[str(k) for k in range(40)]])
    head = capsys.readouterr().out.splitlines()[2]
    assert head.count("heading") == 40


def test_a_cell_longer_than_the_terminal_is_printed_whole(terminal: Terminal) -> None:
    with contextlib.redirect_stdout(terminal):
        print_table("title", ["<name", "size"], [["n" * 100, "7"]])
    assert terminal.getvalue().count("n") == 101  # with the heading
    assert re.search(r"\b7\b", terminal.getvalue())
