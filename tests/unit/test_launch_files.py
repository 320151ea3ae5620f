"""The recipes of ``launch/``: what they call exists, and shells and YAML readers take them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from wfbp.cli.run import command

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
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
        names = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {"name", "image", "command"} <= set(container)
            assert {m["name"] for m in container.get("volumeMounts", [])} <= names
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    program, *words = launcher["command"]
    assert program == "wfbprun"
    with command.make_context("wfbprun", words, resilient_parsing=True) as context:
        assert context.params["program"] == ("numpy_mlp.py",)
