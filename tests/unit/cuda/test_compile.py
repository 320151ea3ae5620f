"""The CUDA source compiles for real devices, with what is found here: NVRTC, nvcc."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from wfbp.cuda.pack import source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
NVRTC_PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
KERNELS = [*sorted(f"wfbp_{name}" for name in re.findall(r"X\((\w+),", source())), "wfbp_copy"]


def nvrtc() -> ctypes.CDLL:
    """NVRTC out of its wheel, or of a toolkit; skips the test without either."""
    for package in NVRTC_PACKAGES:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:  # which NVRTC looks for by its bare name
            if re.fullmatch(r"libnvrtc-builtins\.so\.[\d.]+", file.name):
                ctypes.CDLL(str(file.locate()), ctypes.RTLD_GLOBAL)
        for file in files:
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                return ctypes.CDLL(str(file.locate()))
    for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip(f"NVRTC was not found; install one of: {', '.join(NVRTC_PACKAGES)}")


CUPY_OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space")
"""What CuPy passes to NVRTC besides the architecture."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What NVRTC made; empty where it failed."""

    log: str
    cubin: bytes = b""
    ptx: str = ""


def compile_with_nvrtc(library: ctypes.CDLL, text: str, architecture: str) -> Compiled:
    """Compile as CuPy does."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"pack.cu", 0, None, None
    )
    assert created == 0
    words = [f"--gpu-architecture={architecture}", *CUPY_OPTIONS, "--ptxas-options=-v"]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    failed = library.nvrtcCompileProgram(program, len(words), options)

    def fetch(what: str) -> bytes:
        assert library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)) == 0
        room = ctypes.create_string_buffer(size.value)
        assert library[f"nvrtcGet{what}"](program, room) == 0
        return room.raw

    log = fetch("ProgramLog").decode()
    compiled = Compiled(log) if failed else Compiled(log, fetch("CUBIN"), fetch("PTX").decode())
    assert library.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return compiled


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc(architecture: str) -> None:
    compiled = compile_with_nvrtc(nvrtc(), source(), architecture)
    assert compiled.cubin.startswith(b"\x7fELF"), compiled.log
    assert "warning" not in compiled.log
    assert len(KERNELS) == 5
    for kernel in KERNELS:
        assert f".text.{kernel}\0".encode() in compiled.cubin
    assert_no_spills(compiled.log)
    accesses = set(re.findall(r"\b(?:ld|st)\.(?!param)[a-z0-9.]+", compiled.ptx))
    assert all(".global." in access for access in accesses), "an address space was not inferred"
    assert {"ld.global.v4.u32", "st.global.v4.u32", "ld.global.v4.f32"} <= accesses


def test_subnormals_are_kept() -> None:
    """Although CuPy asks for the contrary, which holds for arithmetic: conversions have none."""
    library = nvrtc()
    assert ".ftz" not in compile_with_nvrtc(library, source(), "sm_90").ptx
    careless = source().replace("From::value(in.at[i])", "From::value(in.at[i]) * 3")
    assert "mul.ftz.f32" in compile_with_nvrtc(library, careless, "sm_90").ptx


def test_nvrtc_reports_mistakes() -> None:
    """That nothing was complained of above means something."""
    text = source().replace("struct Tile {", "struct Tile { float count;")
    compiled = compile_with_nvrtc(nvrtc(), text, "sm_90")
    assert compiled.cubin == b""
    assert "error" in compiled.log


def test_nvcc(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc was not found")
    file = tmp_path / "pack.cu"
    file.write_text(source())
    flags = ["-arch=sm_90", "-std=c++17", "-Werror=all-warnings", "-Xptxas=-v"]
    done = subprocess.run(
        [nvcc, *flags, "--cubin", "-o", str(tmp_path / "pack.cubin"), str(file)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pack.cubin").read_bytes().startswith(b"\x7fELF")
    assert_no_spills(done.stderr)


def assert_no_spills(log: str) -> None:
    """Every kernel keeps to registers, and leaves room for four blocks on a multiprocessor."""
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", log)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(spills) == len(registers) == len(KERNELS), log
    assert set(spills) == {("0", "0")}, log
    assert max(registers) <= 64, log
