"""Settings that must be the same on every rank, compared once, when ranks meet.

Phases of the tuner end after a number of steps, and a measurement of the network repeats as often
as its budget allows: ranks whose numbers differ would call different collectives.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wfbp.errors import DisagreementError
from wfbp.runtime.refusals import check_argument_errors, sharing_argument_errors
from wfbp.runtime.runtime import Runtime

SHARED = (
    "zero_copy_min_bytes",
    "warmup_steps",
    "profile_steps",
    "trial_steps",
    "trial_min_s",
    "replan_threshold",
    "probe_budget_s",
)
"""Fields of ``Config``. The schedule and its threshold are compared per optimizer."""

_LABEL = "init(): comparing settings"


def check_settings(runtime: Runtime) -> None:
    """Compare the shared settings of all ranks; collective.

    Raises:
        ValueError: this rank cannot record its run where it should.
        PeerError: another rank cannot.
        DisagreementError: on every rank; which settings differ, and who has what.
    """
    with sharing_argument_errors(runtime, _LABEL):
        _make_folder(runtime.config.record_dir)
    mine = {name: getattr(runtime.config, name) for name in SHARED}
    payloads = [json.loads(p) for p in runtime.exchange(json.dumps(["", mine]).encode(), _LABEL)]
    check_argument_errors(runtime, "init()", payloads)
    settings_by_rank = [settings for _, settings in payloads]
    differing = [
        name
        for name in SHARED
        if any(s[name] != settings_by_rank[0][name] for s in settings_by_rank)
    ]
    if differing:
        shown = ", ".join(
            _describe_setting(name, [s[name] for s in settings_by_rank]) for name in differing
        )
        raise DisagreementError(
            f"{runtime.where}: init(): ranks disagree on {shown}. Set it to the same value on "
            "every rank; mpirun passes variables on to all of them"
        )


def _make_folder(folder: str) -> None:
    """Make the directory that runs are recorded in, if there is to be one."""
    problem = ""
    try:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        problem = f"it cannot be made: {error.strerror}"
    if problem:
        raise ValueError(
            f"WFBP_RECORD_DIR is {folder!r}, but {problem}. Name a directory in which every rank "
            "can "
            "write, or none"
        )


def _describe_setting(name: str, values: list[Any]) -> str:
    """The setting's variable, and which ranks have which value."""
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {value}"
        for value, ranks in holders.items()
    ]
    return f"WFBP_{name.upper()} ({'; '.join(parts)})"
