"""The command line as a whole: commands, exit codes, one line for what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_runs import TRACES, assert_refused, cost_file, wfbp
from wfbp.cli.app import COMMANDS


def test_help_names_every_command() -> None:
    code, out, _ = wfbp("--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_no_command_shows_the_help() -> None:
    code, out, err = wfbp()
    assert (code, out) == (2, "")
    assert all(name in err for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pla",), "wfbp: error: No such command 'pla'."),
        (("--nothing",), "wfbp: error: No such option '--nothing'."),
        (("plan",), "wfbp plan: error: Missing argument 'TRACE'."),
        (("plan", "t.json", "--cost"), "wfbp plan: error: Option '--cost' requires an argument."),
        (("simulate", "no", "--cost", "no"), "wfbp simulate: error: no: no such file"),
        (("report", "no"), "wfbp report: error: no: no such directory"),
        (("timeline", "no"), "wfbp timeline: error: Invalid value"),
        (("doctor", "-H", "a:b"), "wfbp doctor: error: 'a:b' in 'a:b' is not HOST or HOST:SLOTS"),
        (
            ("bench", "training", "--rounds"),
            "wfbp bench: error: Option '--rounds' requires an",
        ),
        (("bench", "no"), "wfbp bench: error: No such command 'no'."),
        (("plan", "t.json", "u.json", "--cost", "c.json"), "unexpected extra argument"),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert_refused(wfbp(*arguments), message)


@pytest.mark.parametrize("name", ["", *COMMANDS, "bench training"])
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = wfbp(*name.split(), "--help")
    assert code == 0
    assert out.startswith(f"Usage: wfbp {name}")
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in out.partition("Commands:")[2]  # each is told in a whole sentence


def test_of_all_ranks_the_first_one_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("bench", "training", "--rounds", "0")
    monkeypatch.setenv("PMI_RANK", "0")
    assert_refused(wfbp(*wrong), "wfbp bench: error: Invalid value")
    assert_refused(wfbp("probe", "--seconds", "-1"), "wfbp probe: error: Invalid value")
    monkeypatch.setenv("PMI_RANK", "1")
    assert wfbp(*wrong) == (2, "", "")
    assert wfbp("probe", "--seconds", "-1") == (2, "", "")
    assert_refused(wfbp("plan"), "Missing argument")  # which every process starts for itself


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wfbp", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("wfbp ")


def test_planning_in_json_loads_nothing_heavy(tmp_path: Path) -> None:
    """So that an answer comes within a second; what takes long is not loaded in vain."""
    code = (
        "import sys\n"
        "from wfbp.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leaving: assert not leaving.code\n"
        "heavy = {'rich', 'plotly', 'mpi4py', 'torch', 'jax', 'scipy', 'sklearn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    arguments = ["plan", TRACES / "vgg-16.json", "--cost", cost_file(tmp_path)]
    for schedule in ("oasr",):
        subprocess.run(
            [sys.executable, "-c", code, *arguments, "--schedule", schedule, "--json"],
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    """As in ``wfbp plan ... | head``."""
    command = [sys.executable, "-m", "wfbp", "plan", TRACES / "densenet-201.json"]
    command += ["--cost", cost_file(tmp_path), "--schedule", "layerwise", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdout.close()
            said = process.stderr.read()
            assert process.wait(60) == 1
        finally:
            process.kill()  # else the block would wait for it for ever
    assert said == b""
