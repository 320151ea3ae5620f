"""The XLA handlers: found, compiled, or missed with a message that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from wfbp.jax import xla_handlers

ROOT = Path(__file__).resolve().parents[3]
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "wfbp"


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_compiled_once_and_found_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two processes that start together."""
    program = (
        "from wfbp.jax import xla_handlers; m = xla_handlers._compiled(); print(m.JAXLIB); "
        "print(*(f'{platform} {sorted(h)}' for platform, h in m.handlers().items()))"
    )
    wrapper = tmp_path / "compiler"  # optimizes nothing: what it makes is not timed here
    wrapper.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    wrapper.chmod(0o755)
    environment = {**os.environ, "CXX": str(wrapper)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, env=environment
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=100)[0].decode() for process in started]
    assert said[0] == said[1]
    names = ["wfbp_announce", "wfbp_wait"]
    assert f"cpu {names} CUDA {names}" in said[0]
    assert len(list(cache.glob("*.so"))) == 1
    assert not [f for f in cache.iterdir() if f.suffix not in (".so", ".lock")]
    monkeypatch.setenv("CXX", "/bin/false")
    assert hasattr(xla_handlers._compiled(), "listen")


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler -O1"])
def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ImportError, match=r"compiler -O1 failed|/bin/false failed") as caught:
        xla_handlers._compiled()
    assert "g++ python3-dev" in str(caught.value)
    assert not list(cache.glob("*.so"))


def test_without_a_folder_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ImportError, match="set XDG_CACHE_HOME"):
        xla_handlers._compiled()


def test_without_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_handlers, "_SOURCES", ())
    with pytest.raises(ImportError, match="reinstall wfbp"):
        xla_handlers._compiled()


def test_copies() -> None:
    handlers = xla_handlers.load()
    source = [np.arange(5.0), np.arange(3, dtype=np.uint8), np.empty(0)]
    target = [np.zeros_like(a) for a in source]

    def at(arrays: list[np.ndarray]) -> list[int]:
        return [a.ctypes.data for a in arrays]

    handlers.copy(at(target), at(source), [a.nbytes for a in source])
    for a, b in zip(source, target, strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="same length"):
        handlers.copy([1], [], [])
    with pytest.raises(TypeError):
        handlers.copy(["x"], ["y"], ["z"])  # type: ignore[list-item]
