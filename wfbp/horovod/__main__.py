"""``python -m wfbp.horovod SCRIPT ARGS`` or ``python -m wfbp.horovod -m MODULE ARGS``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

from wfbp.horovod import stand_in

USAGE = """usage: mpirun -np N python -m wfbp.horovod SCRIPT [ARGS]
       mpirun -np N python -m wfbp.horovod -m MODULE [ARGS]

Runs a program that imports horovod.torch; wfbp.torch replaces it."""


def main() -> None:
    """Run the program that the arguments name, as ``python`` would."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    stand_in()
    target = arguments[0]
    sys.argv = arguments
    if is_module:
        _check_module(target)
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(target):
        _refuse(f"{target}: no such file in {os.getcwd()}")
    sys.path[0] = str(Path(target).resolve().parent)
    runpy.run_path(target, run_name="__main__")


def _check_module(name: str) -> None:
    """End the process if there is no such module; what its packages raise is the program's own."""
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        is_there = False
    if not is_there:
        _refuse(f"-m {name}: no such module; run from the folder that holds it, or set PYTHONPATH")


def _refuse(message: str) -> None:
    """End with one line, and the status of a wrong command line."""
    print(f"python -m wfbp.horovod: error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
