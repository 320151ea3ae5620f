"""Where every module goes: new module -> the old modules that it is made of, in their order.

Names are without ``wfbp.`` and relative to the package that heads each table. A module that is not
named here and lies in one of these packages is reported, and goes to ``DEFAULTS``.
"""

from __future__ import annotations

from pathlib import Path

LAYOUT: dict[str, dict[str, list[str]]] = {
    "runtime": {
        "arguments": ["arguments"],
        "step": ["steps", "slot", "marks"],
        "consistency": ["agreement", "matching", "refusals"],
        "process": ["world", "settings", "failure"],
        "runtime": ["runtime"],
        "progress.loop": ["bell", "calls", "turns"],
        "progress.thread": ["thread"],
        "progress.executor": ["lane"],
        "progress.deadlock": ["places", "inquiry", "stall"],
        "progress.fetching": ["fetching"],
        "progress.channel": ["envelope", "talk"],
        "transport.transport": ["medium"],
        "transport.buffers": ["direct", "fusion", "shards"],
        "transport.flags": ["flags", "side_flags"],
        "transport.device_transport": ["device_medium"],
        "transport.device_buffers": ["device_buffers"],
        "tuning.tuner": ["drift", "tuner"],
        "tuning.candidates": ["candidates"],
        "tuning.trial": ["trial"],
        "tuning.profile": ["profile"],
        "tuning.network": ["network"],
        "engine.engine": ["engine"],
        "engine.allocator": ["memory"],
        "engine.tracker": ["passes", "apart", "gathering"],
        "engine.allgather": ["gathers", "whole"],
        "engine.step_sync": ["extra", "border"],
        "engine.recorder": ["report", "recording"],
        "row_collectives": ["rows"],
        "api.array_collectives": ["operations"],
        "api.reducer": ["reducer"],
    },
    "torch": {
        "optimizer": ["arguments", "original", "wrapper", "optimizer"],
        "gradient_sync": ["gradients", "hyperparameters", "exchange"],
        "grad_guard": ["late_sample", "witness"],
        "pending_parameters": ["pending_parameters"],
        "optimizer_probe": ["isolation", "nature"],
        "updates": ["update", "replicated_update", "sharded_update"],
        "state_sharding": ["sharding"],
        "optimizer_inspection": ["lookups"],
        "clipping": ["clipping"],
        "collectives": ["collectives"],
        "compression": ["compression"],
        "state": ["state"],
        "elastic": ["elastic"],
        "uncompiled": ["uncompiled"],
        "batch_norm": ["batch_norm"],
        "forward_profiler": ["forward"],
        "tensors": ["tensors", "devices"],
    },
    "comm": {
        "backend": ["backend"],
        "pages": ["pages"],
        "buffers": ["buffers", "arithmetic"],
        "chunking": ["chunking"],
        "waiting": ["waiting"],
        "probe": ["probe"],
        "local": ["local"],
        "emulated": ["emulated"],
        "mpi.backend": ["mpi_notices", "mpi"],
        "mpi.routing": ["mpi_routes"],
        "mpi.jobs": ["mpi_channel", "mpi_jobs", "mpi_exchange"],
        "mpi.transfers": ["mpi_transfers"],
        "mpi.shm_memory": ["host_files", "host_memory"],
        "mpi.shm_allreduce": ["host_board", "host_reduce"],
        "mpi.library": ["mpi_library"],
        "mpi.launch": ["launch"],
        "mpi.start_notice": ["start_notice"],
        "device.device": ["device"],
        "device.backend": ["device_backend"],
        "device.nccl": ["nccl"],
        "device.staged": ["staged_work", "staged"],
        "device.connection": ["device_choice"],
    },
    "cuda": {
        "cupy_device": ["cupy_device"],
        "kernels": ["streams", "kernels"],
        "pack": ["pack"],
        "local_device": ["choice"],
    },
    "core": {
        "cost": ["curves", "cost"],
        "timeline": ["phases", "timeline"],
    },
    "core.planners": {
        "baselines": ["per_tensor", "single", "threshold", "mgwfbp", "parameter_server", "ipart"],
        "dear": ["threshold_search", "dear"],
        "hybrid": ["hybrid_shared", "hybrid_split", "hybrid"],
        "exact": ["oasr", "independent"],
        "partition": ["partitions", "rows"],
        "plan_builder": ["runs"],
        "coarsening": ["coarse"],
        "linear_solver": ["linear_solver"],
        "curve_solver": ["curve_solver"],
        "optimum": ["optimum"],
        "partition_optimizer": ["settled"],
    },
    "jax": {
        "gradients": ["signature", "gradients"],
        "gradient_hooks": ["primitives", "taps"],
        "gradient_sync": ["exchange", "exchanges", "arguments", "reports"],
        "optimizer": ["optimizer"],
        "collectives": ["collective", "operations"],
        "metrics": ["metrics"],
        "ordering": ["order"],
        "native": ["native"],
        "device": ["device", "choice"],
        "state": ["state"],
        "trees": ["trees"],
    },
    "sim": {
        "simulate": ["simulation", "simulate"],
    },
}

