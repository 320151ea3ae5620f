"""What jobs that Ray places refuse before MPI starts."""

from __future__ import annotations

import pytest

from wfbp.errors import BackendError
from wfbp.integrations.ray import check_host_names
from wfbp.launcher.mpi import Vendor

SAME = {"10.0.0.1": "a", "10.0.0.2": "b", "10.0.0.3": "a"}


def test_nodes_of_one_name_are_refused_where_open_mpi_would_fail() -> None:
    with pytest.raises(BackendError, match=r"nodes 10\.0\.0\.1 and 10\.0\.0\.3 are both named 'a'"):
        check_host_names(SAME, Vendor.OPEN_MPI)


def test_nodes_of_one_name_are_hosts_of_their_own_elsewhere() -> None:
    check_host_names(SAME, Vendor.MPICH)
    check_host_names({"10.0.0.1": "a", "10.0.0.2": "b"}, Vendor.OPEN_MPI)
