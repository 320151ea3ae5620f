"""The C++ extension (sources in ``csrc``, described in ``_native.pyi``), or one clear error."""

from __future__ import annotations

from pathlib import Path

try:
    from wfbp._native import *  # noqa: F403
except ImportError as error:
    _SOURCES = Path(__file__).resolve().parents[1]
    raise ImportError(
        f"the C++ extension wfbp._native, which wfbp needs, cannot be loaded ({error}). "
        + (
            f"These are the sources in {_SOURCES}, and it was not built there: install a C++17 "
            "compiler and run `make install` or `pip install -e .` in that folder, or run the "
            "program from another folder, if wfbp is installed"
            if (_SOURCES / "setup.py").exists()
            else "Install a C++17 compiler and reinstall wfbp (pip's -v shows what fails)"
        )
    ) from error
