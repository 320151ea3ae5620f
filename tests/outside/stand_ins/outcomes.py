"""A pytest plugin: writes the outcome of each test on each rank, a line of JSON each."""

import json
import os
from pathlib import Path
from typing import Any

import common

_FOLDER = Path(os.environ["OUTCOMES"])


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        reason = text.strip().splitlines()[0][:300]
    name = report.nodeid.rpartition("::")[2]
    with (_FOLDER / f"rank{common.mpi_env_rank_and_size()[0]}").open("a") as file:
        print(json.dumps([name, report.outcome, reason]), file=file)
