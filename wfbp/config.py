"""The settings of a process: one frozen object, the only reader of the ``WFBP_*`` variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from wfbp.core.checks import one_of
from wfbp.core.planners import SCHEDULES
from wfbp.core.types import COMPRESSIONS


@dataclass(frozen=True, slots=True)
class Config:
    """Settings, each with its environment variable: ``WFBP_`` and the field's name in capitals.

    Args:
        schedule: planner that groups gradients, if the program does not choose one; ``auto``,
            ``oasr``, ``hybrid`` and ``single`` are recommended.
        compression: how gradients are sent if the program does not choose: ``none``, ``fp16``,
            ``bf16``, ``int8``, ``int4``, or what the plan chooses up to these, as ``auto:int8``.
        threshold_bytes: group size of the ``threshold`` schedule and of the first steps, and start
            of those that ``dear`` tries; a variable may have a unit, as in ``25M``.
        zero_copy_min_bytes: tensors of at least this size are not packed; may have a unit.
        shared_memory: whether ranks of one host may read each other's memory; all must allow it.
        reproducible: whether several hosts add in the order of all ranks, as one host does, instead
            of first the ranks of each host; the network then carries more.
        torch_env: whether ranks that MPI or Slurm starts get torchrun's variables (``RANK`` and
            others) when PyTorch is imported.
        check_launcher: whether to fail if a launcher promised more ranks than MPI found.
        warmup_steps: steps left out of every measurement after a start or a change of plan.
        profile_steps: steps whose compute times are measured, with communication delayed.
        trial_steps: steps measured per candidate plan in two rounds of a trial; the whole trial
            takes at most 30 times as many.
        replan_threshold: after a lasting relative change of the iteration time by this much, ranks
            measure and plan again; 0: never.
        probe_budget_s: seconds that measuring the network's cost curve may take.
        stall_warning_s: a wait this long is reported, with the ranks that lag.
        timeout_s: a wait this long raises ``StallError`` on every rank.
        abort_grace_s: how long a failed rank lets the others report before it ends the job.
        log_level: of the logger ``wfbp``.
        summary_steps: rank 0 logs each optimizer's report after this many steps; 0: never.
        record: directory where every rank records its run, for ``wfbp report`` and ``wfbp
            timeline``; empty: none.
        record_steps: first and last step of the timeline; as a variable ``100-120``.
        exchange_alone: whether a single rank's PyTorch optimizers exchange gradients with itself,
            to show the cost.

    Example:
        >>> Config.from_environment({"WFBP_SCHEDULE": "oasr"}).schedule
        'oasr'
    """

    schedule: str = "auto"
    compression: str = "none"
    threshold_bytes: int = 25 * 2**20
    zero_copy_min_bytes: int = 2**18
    shared_memory: bool = True
    reproducible: bool = False
    torch_env: bool = True
    check_launcher: bool = True
    warmup_steps: int = 3
    profile_steps: int = 5
    trial_steps: int = 4
    replan_threshold: float = 0.25
    probe_budget_s: float = 2.0
    stall_warning_s: float = 60.0
    timeout_s: float = 600.0
    abort_grace_s: float = 5.0
    log_level: str = "warning"
    summary_steps: int = 0
    record: str = ""
    record_steps: tuple[int, int] = (0, 999)
    exchange_alone: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:  # nor is nan
                raise ValueError(
                    f"{name} is {str(value)[:_SHOWN]}; expected a number of at least {least} and "
                    f"at most {most:g}"
                )
        first, last = self.record_steps
        if not 0 <= first <= last <= _MOST_STEPS:
            raise ValueError(
                f"record_steps is {first}-{last}; expected two steps from 0 to {_MOST_STEPS}, the "
                "first one first"
            )
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("compression", self.compression, tuple(COMPRESSIONS))
        one_of("log_level", self.log_level, LOG_LEVELS)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read the settings from environment variables.

        Raises:
            ValueError: a variable's value cannot be read; the message names the variable.

        Example:
            >>> Config.from_environment({"WFBP_THRESHOLD_BYTES": "4MiB"}).threshold_bytes
            4194304
        """
        config, unreadable = read_environment(environment)
        if unreadable:
            raise ValueError(unreadable)
        return config


