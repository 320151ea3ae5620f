"""``python -m wfbp.horovod SCRIPT ARGS`` or ``python -m wfbp.horovod -m MODULE ARGS``."""

from __future__ import annotations

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
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(target):
        print(f"python -m wfbp.horovod: {target}: no such file in {os.getcwd()}", file=sys.stderr)
        sys.exit(2)
    sys.path[0] = str(Path(target).resolve().parent)
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