COMPLETE = ("runtime", "torch", "comm", "cuda", "core.planners", "jax")
"""Packages all of whose modules must be named above."""

DEFAULTS = {
    "runtime": "engine",
    "comm": "",
    "torch": "",
    "jax": "",
    "cuda": "",
    "core.planners": "",
}
"""The subpackage that an unknown module of a package goes to, under its own name."""

# --- tests: folder under tests/unit by test file; by prefix where nothing is said
TEST_FOLDERS = {
    "core": (
        "bound candidates_ cost curves fit plan planners planners_decoupled planners_hybrid "
        "planners_oasr sequencer sequencer_gathers timeline trace types"
    ),
    "sim": "scaling sim_simulate validation",
    "comm": (
        "comm_emulated comm_local comm_parts comm_waiting device_backends host_memory host_reduce "
        "native native_transfers launch"
    ),
    "cuda": "cuda_compile cuda_kernels cuda_pack cupy_device cuda_bench",
    "runtime": (
        "agreement candidates device_engine elimination fetching engine engine_decoupled engine_errors freed_memory "
        "fusion gathers inquiry mistakes probe_budget named_operations network operations places profile rows runtime settings "
        "stall talk thread trial tuner"
    ),
    "torch": "pending_parameters torch_witness torch_barrier torch_deferred torch_devices torch_late_sample torch_nature "
    "torch_travelling",
    "jax": "jax_arguments jax_device jax_exchange jax_mailbox jax_native jax_primitives "
    "jax_streams jax_trees",
    "cli": "run cli cli_doctor cli_fuzz cli_plan cli_probe cli_report cli_simulate",
    "bench": "bench_child bench_hooks bench_jax bench_link bench_load bench_models bench_plan "
    "bench_regret bench_replay bench_training",
}
STAY = ("layers", "config", "dispatch", "launch_files")
"""Tests of the package as a whole stay in tests/unit."""

PREFIXES = ("torch", "jax", "cli", "bench", "cuda", "comm", "core", "sim", "runtime")

TEST_NAMES = {  # test file -> what it is called where its subject has another name now
    "agreement": "consistency",
    "gathers": "allgather",
    "inquiry": "deadlock_detector",
    "places": "deadlock",
    "rows": "row_collectives",
    "talk": "channel",
    "freed_memory": "allocator",
    "torch_barrier": "parameter_hooks",
    "torch_late_sample": "device_grad_guard",
    "torch_witness": "grad_guard",
    "torch_nature": "optimizer_probe",
    "torch_travelling": "pending_updates",
    "torch_deferred": "deferred_updates",
    "torch_devices": "devices",
    "jax_arguments": "arguments",
    "jax_device": "device",
    "jax_exchange": "gradient_sync",
    "jax_mailbox": "mailbox",
    "jax_native": "native",
    "jax_primitives": "gradient_hooks",
    "jax_streams": "streams",
    "jax_trees": "trees",
    "host_memory": "shm_memory",
    "host_reduce": "shm_allreduce",
    "comm_emulated": "emulated",
    "comm_local": "local",
    "comm_parts": "comm_parts",
    "comm_waiting": "waiting",
    "sim_simulate": "simulate",
    "cuda_pack": "pack",
    "cuda_kernels": "kernels",
    "cuda_compile": "compile",
}