def read_environment(environment: Mapping[str, str] | None = None) -> tuple[Config, str]:
    """The environment's settings, and the problems with unreadable ones (empty if none)."""
    source = variables(environment)
    values: dict[str, Any] = {}
    problems = []
    for field in fields(Config):
        name = f"WFBP_{field.name.upper()}"
        if name not in source:
            continue
        convert, expected = _READERS.get(field.name) or _READERS[type(field.default).__name__]
        problem = f"expected {expected}"
        try:
            value = convert(source[name].strip())
            problem = ""
            Config(**{field.name: value})
            values[field.name] = value
        except ValueError as error:
            text = source[name][:_SHOWN]
            problems.append(f"{name}={text!r}: {problem or error}; correct or unset it")
    return Config(**values), "; ".join(problems)


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The ``WFBP_*`` variables that are set, by name."""
    source = os.environ if environment is None else environment
    return {name: source[name] for name in sorted(source) if name.startswith("WFBP_")}


def unknown_variables(environment: Mapping[str, str] | None = None) -> str:
    """A warning about ``WFBP_*`` variables that are no settings; empty if there are none."""
    known = [f"WFBP_{field.name.upper()}" for field in fields(Config)]
    parts = []
    for name in (n for n in variables(environment) if n not in known):
        near = get_close_matches(name, known, 1)
        parts.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"not a setting, and ignored: {', '.join(parts)}" if parts else ""


_SIZE = re.compile(r"(\d+|\d+\.\d+(?=\s*[KMG]))\s*([KMG]?)((?<=[KMG])i?B|)", re.IGNORECASE)


def num_bytes(text: str) -> int:
    """A size from text such as ``4096``, ``25M``, ``1.5GiB``; ``ValueError`` if it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size in bytes")
    number, prefix, unit = match.groups()
    # As usual in shells: K, M, G and KiB are powers of 1024, KB of 1000.
    base = 1000 if unit.lower() == "b" else 1024
    return round(Fraction(number) * Fraction(base) ** " kmg".index(prefix.lower() or " "))


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text == "1"


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if int(first) > int(last):
        raise ValueError(text)
    return int(first), int(last)


_SIZE_READER = num_bytes, "a size in bytes, such as 4096, 25M, 25MiB or 25MB"
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "record_steps": (_steps, "the first and the last step, such as 100-120"),
    "threshold_bytes": _SIZE_READER,
    "zero_copy_min_bytes": _SIZE_READER,
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "bool": (_switch, "1 or 0"),
}
"""How a variable is read, by field or by the type of its default, and the expected text."""

LOG_LEVELS = ("debug", "info", "warning", "error")

_MOST_STEPS = 10**12
_BYTES = 1, 2**62  # as many as 64-bit integers count
_STEPS = 1, _MOST_STEPS
_SECONDS = 0.0, 1e9  # thirty years; the operating system's clocks end at ten times that
_LIMITS: dict[str, tuple[float, float]] = {
    "threshold_bytes": _BYTES,
    "zero_copy_min_bytes": _BYTES,
    "warmup_steps": _STEPS,
    "profile_steps": _STEPS,
    "trial_steps": _STEPS,
    "replan_threshold": (0, 1e9),
    "summary_steps": (0, _MOST_STEPS),
    "probe_budget_s": _SECONDS,
    "stall_warning_s": (0.01, 1e9),
    "timeout_s": (0.01, 1e9),
    "abort_grace_s": _SECONDS,
}
"""The least and the largest value of each number."""

_SHOWN = 40
"""Characters of a wrong value in a message."""
