"""``python -m wfbp.bench NAME``: says where a benchmark is now."""

from __future__ import annotations

import sys

IN_PACKAGE = ("training", "comm")


def main() -> int:
    """Name the command that took this one's place."""
    name = next(iter(sys.argv[1:]), "NAME")
    print(
        f"wfbp's own benchmarks have left the package: in a checkout, python -m tests.benchmarks "
        f"{name}, with the same options",
        file=sys.stderr,
    )
    if name in IN_PACKAGE:
        print(f"To compare on your own cluster: mpirun -np N wfbp bench {name}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
