"""The recipes of ``launch/``: what they call exists, and shells and YAML readers take them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from wfbp.cli.run import command

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SHELL = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_batch_script(path: Path, tmp_path: Path) -> None:
    """Runs wfbprun of the environment, with the program's words."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "wfbprun"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    variables = {"VENV": str(tmp_path), "PROGRAM": "train.py --lr 1", "PBS_O_WORKDIR": "."}
    words = [str(path)] if path.suffix == ".sh" else [str(path), "train.py", "--lr", "1"]
    done = subprocess.run(
        ["bash", *words], env={"PATH": "/bin:/usr/bin", **variables}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "train.py --lr 1\n"), done.stderr


@pytest.mark.parametrize("path", [LAUNCH / "Dockerfile", LAUNCH / "kubernetes" / "Dockerfile"])
def test_an_image(path: Path) -> None:
    """Stages, copied files and extras exist, and so does the example that it runs."""
    text = re.sub(r"^#.*\n|\\\n", "", path.read_text(), flags=re.MULTILINE)
    instructions = [line.split(None, 1) for line in text.splitlines() if line]
    assert {name for name, _ in instructions} <= {"FROM", "RUN", "COPY", "WORKDIR", "CMD"}
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    for name, words in instructions:
        if name == "COPY" and words.startswith("--from="):
            assert words.split()[0].removeprefix("--from=") in stages
        elif name == "COPY":
            assert (ROOT / words.split()[0]).exists()
    extras = {extra for found in re.findall(r"\[([\w,]+)\]\"", text) for extra in found.split(",")}
    project = (ROOT / "pyproject.toml").read_text()
    assert extras
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    assert dict(instructions)["WORKDIR"] == "/examples"
    program, *words = json.loads(dict(instructions)["CMD"])
    if program == "wfbprun":
        with command.make_context("wfbprun", words, resilient_parsing=True) as context:
            words = context.params["program"]
    else:
        assert program == "python"
    (example,) = words
    assert (ROOT / "examples" / example).is_file()


def test_the_demo_says_why_it_cannot_make_a_link(tmp_path: Path) -> None:
    """As root in a container, only a trial shows that namespaces are refused."""
    why_no_link = runpy.run_path(str(ROOT / "examples" / "overlap.py"))["why_no_link"]
    link = why_no_link.__globals__["LINK"] = tmp_path / "link.py"
    assert why_no_link() == "tools/link.py is not here"
    link.write_text("import sys; sys.exit('link.py: ip netns add a: Operation not permitted')")
    assert why_no_link() == "ip netns add a: Operation not permitted"
    link.write_text(f"import sys; open({str(tmp_path / 'log')!r}, 'a').write(sys.argv[1] + ' ')")
    assert why_no_link() == ""
    assert (tmp_path / "log").read_text() == "up down "


def test_what_was_built_here_stays_out_of_images() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "**/*.so", "build"} <= set(left_out)


def test_the_job_for_kubernetes() -> None:
    """The fields that the operator requires (v2beta1), and a command that wfbprun takes."""
    yaml = pytest.importorskip("yaml")
    job: dict[str, Any] = yaml.safe_load((LAUNCH / "kubernetes" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replicas in spec["mpiReplicaSpecs"].values():
        pod = replicas["template"]["spec"]
        volumes = pod.get("volumes", [])
        names = {volume["name"] for volume in volumes}
        fields = {field for volume in volumes for field in volume.get("emptyDir", {})}
        assert fields <= {"medium", "sizeLimit"}
        for container in pod["containers"]:
            assert {"name", "image", "command"} <= set(container)
            assert {m["name"] for m in container.get("volumeMounts", [])} <= names
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    program, *words = launcher["command"]
    assert program == "wfbprun"
    with command.make_context("wfbprun", words, resilient_parsing=True) as context:
        assert context.params["program"] == ("numpy_mlp.py",)
