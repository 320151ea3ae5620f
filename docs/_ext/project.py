"""Name, version and address of the project, from ``pyproject.toml``."""

from __future__ import annotations

from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
_project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

release: str = _project["version"]
repository_url: str = _project.get("urls", {}).get("Repository", "")
"""Address of the sources; empty until there is one."""
