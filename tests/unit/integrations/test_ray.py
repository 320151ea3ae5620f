"""What jobs that Ray places do and refuse before MPI starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from wfbp.errors import BackendError
from wfbp.integrations import ray
from wfbp.integrations.ray import check_host_names
from wfbp.launcher.mpi import Vendor

SAME = {"10.0.0.1": "a", "10.0.0.2": "b", "10.0.0.3": "a"}


def test_nodes_of_one_name_are_refused_where_open_mpi_would_fail() -> None:
    with pytest.raises(BackendError, match=r"nodes 10\.0\.0\.1 and 10\.0\.0\.3 are both named 'a'"):
        check_host_names(SAME, Vendor.OPEN_MPI)


def test_nodes_of_one_name_are_hosts_of_their_own_elsewhere() -> None:
    check_host_names(SAME, Vendor.MPICH)
    check_host_names({"10.0.0.1": "a", "10.0.0.2": "b"}, Vendor.OPEN_MPI)


def test_the_path_of_python_is_text_for_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A space or a command in it is neither split nor executed."""
    marker = tmp_path / "executed"
    folder = tmp_path / f"a b$(touch {marker.name})"
    folder.mkdir()
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(ray.sys, "executable", str(python))
    agent = ray.write_agent(folder)
    told = subprocess.run(
        [agent, "node", "a command"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert told.stdout == f"-m|wfbp.integrations.ray|agent|{folder}|node|a command|"
    assert not marker.exists()
