"""``.ci/install-system``: asks apt for what is missing, and fails nobody where that cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "install-system"
TOOLS = ("bash", "env", "timeout", "sleep")


def program(folder: Path, name: str, text: str = "exit 0") -> None:
    path = folder / name
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine that has tools, root and apt-get, and nothing that tests need."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    program(tmp_path, "id", "echo 0")
    program(tmp_path, "apt-get", f'echo "$@" >> {tmp_path}/asked')
    return tmp_path


def install(machine: Path, limit_s: int = 30) -> tuple[str, str]:
    """What apt was asked for, and what the script said; it never fails."""
    done = subprocess.run(
        [SCRIPT],
        env={"PATH": os.fspath(machine), "INSTALL_SYSTEM_S": str(limit_s)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    asked = machine / "asked"
    return asked.read_text() if asked.exists() else "", done.stderr


def test_what_is_missing_is_fetched_and_then_installed(machine: Path) -> None:
    for name in ("google-chrome", "ip"):
        program(machine, name)
    asked, told = install(machine)
    update, fetch, unpack = asked.splitlines()
    assert told == ""
    assert update.endswith(" update")
    assert fetch.endswith("--download-only slurm-wlm munge")
    assert unpack.endswith("--no-download slurm-wlm munge")


def test_a_network_that_does_not_answer(machine: Path) -> None:
    program(machine, "apt-get", f'echo "$@" >> {machine}/asked; [[ $* == *update* ]] || sleep 60')
    asked, told = install(machine, limit_s=1)
    assert "took more than 1 s" in told
    assert "--no-download" not in asked
