"""Builds the C++ extensions, or says which it could not build and goes on without them.

``wfbp._native`` is always wanted; ``wfbp._jax_ffi`` where JAX, whose headers it needs, is installed
already (``pip install --no-build-isolation``). Elsewhere its source comes with the package and is
compiled at first use. The description on a package index is README.md, whose links to files become
links to the repository, or mere text as long as that has no address. Everything else about the
package is in ``pyproject.toml``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError, ExecError, PlatformError

BUILD_FAILURES = (CCompilerError, ExecError, PlatformError, OSError)
NATIVE = "wfbp._native"
NATIVE_HEADERS = [
    f"csrc/{name}"
    for name in (
        "half.h",
        "kernels.h",
        "kernels.inl",
        "mpi_functions.h",
        "native.h",
        "pack_table.h",
        "transfers.h",
    )
]
JAX = "wfbp._jax_ffi"
JAX_SOURCE = "csrc/jax_ffi.cc"
JAX_HEADERS = [f"csrc/jax_{part}.h" for part in ("events", "mailbox", "steps", "values", "waiters")]
SOURCES = {**dict.fromkeys([JAX_SOURCE, *JAX_HEADERS], "jax"), "csrc/pack.cu": "cuda"}
"""What is compiled where the package runs, and the part of the package that it goes to."""

WITHOUT = {
    NATIVE: """\
wfbp: the C++ extension could not be built ({reason}).
wfbp: installing without it: packing goes through NumPy and messages through Python, and both
wfbp: are slower.
wfbp: to have it, install a C++17 compiler and reinstall.""",
    JAX: """\
wfbp: the handlers for JAX could not be built ({reason}).
wfbp: wfbp.jax will compile them at first use.""",
}


class OptionalBuild(build_ext):
    """Builds what it can: a missing compiler costs speed, not the installation."""

    def run(self) -> None:
        try:
            super().run()
        except BUILD_FAILURES as error:
            self._go_without(self.extensions, error)

    def build_extensions(self) -> None:
        self._built: list[Any] = []
        super().build_extensions()
        self.extensions = self._built

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except BUILD_FAILURES as error:
            self._go_without([ext], error)
        else:
            self._built.append(ext)

    def _go_without(self, extensions: list[Any], error: BaseError | OSError) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        for ext in extensions:
            print(WITHOUT[ext._full_name].format(reason=reason), file=sys.stderr)
        self.extensions = [ext for ext in self.extensions if ext not in extensions]

    def copy_extensions_to_source(self) -> None:
        """For editable installs; after a failed build there is nothing to copy."""
        if self.extensions:
            super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return super().get_outputs() if self.extensions else []

    def get_output_mapping(self) -> dict[str, Any]:
        return super().get_output_mapping() if self.extensions else {}


class BuildWithSources(build_py):
    """Adds to the package the sources that are compiled at first use."""

    def run(self) -> None:
        super().run()
        for source, target in self._sources().items():
            self.copy_file(source, target)

    def _sources(self) -> dict[str, str]:
        """Where each source goes; an editable installation takes them from ``csrc``."""
        if self.editable_mode:
            return {}
        package = Path(self.build_lib, "wfbp")
        return {source: str(package / part / Path(source).name) for source, part in SOURCES.items()}

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._sources().values()]


def jax_extension() -> list[Extension]:
    """The handlers for JAX, where it is installed."""
    try:
        import jax.ffi
        import jaxlib
    except ImportError:
        return []
    return [
        Extension(
            JAX,
            [JAX_SOURCE],
            depends=JAX_HEADERS,
            define_macros=[("WFBP_JAXLIB", f'"{jaxlib.__version__}"')],
            extra_compile_args=[
                *("-std=c++17", "-O2", "-fvisibility=hidden"),
                *("-isystem", jax.ffi.include_dir()),  # whose warnings are not ours
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
            extra_compile_args=["/O2"] if sys.platform == "win32" else ["-O3", "-Wall", "-Wextra"],
        ),
        *jax_extension(),
    ],
    cmdclass={"build_ext": OptionalBuild, "build_py": BuildWithSources},
)
