"""Checks from outside: Horovod's and PyTorch's suites, and what readers are shown.

    python -m tests.outside --horovod FOLDER [--only PART ...]

``FOLDER`` is a clone of Horovod's repository at its last release. Runs its ``test_torch.py`` and
its examples for PyTorch on two ranks, and the tests of process groups that PyTorch's wheel contains
(``tests.benchmarks upstream``) on three. Then runs what the pages show, each in an environment with
what that page names (``tests.outside.pages``). Prints what passed and why the rest did not; the
exit status is 1 if a test fails for a reason that is not known.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.outside import horovod
from tests.outside.horovod import Outcome

PARTS = ("tests", "examples", "pytorch", "pages")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.outside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--horovod", type=Path, help="a clone of Horovod's repository")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    options = parser.parse_args()
    failed = 0
    if {"tests", "examples"} & set(options.only):
        if options.horovod is None:
            parser.error("--horovod is missing: a clone of Horovod's repository (v0.28.1)")
        horovod.check_folder(options.horovod.resolve())
    if "tests" in options.only:
        failed += show("Horovod's test_torch.py", horovod.tests(options.horovod.resolve()))
    if "examples" in options.only:
        failed += show("Horovod's examples", horovod.examples(options.horovod.resolve()))
    if "pytorch" in options.only:
        print("\nPyTorch's distributed_test.py, 3 ranks", flush=True)
        command = [sys.executable, "-m", "tests.benchmarks", "upstream"]
        failed += subprocess.run(command).returncode != 0
    if "pages" in options.only:
        print("\nExamples, pages and commands in environments of their own", flush=True)
        failed += subprocess.run([sys.executable, "-m", "tests.outside.pages"]).returncode != 0
    return 1 if failed else 0


def show(title: str, outcomes: Iterable[Outcome]) -> int:
    """Print counts and reasons; returns how many failed for a reason that is not known."""
    print(f"\n{title}, {horovod.RANKS} ranks", flush=True)
    found = list(outcomes)
    for each in found:
        if each.result == "failed":
            known = next((text for part, text in horovod.KNOWN.items() if part in each.reason), "")
            print(f"  failed: {each.name}: {known or each.reason}")
    counts = {kind: sum(each.result == kind for each in found) for kind in ("passed", "failed")}
    skipped = len(found) - sum(counts.values())
    print(f"  {counts['passed']} passed, {counts['failed']} failed, {skipped} skipped", flush=True)
    unknown = sum(each.result == "failed" and not each.is_known for each in found)
    return unknown + (counts["passed"] == 0)  # a suite of which nothing ran has not passed


if __name__ == "__main__":
    sys.exit(main())
