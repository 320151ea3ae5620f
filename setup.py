"""Builds the C++ extensions.

``wfbp._native`` is required. ``wfbp._jax_ffi`` is built if jaxlib, whose headers it needs, can be
imported, as in an environment with JAX under ``--no-build-isolation``. The module serves that
version of jaxlib only; for others its source comes with the package and is compiled at first use.

The description on a package index is README.md, whose links to files become links to the
repository, or mere text as long as that has no address. Everything else about the package is in
``pyproject.toml``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

if sys.version_info < (3, 10):  # noqa: UP036 - pip would try old versions of mpi4py for minutes
    sys.exit(f"wfbp needs Python 3.10 or newer; found {sys.version.split()[0]} ({sys.executable})")

BUILD_FAILURES = (CCompilerError, ExecError, PlatformError, OSError)
NATIVE = "wfbp._native"
NATIVE_HEADERS = [
    f"csrc/{name}"
    for name in (
        "exchange.h",
        "half.h",
        "kernels.h",
        "kernels.inl",
        "mpi_functions.h",
        "native.h",
        "pack_table.h",
        "threads.h",
        "transfers.h",
    )
]
JAX = "wfbp._jax_ffi"
JAX_SOURCE = "csrc/jax_ffi.cc"
JAX_HEADERS = [f"csrc/jax_{part}.h" for part in ("events", "mailbox", "steps", "values", "waiters")]
SOURCES = {**dict.fromkeys([JAX_SOURCE, *JAX_HEADERS], "jax"), "csrc/pack.cu": "cuda"}
"""What is compiled where the package runs, and the part of the package that it goes to."""

FAILED = """\
the C++ extension wfbp._native could not be built, and wfbp does not work without it ({reason}).
Install a C++17 compiler (Debian and Ubuntu: apt install g++) and install wfbp again; pip's -v shows
what the compiler reports."""


class BuildWithMessage(build_ext):
    """Says in one message that a compiler is missing."""

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except BUILD_FAILURES as error:
            if ext._full_name != NATIVE:
                raise  # the handlers for JAX are optional: setuptools goes on without them
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CompileError(FAILED.format(reason=reason)) from error


class BuildWithSources(build_py):
    """Adds to the package the sources that are compiled at first use."""

    def run(self) -> None:
        super().run()
        for source, target in self._sources().items():
            self.copy_file(source, target)

    def _sources(self) -> dict[str, str]:
        """Map each source to its place; an editable installation reads them from ``csrc``."""
        if self.editable_mode:
            return {}
        package = Path(self.build_lib, "wfbp")
        return {source: str(package / part / Path(source).name) for source, part in SOURCES.items()}

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._sources().values()]


def jax_extension() -> list[Extension]:
    """The handlers for JAX, if jaxlib is installed."""
    try:
        import jaxlib
    except ImportError:
        return []
    headers = Path(jaxlib.__file__).parent / "include"
    return [
        Extension(
            JAX,
            [JAX_SOURCE],
            depends=JAX_HEADERS,
            define_macros=[("WFBP_JAXLIB", f'"{jaxlib.__version__}"')],
            optional=True,
            extra_compile_args=[
                *("-std=c++17", "-O2", "-fvisibility=hidden"),
                *("-isystem", str(headers)),  # whose warnings are not ours
            ],
        )
    ]


def description() -> str:
    """README.md without relative links, since a package index has no other files."""
    root = Path(__file__).parent
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.*)"$', project, re.MULTILINE)

    def absolute(link: re.Match[str]) -> str:
        if repository is None:
            return link[1]
        kind = "tree" if link[2].endswith("/") else "blob"
        return f"[{link[1]}]({repository[1]}/{kind}/main/{link[2]})"

    text = (root / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", absolute, text)


ParallelCompile("WFBP_BUILD_JOBS").install()  # by default as many at once as there are cores

setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Pybind11Extension(
            NATIVE,
            ["csrc/native.cc", "csrc/pack.cc", "csrc/transfers.cc"],
            depends=NATIVE_HEADERS,
            include_dirs=["csrc"],
            cxx_std=17,
            # One rounding per operation, so that all processors encode the same bits.
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread", "-ffp-contract=off"],
            extra_link_args=["-pthread"],
        ),
        *jax_extension(),
    ],
    cmdclass={"build_ext": BuildWithMessage, "build_py": BuildWithSources},
)
