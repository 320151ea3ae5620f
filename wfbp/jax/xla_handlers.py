"""The XLA handlers, built with the package or compiled at first use.

The user's cache folder keeps compiled handlers by the versions of Python and jaxlib and the
source's hash. One rank per host compiles.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jaxlib import version as jaxlib

from wfbp.runtime import process

MODULE = "_jax_ffi"
_SOURCES = (
    Path(__file__).with_name("jax_ffi.cc"),  # as it is installed
    Path(__file__).parents[2] / "csrc" / "jax_ffi.cc",  # in a checkout
)
_COMPILE_S = 300.0


@functools.cache
def load() -> Any:
    """The module of the handlers, registered with XLA; ``ImportError`` if it cannot be made.

    Its functions, with the types of their arguments, are listed at the end of ``csrc/jax_ffi.cc``.
    """
    native = _built() or _compiled()
    for platform, handlers in native.handlers().items():
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    process.before_end(lambda _: wait_for_steps())
    atexit.register(_finish, native)
    return native


def wait_for_steps() -> None:
    """Wait for the programs that this thread has called: XLA runs them one after another."""
    with jax.ensure_compile_time_eval():
        jax.block_until_ready(jax.jit(jax.numpy.negative)(np.float32(0)))


def wait_for_programs() -> None:
    """Wait for this thread's programs and for their communication with other ranks."""
    jax.effects_barrier()
    wait_for_steps()


def _finish(native: Any) -> None:
    """At exit, before the runtime shuts down: other ranks may need this rank's part in steps."""
    try:
        wait_for_steps()
    finally:
        native.close()


def _built() -> ModuleType | None:
    """The module built with the package, unless it was built for another jaxlib."""
    try:
        module = importlib.import_module(f"wfbp.{MODULE}")
    except ImportError:
        return None
    return module if jaxlib.__version__ == module.JAXLIB else None


def _compiled() -> ModuleType:
    """The cached module, compiled now if there is none."""
    source = next((path for path in _SOURCES if path.exists()), None)
    if source is None:
        raise ImportError(
            "wfbp.jax: neither the XLA handlers nor their source jax_ffi.cc are installed; "
            "reinstall wfbp"
        )
    texts = [path.read_bytes() for path in sorted(source.parent.glob("jax_*"))]
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    tag = f"{sys.implementation.cache_tag}-jaxlib{jaxlib.__version__}-{digest}"
    folder = _cache_folder()
    target = folder / f"{MODULE}-{tag}.so"
    if not target.exists():
        with (folder / f"{MODULE}-{tag}.lock").open("w") as file:
            with suppress(OSError):  # a file system without locks: several compile, harmlessly
                fcntl.flock(file, fcntl.LOCK_EX)
            if not target.exists():
                _compile(source, target)
    spec = importlib.util.spec_from_file_location(f"wfbp.{MODULE}", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "wfbp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ImportError(
            f"wfbp.jax has to compile its XLA handlers once, and {folder} cannot be written "
            f"({error}); set XDG_CACHE_HOME to a folder that can"
        ) from error


def _compile(source: Path, target: Path) -> None:
    """Compile the handlers; the target file is replaced atomically."""
    wanted = os.environ.get("CXX")
    compiler = shlex.split(wanted) if wanted else ["g++" if shutil.which("g++") else "c++"]
    partial = target.with_suffix(f".{os.uname().nodename}.{os.getpid()}")
    command = [
        *compiler,
        *("-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"),
        f'-DWFBP_JAXLIB="{jaxlib.__version__}"',
        f"-I{sysconfig.get_paths()['include']}",
        f"-isystem{jax.ffi.include_dir()}",
        *(str(source), "-o", str(partial)),
    ]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_S, check=False
        )
        lines = [line for line in run.stderr.splitlines() if "error" in line]
        reason = "\n".join(lines[:5]) or run.stderr[-1000:]
        if not run.returncode:
            os.replace(partial, target)
            return
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    finally:
        partial.unlink(missing_ok=True)
    raise ImportError(
        f"wfbp.jax has to compile its XLA handlers once, and {shlex.join(compiler)} failed: "
        f"{reason}. Install a C++17 compiler and Python's headers (on Debian: g++ python3-dev), "
        "or name the compiler in CXX"
    )
