"""What CuPy and the driver are asked for, without either of them doing it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.cuda_cases import STREAM, Case, Layout, Tensor, check, run
from tests.support.cuda_kernels import HostKernels, build
from wfbp.cuda import pack as kernels
from wfbp.cuda.pack import THREADS, CudaKernels, source

DRIVER = "cupy_backends.cuda.api.driver"

PARAMETERS = (
    "f, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x, block_dim_y, block_dim_z, "
    "shared_mem_bytes, stream, kernel_params, extra"
)


class FakeCupy:
    """CuPy's modules as far as they are used, and what was done with them, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.names: dict[int, str] = {}
        self.streams = [0]
        self.launch: Callable[[str, int, int, int], None] = lambda *launch: None

    def raw_module(self, code: str, options: tuple[str, ...]) -> SimpleNamespace:
        assert code == source()
        assert options == ("-std=c++17",)
        compiles = partial(self.calls.append, ("compile",))
        return SimpleNamespace(get_function=self.get_function, compile=compiles)

    def get_function(self, name: str) -> SimpleNamespace:
        self.calls.append(("find", name))
        handle = 1000 + len(self.names)
        self.names[handle] = name
        return SimpleNamespace(kernel=SimpleNamespace(ptr=handle))

    def asarray(self, array: np.ndarray[Any, Any]) -> SimpleNamespace:
        assert array.dtype == np.uint8
        self.calls.append(("upload", array.nbytes, self.streams[-1]))
        held = array.copy()
        return SimpleNamespace(data=SimpleNamespace(ptr=held.ctypes.data), held=held)

    @contextmanager
    def from_external(self, external: Any) -> Iterator[None]:
        self.streams.append(external.__cuda_stream__()[1])
        yield
        self.streams.pop()

    def launch_kernel(self, function: int, *rest: int) -> None:
        """In the order of :data:`PARAMETERS`."""
        grid, block, (shared, stream, parameters, extra) = rest[:3], rest[3:6], rest[6:]
        assert grid[1:] == (1, 1)
        assert block == (THREADS, 1, 1)
        assert (shared, extra) == (0, 0)
        name = self.names[function]
        self.calls.append(("launch", name, stream))
        (arguments,) = (ctypes.c_uint64 * 1).from_address(parameters)
        self.launch(name.removeprefix("wfbp_"), grid[0], arguments, stream)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    module, api, driver = ModuleType("cupy"), ModuleType("api"), ModuleType("driver")
    cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=fake.from_external))
    vars(module).update(RawModule=fake.raw_module, asarray=fake.asarray, cuda=cuda)
    vars(driver).update(launchKernel=fake.launch_kernel)
    vars(api).update(driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy_backends", ModuleType("cupy_backends"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    monkeypatch.setitem(sys.modules, DRIVER, driver)
    return fake


def test_a_step_only_launches(cupy: FakeCupy) -> None:
    """Through all layers down to the driver, whose part the kernels compiled as C++ play."""
    host = HostKernels(build())
    cupy.launch = host.launch
    device = CudaKernels()
    for _ in range(2):
        tensors = (Tensor(7), Tensor(5000, shift=4), Tensor(3, place="absent"))
        layout = Layout(Case(tensors, "float32", "float16"))
        expected = Layout(layout.case)
        host.allow(layout.arrays(layout.before))
        run(layout, device, layout.before.ctypes.data)
        check(expected, layout.before)
    made = [("upload", 24 * 7, STREAM)]
    launched = ("launch", "wfbp_float32_float16", STREAM)
    found = ("find", "wfbp_float32_float16")
    assert cupy.calls == [("compile",), *made, found, launched, *made, launched]


def test_driver_takes_what_it_is_given() -> None:
    """The order of arguments above is that of the installed CuPy."""
    pytest.importorskip("cupy_backends")
    from cupy_backends.cuda.api import driver

    text = str(driver.launchKernel.__doc__).partition("(")[2].rpartition(")")[0]
    assert ", ".join(part.split()[-1] for part in text.split(",")) == PARAMETERS


def test_missing_source_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "_SOURCES", (tmp_path / "pack.cu",))
    with pytest.raises(FileNotFoundError, match=r"the CUDA source is missing: .*reinstall"):
        source()


def test_importing_wants_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(ImportError):
        CudaKernels()
