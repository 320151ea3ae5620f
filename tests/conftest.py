"""What every test can ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import launcher


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
