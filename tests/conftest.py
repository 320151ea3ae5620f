"""Fixtures and the order of tests."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.parallel import runs
from tests.support import launcher
from tests.support.shared import FOLDER, SESSION

RUN_PARAMETERS = ("ranks", "num_ranks", "n", "mpi")
"""Tests of one file that differ in these parameters need different MPI jobs."""

JAX_CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""JAX keeps compiled programs for later jobs of the session, however small and quick they are."""

GRACE_S = 60.0
"""That a test has to end by itself after its limit."""

stacks: int
"""The descriptor where the stacks of a process that has to be ended are written."""


settings.register_profile(  # beside what CI asks for
    "any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
gc.disable()  # until all test modules are imported


def pytest_configure() -> None:
    """The first process of a session makes the folder that all its processes share."""
    global stacks
    stacks = os.dup(2)  # of the terminal: output is not captured yet
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="wfbp-tests-")
        os.environ[SESSION] = str(os.getpid())
        os.environ.update(JAX_CACHE, JAX_COMPILATION_CACHE_DIR=f"{os.environ[FOLDER]}/jax")


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a process that no signal reaches, with the stacks of its threads.

    pytest-timeout raises in the main thread, which a call in C never notices. pytest-xdist then
    names the test and continues in a new process.
    """
    mark = item.get_closest_marker("timeout")
    limit_s = mark.args[0] if mark else float(item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=stacks)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those that an MPI job answers, or one file's.

    Where two processes need one job, the second waits for the first, and a core has nothing to do.
    """
    parallel = item.get_closest_marker("parallel") is not None
    if not (parallel and isinstance(item, pytest.Function)) or item.get_closest_marker("serial"):
        return str(item.path)
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if isinstance(job := parameters.get("job"), runs.Job):  # also for other files
        return f"{job.program}-{job}"
    values = [str(value) for key, value in parameters.items() if key in RUN_PARAMETERS]
    return "-".join([str(item.path), *values])


@pytest.hookimpl(tryfirst=True)  # before this process tells pytest-xdist what there is
def pytest_collection_finish(session: pytest.Session) -> None:
    """Jobs have those checks alone of which there are tests, and come first.

    Those with the most tests take longest; the many short files at the end fill every process.
    """
    gc.freeze()  # a million objects of modules and tests that no collection need look at
    gc.enable()
    for item in session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if isinstance(job := parameters.get("job"), runs.Job):
            runs.selected[job].add(parameters["name"])
    groups = {item.nodeid: group_of(item) for item in session.items}
    sizes = Counter(groups.values())

    def place(item: pytest.Item) -> int:
        parallel = item.get_closest_marker("parallel") is not None
        return -sizes[groups[item.nodeid]] if parallel else 0

    session.items.sort(key=place)
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        Path(os.environ[FOLDER], f"groups-{worker}.json").write_text(json.dumps(groups))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out among processes (``pytest -n 2``), group by group, in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        groups: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self.groups is None:  # as the processes that have collected the tests tell
                (file, *_) = Path(os.environ[FOLDER]).glob("groups-*.json")
                self.groups = json.loads(file.read_text())
            return self.groups[nodeid]

        def remove_node(self, node: Any) -> str | None:
            """A test that ended its process is not run again; the rest of its group is."""
            crashed = super().remove_node(node)
            for group in self.workqueue.values():
                if crashed in group:
                    group[crashed] = True
            return crashed

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Each MPI library in turn; skipped where it is not installed."""
    name: str = request.param
    try:
        launcher.interpreter(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture
def mpirun() -> Callable[..., launcher.Run]:
    """:func:`tests.support.launcher.mpirun`; skips the test where the MPI library is not
    installed.
    """

    def run(*args: object, **options: object) -> launcher.Run:
        try:
            return launcher.mpirun(*args, **options)  # type: ignore[arg-type]
        except FileNotFoundError as error:
            pytest.skip(str(error))

    return run
