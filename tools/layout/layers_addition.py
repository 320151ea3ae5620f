

RUNTIME = (
    "tuning",
    "arguments",
    "step",
    "transport",
    "progress",
    "runtime",
    "consistency",
    "row_collectives",
    "collectives",
    "process",
    "engine",
    "api",
)
"""The parts of ``wfbp.runtime``, lowest first: each may import those before it, and itself."""

CALLED_BY_PROGRAMS = ("api", "objects", "process_sets", "queries")
"""Modules of ``wfbp.runtime.collectives`` that count as ``api``."""


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, also as ``from package import module``.

    What is imported for annotations alone does not count.
    """
    known = {module_of(file) for file in FILES}
    result = set()
    tree = ast.parse(path.read_text(), str(path))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    for_types = {id(inner) for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= (inner & known) or {node.module}
    return result & known - {module_of(path)}


def test_the_runtime_imports_downward_only() -> None:
    def rank_of(module: str) -> int:
        _, _, part, *inner = module.split(".")
        if part == "collectives" and inner and inner[0] in CALLED_BY_PROGRAMS:
            part = "api"
        return RUNTIME.index(part)

    for path in sorted((PACKAGE / "runtime").rglob("*.py")):
        module = module_of(path)
        if module == "wfbp.runtime":
            continue
        for target in imported_modules(path):
            if target.startswith("wfbp.runtime."):
                assert rank_of(target) <= rank_of(module), f"{module} must not import {target}"


def test_modules_form_no_circle() -> None:
    below = {module_of(path): imported_modules(path) for path in FILES}
    below.pop("wfbp")  # passes names on, lazily
    left = {module: targets & set(below) for module, targets in below.items()}
    while True:
        ready = {module for module, targets in left.items() if not targets & set(left)}
        if not ready:
            break
        for module in ready:
            del left[module]
    assert not left, f"among these modules some import each other: {sorted(left)}"
