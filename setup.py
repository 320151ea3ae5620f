"""Builds the C++ extension ``wfbp._pack``, or says that it could not and goes on without it.

Everything else about the package is in ``pyproject.toml``.
"""

from __future__ import annotations

import sys
from typing import Any

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CCompilerError, ExecError, PlatformError

BUILD_FAILURES = (CCompilerError, ExecError, PlatformError, OSError)

WITHOUT_EXTENSION = """\
wfbp: the C++ extension could not be built ({reason}).
wfbp: installing without it: packing goes through NumPy, which is slower.
wfbp: to have it, install a C++17 compiler and reinstall."""


class OptionalBuild(build_ext):
    """Builds what it can: a missing compiler costs speed, not the installation."""

    def run(self) -> None:
        try:
            super().run()
        except BUILD_FAILURES as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            print(WITHOUT_EXTENSION.format(reason=reason), file=sys.stderr)
            self.extensions = []

    def copy_extensions_to_source(self) -> None:
        """For editable installs; after a failed build there is nothing to copy."""
        if self.extensions:
            super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return super().get_outputs() if self.extensions else []

    def get_output_mapping(self) -> dict[str, Any]:
        return super().get_output_mapping() if self.extensions else {}


setup(
    ext_modules=[
        Pybind11Extension(
            "wfbp._pack",
            ["csrc/pack.cc"],
            depends=["csrc/half.h", "csrc/kernels.h", "csrc/kernels.inl", "csrc/pack_table.h"],
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=["/O2"] if sys.platform == "win32" else ["-O3", "-Wall", "-Wextra"],
        )
    ],
    cmdclass={"build_ext": OptionalBuild},
)
