"""The third pass: old public names as deprecated aliases, and what has no user deleted."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

from relocate import Report
from source import Module, load

HERE = Path(__file__).resolve().parent

CONFIG_RENAMED = '''

RENAMED = {
    "direct_bytes": "zero_copy_min_bytes",
    "drift": "replan_threshold",
    "probe_s": "probe_budget_s",
    "trial_s": "trial_min_s",
    "run_dir": "record_dir",
}
"""Settings that had other names in 0.1; these work, with a warning, until the next version."""


class _RenamedSettings(type):
    """Takes settings under their old names, too."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for old in RENAMED.keys() & values.keys():
            new = RENAMED[old]
            if new in values:
                raise TypeError(f"{old} and {new} are one setting: leave out {old}")
            warn_renamed(f"Config({old}=)", f"Config({new}=)")
            values[new] = values.pop(old)
        return super().__call__(*args, **values)

'''

GETATTR = '''
    def __getattr__(self, name: str) -> Any:
        new = RENAMED.get(name)
        if new is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(f"Config.{name}", f"Config.{new}")
        return getattr(self, new)
'''

EDITS: list[tuple[str, str, str]] = [
    # --- config
    (
        "wfbp/config.py",
        "from wfbp.core.planners import PLANNERS\n",
        "from wfbp.core.planners import PLANNERS\nfrom wfbp.deprecation import warn_renamed\n"
        + CONFIG_RENAMED,
    ),
    ("wfbp/config.py", "class Config:\n", "class Config(metaclass=_RenamedSettings):\n"),
    (
        "wfbp/config.py",
        '        one_of("log_level", self.log_level, LOG_LEVELS)\n',
        '        one_of("log_level", self.log_level, LOG_LEVELS)\n' + GETATTR,
    ),
    (
        "wfbp/config.py",
        "        values: dict[str, Any] = {}\n        for field in fields(cls):\n"
        '            variable = f"WFBP_{field.name.upper()}"\n'
        "            text = source.get(variable)\n",
        "        values: dict[str, Any] = {}\n"
        "        before = {new: old for old, new in RENAMED.items()}\n"
        "        for field in fields(cls):\n"
        '            variable = f"WFBP_{field.name.upper()}"\n'
        '            old = f"WFBP_{before[field.name].upper()}" if field.name in before else ""\n'
        "            if old in source:  # init() logs what it is called now\n"
        "                if variable in source:\n"
        '                    raise ValueError(f"{old} and {variable} are both set: unset {old}")\n'
        "                variable = old\n"
        "            text = source.get(variable)\n",
    ),
    # --- torch
    (
        "wfbp/torch/optimizer.py",
        '    update: str = "auto",\n) -> Any:',
        "    optimizer_sharding: bool | None = None,\n    update: str | None = None,\n) -> Any:",
    ),
    ("wfbp/torch/optimizer.py", "    check_update(update)\n",
     "    sharding = optimizer_sharding_of(optimizer_sharding, update)\n"),
    ("wfbp/torch/optimizer.py", "chosen_coupling(optimizer, update)",
     "chosen_coupling(optimizer, sharding)"),
    (
        "wfbp/torch/optimizer.py",
        '        update: what follows decoupled gradients: ``sharded``, each rank updates its shard of\n'
        "            each tensor and holds the state of it alone; ``replicated``, every rank updates all;\n"
        "            or ``auto``, what the optimizer allows, which is found by experiment.\n",
        "        optimizer_sharding: what follows decoupled gradients. True: each rank updates its shard\n"
        "            of each tensor and holds the state of it alone. False: every rank updates all. By\n"
        "            default what the optimizer allows, which is found by experiment.\n"
        "        update: deprecated; ``sharded``, ``replicated`` or ``auto`` stand for\n"
        "            ``optimizer_sharding`` True, False or None.\n",
    ),
    (
        "wfbp/torch/optimizer.py",
        'UPDATES = ("auto", "sharded", "replicated")\n',
        'UPDATES: dict[str, bool | None] = {"auto": None, "sharded": True, "replicated": False}\n'
        '"""Values of the deprecated argument ``update``, and of ``optimizer_sharding``."""\n',
    ),
    (
        "wfbp/torch/optimizer.py",
        'def check_update(update: str) -> None:\n'
        '    """Raise ``ValueError`` unless there is such an update."""\n'
        "    if update not in UPDATES:\n"
        '        raise ValueError(f"update is {update!r}; expected one of {\', \'.join(UPDATES)}")\n',
        "def optimizer_sharding_of(sharding: bool | None, update: str | None) -> bool | None:\n"
        '    """What a caller asks for, under the argument\'s present name or the one before.\n\n'
        "    Raises:\n"
        "        ValueError: there is no such value, or both names are used.\n"
        '    """\n'
        "    if not any(sharding is value for value in (True, False, None)):\n"
        "        raise ValueError(\n"
        '            f"optimizer_sharding is {sharding!r}; expected True, False or None"\n'
        "        )\n"
        "    if update is None:\n"
        "        return sharding\n"
        "    if update not in UPDATES:\n"
        '        raise ValueError(f"update is {update!r}; expected one of {\', \'.join(UPDATES)}")\n'
        "    if sharding is not None:\n"
        '        raise ValueError("update and optimizer_sharding say the same: leave out update")\n'
        "    warn_renamed(\n"
        '        f"DistributedOptimizer(update={update!r})",\n'
        '        f"optimizer_sharding={UPDATES[update]}",\n'
        "        stacklevel=4,\n"
        "    )\n"
        "    return UPDATES[update]\n",
    ),
    (
        "wfbp/torch/optimizer.py",
        "def chosen_coupling(optimizer: torch.optim.Optimizer, update: str) -> UpdateCoupling:",
        "def chosen_coupling(\n    optimizer: torch.optim.Optimizer, sharding: bool | None\n"
        ") -> UpdateCoupling:",
    ),
    ("wfbp/torch/optimizer.py", 'if update == "sharded" and', "if sharding is True and"),
    ("wfbp/torch/optimizer.py", 'if update == "replicated" and', "if sharding is False and"),
    ("wfbp/torch/optimizer.py", "update is 'sharded', but", "optimizer_sharding is True, but"),
    ("wfbp/torch/optimizer.py", "use 'auto' or 'replicated'", "use None or False"),
    (
        "wfbp/torch/optimizer.py",
        "from wfbp.core.types import Op\n",
        "from wfbp.core.types import Op\nfrom wfbp.deprecation import warn_renamed\n",
    ),
    (
        "wfbp/torch/__init__.py",
        "\nAverage = Op.AVERAGE\n",
        "\n\ndef choose_device() -> torch.device:\n"
        '    """Deprecated: :func:`set_local_device`."""\n'
        '    warn_renamed("wfbp.torch.choose_device()", "wfbp.torch.set_local_device()")\n'
        "    return set_local_device()\n\n\nAverage = Op.AVERAGE\n",
    ),
    (
        "wfbp/torch/__init__.py",
        "from wfbp.core.types import Op\n",
        "import torch\n\nfrom wfbp.core.types import Op\n"
        "from wfbp.deprecation import warn_renamed\n",
    ),
    # --- jax
    (
        "wfbp/jax/__init__.py",
        "\nAverage = Op.AVERAGE\n",
        "\n\ndef choose_device() -> jax.Device:\n"
        '    """Deprecated: :func:`set_local_device`."""\n'
        '    warn_renamed("wfbp.jax.choose_device()", "wfbp.jax.set_local_device()")\n'
        "    return set_local_device()\n\n\n"
        "def reports() -> dict[str, dict[str, Any]]:\n"
        '    """Deprecated: :func:`report`."""\n'
        '    warn_renamed("wfbp.jax.reports()", "wfbp.jax.report()")\n'
        "    return report()\n\n\nAverage = Op.AVERAGE\n",
    ),
    (
        "wfbp/jax/__init__.py",
        "from wfbp.core.types import Op\n",
        "from typing import Any\n\nimport jax\n\nfrom wfbp.core.types import Op\n"
        "from wfbp.deprecation import warn_renamed\n",
    ),
    # --- changelog
    (
        "CHANGELOG.md",
        "## Unreleased\n\n",
        "## Unreleased\n\n### Deprecated\n\n"
        "Old names work for one more version and warn once:\n\n"
        "- `DistributedOptimizer(update=...)`: use `optimizer_sharding=True`, `False` or `None`.\n"
        "- `choose_device()` of `wfbp.torch` and `wfbp.jax`: use `set_local_device()`.\n"
        "- `wfbp.jax.reports()`: use `wfbp.jax.report()`, named as PyTorch's `optimizer.report()`.\n"
        "- `WFBP_DIRECT_BYTES`, `WFBP_DRIFT`, `WFBP_PROBE_S`, `WFBP_TRIAL_S` and `WFBP_RUN_DIR`, and\n"
        "  the fields of `Config`: use `WFBP_ZERO_COPY_MIN_BYTES`, `WFBP_REPLAN_THRESHOLD`,\n"
        "  `WFBP_PROBE_BUDGET_S`, `WFBP_TRIAL_MIN_S` and `WFBP_RECORD_DIR`.\n\n",
    ),
    # --- layers
    (
        "tests/unit/test_layers.py",
        '    "errors": set(),\n    "config": {"core", "errors"},\n',
        '    "errors": set(),\n    "deprecation": set(),\n'
        '    "config": {"core", "deprecation", "errors"},\n',
    ),
    # --- what nobody uses
    (
        "wfbp/core/trace.py",
        "    def backward_index(self, k: int) -> int:\n"
        '        """Index into ``tensors`` of the k-th gradient (from 0) of backward."""\n'
        "        return len(self.tensors) - 1 - k\n\n",
        "",
    ),
    (
        "tests/unit/core/test_trace.py",
        "    assert [trace.backward_index(k) for k in range(3)] == [2, 1, 0]\n",
        "",
    ),
    (
        "wfbp/sim/simulate.py",
        "    @property\n    def backward_start_s(self) -> float:\n"
        '        """When backward began."""\n'
        "        return next(span.start_s for span in self.compute"
        " if span.phase is Phase.BACKWARD)\n\n",
        "",
    ),
    (
        "tests/unit/sim/test_simulate.py",
        "    origin_s = before.backward_start_s\n",
        "    origin_s = next(s.start_s for s in before.compute if s.phase is Phase.BACKWARD)\n",
    ),
    (
        "wfbp/runtime/engine/engine.py",
        "        self.shard_ranges = [shard_range(s, runtime.rank, runtime.size)"
        " for s in self.specs]\n",
        "",
    ),
    (
        "tests/unit/runtime/test_engine_decoupled.py",
        "engine.shard_ranges[index]",
        "shard_range(engine.specs[index], self.rank, self.size)",
    ),
    (
        "tests/support/device_trainer.py",
        "engine.shard_ranges[index]",
        "shard_range(engine.specs[index], self.rank, self.size)",
    ),
]

REGEX: list[tuple[str, str, str]] = [
    (  # a protocol with one implementor, which is in the same module now
        "wfbp/comm/device/staged.py",
        r"class Stage\(Protocol\):.*?\n\n\n(?=class StagedWork)",
        "",
    ),
    ("wfbp/comm/device/staged.py", r"backend: Stage,", "backend: StagedBackend,"),
    ("docs/decoupled.md", r'`update="replicated"`', "`optimizer_sharding=False`"),
    ("tests/parallel/programs/equality.py", r'"update": "replicated"', '"optimizer_sharding": False'),
]

IMPORTS = {
    "tests/unit/runtime/test_engine_decoupled.py": "from wfbp.runtime.transport.buffers import shard_range",
    "tests/support/device_trainer.py": "from wfbp.runtime.transport.buffers import shard_range",
    "tests/unit/sim/test_simulate.py": "from wfbp.core.types import Phase",
}

SET_ALL = {  # names that leave ``__all__``: the program has renamed them there already
}


def add_import(text: str, line: str) -> str:
    if line in text:
        return text
    last = 0
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            last = node.end_lineno or 0
    lines = text.split("\n")
    lines.insert(last, line)
    return "\n".join(lines)


def third_pass(root: Path, report: Report) -> None:
    for path, old, new in EDITS:
        file = root / path
        text = file.read_text() if file.exists() else ""
        if old not in text:
            report.error(f"third pass: {path}: not found: {old.strip()[:80]!r}")
            continue
        file.write_text(text.replace(old, new))
    for path, pattern, new in REGEX:
        file = root / path
        text = file.read_text() if file.exists() else ""
        fresh, count = re.subn(pattern, new, text, flags=re.S)
        if not count:
            report.error(f"third pass: {path}: no match: {pattern[:80]!r}")
            continue
        file.write_text(fresh)
    for path, line in IMPORTS.items():
        file = root / path
        if file.exists():
            file.write_text(add_import(file.read_text(), line))
    layers = root / "tests/unit/test_layers.py"
    addition = (HERE / "layers_addition.py").read_text()
    if "test_modules_form_no_circle" not in layers.read_text():
        layers.write_text(layers.read_text() + addition)
    unknown = root / "wfbp/config.py"
    text = unknown.read_text()
    fresh = unknown_variables(text)
    if fresh == text:
        report.error("third pass: wfbp/config.py: unknown_variables() has changed")
    unknown.write_text(fresh)
    for module in load(root).values():
        updates(root, module, report)
    for file in (HERE / "files").rglob("*.py"):
        target = root / file.relative_to(HERE / "files")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def unknown_variables(text: str) -> str:
    """Old names of variables are told of in the warning that ``init`` logs."""
    def fresh(match: re.Match[str]) -> str:
        return (
            match[1]
            + "    renamed = {\n"
            '        f"WFBP_{old.upper()}": f"WFBP_{new.upper()}" for old, new in RENAMED.items()\n'
            "    }\n"
            "    known += renamed\n" + match[2] + "    ignored = "
            "[f\"not a setting, and ignored: {', '.join(parts)}\"] if parts else []\n"
            "    told = [f\"{old} is deprecated: use {new}\" for old, new in renamed.items() "
            "if old in source]\n"
            '    return "; ".join([*told, *ignored])\n'
        )

    return re.sub(
        r"(    parts = \[\]\n)(    for name in .*?\n        near = .*?\n        parts\.append\(.*?\n)"
        r"    return .*?\n",
        fresh,
        text,
        count=1,
    )


def updates(root: Path, module: Module, report: Report) -> None:
    """``update=`` in calls of DistributedOptimizer becomes ``optimizer_sharding=``."""
    values = {"auto": "None", "sharded": "True", "replicated": "False"}
    changed = False
    for node, _ in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        called: Any = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        keywords = {k.arg: k for k in node.keywords}
        if name != "DistributedOptimizer" or "update" not in keywords:
            continue
        keyword = keywords["update"]
        start = module.at(keyword.lineno, keyword.col_offset)
        end = module.span(keyword.value)[1]
        if isinstance(keyword.value, ast.Constant) and keyword.value.value in values:
            new = values[keyword.value.value]
        elif isinstance(keyword.value, ast.Constant):
            continue
        else:
            new = f"SHARDING[{ast.unparse(keyword.value)}]"
            changed = True
        module.edit(start, end, f"optimizer_sharding={new}")
    if not module.edits:
        return
    text = module.result()
    if changed:
        if module.name.startswith("wfbp."):
            text = re.sub(
                r"\n(?=UPDATES = )",
                '\nSHARDING = {"auto": None, "sharded": True, "replicated": False}\n',
                text,
                count=1,
            )
        else:
            text = add_import(text, "from tests.support.sharding import SHARDING")
        if "SHARDING =" not in text and "import SHARDING" not in text:
            report.error(f"third pass: {module.path}: SHARDING has no definition")
    (root / module.path).write_text(text)
