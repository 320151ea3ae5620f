"""Settings and their environment variables."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from wfbp.config import Config, read_environment, unknown_variables


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()


def test_every_field_has_a_variable_of_its_type() -> None:
    examples: dict[type, tuple[str, Any]] = {
        str: ("error", "error"),
        int: ("7", 7),
        float: ("7.5", 7.5),
        bool: ("0", False),
        tuple: ("7-12", (7, 12)),
    }
    for field in fields(Config):
        if field.name in ("schedule", "compression"):
            continue  # not every text
        text, value = examples[type(field.default)]
        config = Config.from_environment({f"WFBP_{field.name.upper()}": f" {text} "})
        assert getattr(config, field.name) == value
        assert type(getattr(config, field.name)) is type(field.default)


def test_other_variables_are_not_read() -> None:
    assert Config.from_environment({"SCHEDULE": "layerwise", "WFBP_OTHER": "1"}) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("WFBP_THRESHOLD_BYTES", "25MM", "expected a size in bytes, such as 4096, 25M"),
        ("WFBP_THRESHOLD_BYTES", "0", "at least 1"),
        ("WFBP_WARMUP_STEPS", "0", "at least 1"),
        ("WFBP_PROFILE_STEPS", "1.5", "expected a whole number"),
        ("WFBP_TIMEOUT_S", "soon", "expected a number"),
        ("WFBP_TIMEOUT_S", "1e10", r"at least 0.01 and at most 1e\+09"),
        ("WFBP_PROBE_BUDGET_S", "1e400", r"at least 0.0 and at most 1e\+09"),
        ("WFBP_THRESHOLD_BYTES", "9" * 40, r"9+; expected a number of .* at most 4.6\d*e\+18"),
        ("WFBP_ZERO_COPY_MIN_BYTES", "8589934592G", "at most"),
        ("WFBP_RECORD_STEPS", f"0-{'9' * 20}", "two steps from 0 to"),
        ("WFBP_REPLAN_THRESHOLD", "-0.1", "at least 0"),
        ("WFBP_LOG_LEVEL", "loud", "warning"),
        ("WFBP_SCHEDULE", "foo", "schedule is 'foo'; expected one of auto, .*oasr"),
        ("WFBP_SCHEDULE", "oasrr", r"\(did you mean 'oasr'\?\); expected one of auto"),
        ("WFBP_SHARED_MEMORY", "perhaps", "expected 1 or 0"),
    ],
)
def test_what_cannot_be_read_names_the_variable(variable: str, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{text}'.*{told}"):
        Config.from_environment({variable: text})


@pytest.mark.parametrize("name", ["threshold_bytes", "trial_steps", "timeout_s", "record_steps"])
def test_a_number_of_any_length_is_refused_in_a_short_line(name: str) -> None:
    for digits in (400, 5000):  # int() refuses the second one itself
        _, problem = read_environment({f"WFBP_{name.upper()}": "9" * digits})
        assert problem.startswith(f"WFBP_{name.upper()}='99")
        assert len(problem) < 250


def test_sizes_are_exact_beyond_what_a_float_holds() -> None:
    assert Config.from_environment({"WFBP_THRESHOLD_BYTES": str(2**60 + 1)}).threshold_bytes == (
        2**60 + 1
    )


def test_all_that_cannot_be_read_is_told_with_the_remedy() -> None:
    variables = {"WFBP_TIMEOUT_S": "soon", "WFBP_EXCHANGE_ALONE": "x", "WFBP_TRIAL_STEPS": "7"}
    config, unreadable = read_environment(variables)
    assert config == Config(trial_steps=7)
    assert unreadable == (
        "WFBP_TIMEOUT_S='soon': expected a number; correct or unset it; "
        "WFBP_EXCHANGE_ALONE='x': expected 1 or 0; correct or unset it"
    )
    assert read_environment({}) == (Config(), "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("25M", 25 * 2**20),
        ("25MiB", 25 * 2**20),
        ("25 MB", 25_000_000),
        ("1.5k", 1536),
        ("2g", 2**31),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert Config.from_environment({"WFBP_THRESHOLD_BYTES": text}).threshold_bytes == value


def test_unknown_variables_are_told_with_the_nearest_name() -> None:
    told = unknown_variables(
        {"WFBP_SHEDULE": "oasr", "WFBP_ZZ": "", "WFBP_REPLAN_THRESHOLD": "0", "A": ""}
    )
    assert "WFBP_SHEDULE (did you mean WFBP_SCHEDULE?), WFBP_ZZ" in told
    assert "DRIFT" not in told
    assert not unknown_variables({"WFBP_REPLAN_THRESHOLD": "0"})
    assert "RUN_DIR" not in unknown_variables({"WFBP_RANDOM": "1"}), "a name of before"


@pytest.mark.parametrize(
    "values", [{"trial_steps": 0}, {"probe_budget_s": -1.0}, {"log_level": "x"}]
)
def test_bad_values_are_refused_when_made(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Config(**values)
