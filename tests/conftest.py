"""What every test can ask for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable

import pytest

from tests.parallel import runs
from tests.support import launcher
from tests.support.shared import FOLDER

RUN_PARAMETERS = ("ranks", "num_ranks", "n", "mpi", "mode", "library")
"""Parameters by which tests of one function differ in the MPI job that answers them."""


def pytest_configure() -> None:
    """The first process of a session makes the folder that all its processes share."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="wfbp-tests-")


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share the tests out among processes (pytest-xdist): what one job answers goes together.

    Jobs come first: they take long, and the many short files behind them fill every process.
    """
    jobs, others = [], []
    for item in items:
        group = item.path.as_posix()
        parallel = item.get_closest_marker("parallel") is not None
        if parallel and isinstance(item, pytest.Function):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            values = [str(v) for k, v in parameters.items() if k in RUN_PARAMETERS]
            group = "-".join([group, item.originalname, *values])
            if isinstance(job := parameters.get("job"), runs.Job):  # also for other files
                group = f"{job.program}-{job}"
        item.add_marker(pytest.mark.xdist_group(group))
        (jobs if parallel else others).append(item)
    items[:] = jobs + others


def pytest_collection_finish(session: pytest.Session) -> None:
    """Jobs have those checks alone of which there are tests."""
    for item in session.items:
        parameters = getattr(item, "callspec", None) and item.callspec.params
        if parameters and isinstance(parameters.get("job"), runs.Job):
            runs.selected[parameters["job"]].add(parameters["name"])


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