SUPPORT = {  # old module under tests -> name under tests/support
    "tests.launcher": "launcher",
    "tests.cli_runs": "cli_runs",
    "tests.cuda_cases": "cuda_cases",
    "tests.cuda_kernels": "cuda_kernels",
    "tests.fake_mpi": "fake_mpi",
    "tests.fake_nccl": "fake_nccl",
    "tests.software_device": "software_device",
    "tests.software_xla": "software_xla",
    "tests.run_documents": "run_documents",
    "tests.slurm": "slurm",
    "tests.unit.device_trainer": "device_trainer",
    "tests.unit.host_ranks": "host_ranks",
    "tests.unit.ranks": "ranks",
    "tests.unit.reference": "reference",
    "tests.unit.trainer": "trainer",
}
FOLDERS = {"tests/xla_streams": "tests/support/xla_streams", "tests/cuda_host": "tests/support/cuda_host"}


def package_moves(names: set[str]) -> tuple[dict[str, str], dict[str, str], list[str], list[str]]:
    """For the modules of a tree: first where each goes, then what each is merged into.

    Returns:
        first moves, merges (from where the first moves have put it), notes, order of parts.
    """
    moves: dict[str, str] = {}
    merges: dict[str, str] = {}
    notes: list[str] = []
    order: list[str] = []
    for package, table in LAYOUT.items():
        head = f"wfbp.{package}"
        known: set[str] = set()
        for new, olds in table.items():
            known |= set(olds)
            target = f"{head}.{new}"
            folder = target.rpartition(".")[0]
            for old in olds:
                source = f"{head}.{old}"
                if source not in names:
                    notes.append(f"layout: {source} is in the table and not in the tree")
                    continue
                first = target if len(olds) == 1 else f"{folder}.{old}"
                moves[source] = first
                if first != target:
                    merges[first] = target
                order.append(first)
        if package in COMPLETE:
            for name in sorted(names):
                parent, _, leaf = name.rpartition(".")
                if parent != head or leaf in known or name in known:
                    continue
                if any(n.startswith(name + ".") for n in names):
                    continue  # a package
                sub = DEFAULTS[package]
                target = ".".join(filter(None, [head, sub, leaf]))
                notes.append(f"layout: {name} is new to the table; it goes to {target}")
                if target != name:
                    moves[name] = target
    return moves, merges, notes, order


def test_moves(names: set[str]) -> tuple[dict[str, str], list[str]]:
    moves = {old: f"tests.support.{new}" for old, new in SUPPORT.items() if old in names}
    notes: list[str] = []
    folder_of = {t: folder for folder, tests in TEST_FOLDERS.items() for t in tests.split()}
    taken: dict[str, str] = {}
    for name in sorted(names):
        if name.startswith("tests.") and name.count(".") == 1 and name not in moves:
            leaf = name.rpartition(".")[2]
            if leaf != "conftest" and not any(n.startswith(name + ".") for n in names):
                notes.append(f"tests: {name} is not in the table; to tests.support")
                moves[name] = f"tests.support.{leaf}"
    for name in sorted(names):
        parent, _, leaf = name.rpartition(".")
        if parent != "tests.unit":
            continue
        if not leaf.startswith("test_"):
            if name not in moves:
                notes.append(f"tests: {name} is no test and not in the table; to tests.support")
                moves[name] = f"tests.support.{leaf}"
            continue
        subject = leaf.removeprefix("test_")
        if subject in STAY:
            continue
        folder = folder_of.get(subject)
        if folder is None:
            prefix = subject.partition("_")[0]
            folder = prefix if prefix in PREFIXES else "runtime"
            notes.append(f"tests: {name} is new to the table; it goes to tests/unit/{folder}")
            new = subject
        else:
            new = TEST_NAMES.get(subject, subject)
        target = f"tests.unit.{folder}.test_{new}"
        if target in taken:
            notes.append(f"tests: {name} and {taken[target]} would both be {target}")
            target = f"tests.unit.{folder}.test_{subject}"
        taken[target] = name
        moves[name] = target
    return moves, notes


def as_path(module: str) -> Path:
    return Path(*module.split(".")).with_suffix(".py")


def merges_from_table() -> tuple[dict[str, str], list[str]]:
    """The merges where the first moves are done already."""
    names = {f"wfbp.{p}.{old}" for p, t in LAYOUT.items() for olds in t.values() for old in olds}
    _, merges, _, order = package_moves(names)
    return merges, order
