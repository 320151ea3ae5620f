"""``wfbp doctor``: what it finds on a machine that is made to look ill."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.cli_runs import wfbp
from wfbp.cli import doctor
from wfbp.cli.doctor import Findings, Status


class Usage(NamedTuple):
    free: int


def of(look: Callable[[], Findings]) -> list[tuple[Status, str, str]]:
    return list(look())


def problems(look: Callable[[], Findings]) -> list[str]:
    """What a topic complains of, each with its remedy."""
    told = [(text, remedy) for status, text, remedy in look() if status is Status.PROBLEM]
    assert all(remedy for _, remedy in told), "a problem without a remedy"
    return [f"{text} -> {remedy}" for text, remedy in told]


@pytest.mark.parallel
def test_two_ranks_and_every_topic() -> None:
    code, out, err = wfbp("doctor", "--json")
    findings = json.loads(out)
    assert {f["topic"] for f in findings} == {name for name, _ in doctor._TOPICS} | {"self-test"}
    wrong = [f for f in findings if f["status"] == "problem"]
    assert code == bool(wrong), err
    (test,) = (f for f in findings if f["topic"] == "self-test")
    assert test["status"] == "ok", test
    assert "an all-reduce starts in" in test["text"]


def test_for_people() -> None:
    code, out, _ = wfbp("doctor", "--no-self-test")
    assert "extension" in out
    assert out.rstrip().endswith("no problem") == (code == 0)


def test_a_topic_that_fails_does_not_hide_the_others() -> None:
    def broken() -> Findings:
        raise OSError("no such thing")
        yield

    def sound() -> Findings:
        yield Status.OK, "fine", ""

    first, second = doctor.examine([("a", broken), ("b", sound)])
    assert (first.topic, first.status) == ("a", Status.PROBLEM)
    assert "OSError: no such thing" in first.text
    assert second.text == "fine"


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


def test_a_setting_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WFBP_TIMEOUT_S", "soon")
    (told,) = problems(doctor._settings)
    assert "WFBP_TIMEOUT_S='soon'" in told
    monkeypatch.delenv("WFBP_TIMEOUT_S")
    monkeypatch.setenv("WFBP_TIMEOUTS", "1")
    assert [text for status, text, _ in of(doctor._settings) if status is Status.NOTE]


def test_an_extension_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wfbp.native.AVAILABLE", False)
    (told,) = problems(doctor._extension)
    assert "pip install -v --force-reinstall --no-deps wfbp" in told


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ('["NCCL 2.28.9 from /opt/a/libnccl.so.2", ""]', Status.OK, "2.28.9 from /opt/a"),
        ('noise\n["NCCL 2.28.9", "2 NCCL libraries are loaded"]\n', Status.PROBLEM, "2 NCCL lib"),
        ("ImportError: libnccl.so.2: cannot open", Status.PROBLEM, "cannot load NCCL (ImportErr"),
        ("", Status.PROBLEM, "cannot load NCCL"),
    ],
)
def test_the_nccl_that_is_loaded(said: str, status: Status, words: str) -> None:
    ((found, text, remedy),) = doctor._loaded_nccl(said)
    assert found is status
    assert words in text
    assert bool(remedy) == (status is Status.PROBLEM)


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
