"""Finds the libnccl files that this process has loaded. PyTorch and CuPy each load one; if packages
installed two, the process has both, or one has overwritten the other."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

MAPS = Path("/proc/self/maps")
"""The kernel's list of this process's mapped files."""

REMEDY = (
    "install one only, the one that PyTorch names (torch.version.cuda): pip uninstall "
    "nvidia-nccl-cu12 nvidia-nccl-cu13, then pip install the one that is wanted"
)


def loaded_libraries(maps: Iterable[str] | None = None) -> list[str]:
    """The files of all libnccl in this process, or in lines like those of ``/proc/self/maps``."""
    if maps is None:
        maps = MAPS.read_text().splitlines() if MAPS.exists() else ()
    files = (line.split(maxsplit=5)[-1].strip() for line in maps)
    named = {file for file in files if re.fullmatch(r".*/libnccl\.so[.\d]*", file)}
    return sorted({os.path.realpath(file) for file in named})


def version_name(code: int) -> str:
    """Format NCCL's version code.

    >>> version_name(22809), version_name(2708)
    ('2.28.9', '2.7.8')
    """
    if code >= 10000:
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return f"{code // 1000}.{code // 100 % 10}.{code % 100}"


def describe(version: int, files: list[str]) -> tuple[str, str]:
    """A description of the loaded NCCL, and the problem with it (empty if none)."""
    text = f"NCCL {version_name(version)} from {' and '.join(files) or 'a file that is not known'}"
    if len(files) < 2:
        return text, ""
    return text, f"{len(files)} NCCL libraries are loaded in one process ({text})"
