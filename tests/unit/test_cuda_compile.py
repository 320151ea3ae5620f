"""The CUDA source compiles for real devices, with what is found here: NVRTC, nvcc."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from wfbp.cuda.kernels import source

ARCHITECTURES = ("sm_80", "sm_90")
NVRTC_PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
KERNELS = [*sorted(f"wfbp_{name}" for name in re.findall(r"X\((\w+),", source())), "wfbp_copy"]


def nvrtc() -> ctypes.CDLL:
    """NVRTC out of its wheel, or of a toolkit; skips the test without either."""
    for package in NVRTC_PACKAGES:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                return ctypes.CDLL(str(file.locate()))
    for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip(f"NVRTC was not found; install one of: {', '.join(NVRTC_PACKAGES)}")


def compile_with_nvrtc(library: ctypes.CDLL, text: str, architecture: str) -> tuple[bytes, str]:
    """The binary, empty where it does not compile, and the log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"pack.cu", 0, None, None
    )
    assert created == 0
    words = [f"--gpu-architecture={architecture}", "-std=c++17", "--ptxas-options=-v"]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    failed = library.nvrtcCompileProgram(program, len(words), options)
    assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetProgramLog(program, log) == 0
    binary = b""
    if not failed:
        assert library.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        cubin = ctypes.create_string_buffer(size.value)
        assert library.nvrtcGetCUBIN(program, cubin) == 0
        binary = cubin.raw
    assert library.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return binary, log.value.decode()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc(architecture: str) -> None:
    binary, log = compile_with_nvrtc(nvrtc(), source(), architecture)
    assert binary.startswith(b"\x7fELF"), log
    assert "warning" not in log
    assert len(KERNELS) == 9
    for kernel in KERNELS:
        assert f".text.{kernel}\0".encode() in binary
    assert_no_spills(log)


def test_nvrtc_reports_mistakes() -> None:
    """That nothing was complained of above means something."""
    text = source().replace("struct Tile {", "struct Tile { float count;")
    binary, log = compile_with_nvrtc(nvrtc(), text, "sm_90")
    assert binary == b""
    assert "error" in log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc(architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc was not found")
    file = tmp_path / "pack.cu"
    file.write_text(source())
    flags = [f"-arch={architecture}", "-std=c++17", "-Werror=all-warnings", "-Xptxas=-v"]
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
