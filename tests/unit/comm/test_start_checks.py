"""What is checked before MPI starts, because MPI itself would end the process without a reason."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from wfbp.comm.mpi import start
from wfbp.errors import BackendError

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    for name in ("PMI_FD", "PMIX_NAMESPACE", "_WFBP_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("mib", "is_enough"), [(16, False), (23, False), (24, True), (64, True)])
def test_shared_memory(mib: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = SimpleNamespace(f_blocks=mib * 256, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: blocks)
    if is_enough:
        start._check_shared_memory()
        return
    with pytest.raises(BackendError, match=f"rank 1: /dev/shm has {mib} MiB, expected at least 24"):
        start._check_shared_memory()


def test_a_child_of_a_rank_of_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as connection:
        monkeypatch.setenv("PMI_FD", str(connection.fileno()))
        start._check_process()
        os.set_inheritable(connection.fileno(), True)
        start._mark_process()
        assert not os.get_inheritable(connection.fileno())
    with pytest.raises(BackendError, match="started by rank 1 and is no rank itself"):
        start._check_process()


def test_a_child_of_a_rank_of_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "job@1")
    start._check_process()
    monkeypatch.setenv("_WFBP_RANK", "")
    start._mark_process()
    assert os.environ["_WFBP_RANK"] == f"job@1:{os.getpid()}"
    start._check_process()
    monkeypatch.setenv("_WFBP_RANK", f"job@1:{os.getpid() + 1}")
    with pytest.raises(BackendError, match="wfbprun -n 1"):
        start._check_process()
    monkeypatch.setenv("PMIX_NAMESPACE", "job@2")  # that a rank of the first one has started
    start._check_process()
