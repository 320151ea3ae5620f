"""Applies the new layout to a clean checkout: ``apply.py CHECKOUT [--no-commit] [--only a|b|c]``."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import layout  # noqa: E402
import names  # noqa: E402
from relocate import Plan, Relocation, Report, Tree  # noqa: E402
from source import Module  # noqa: E402
from third import third_pass  # noqa: E402

TEXTS = ("*.md", "*.toml", "*.yaml", "*.yml", "*.in", "Makefile", "*.cc", "*.cu", "*.h", "*.inl",
         "*.pyi", "*.html", "*.sh", "*.txt", "*.cfg")  # fmt: skip
SKIP = {".git", ".venv", ".venv-openmpi", "build", "dist", "tools", "LICENSE"}


def git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(args)}: {done.stderr}")
    return done.stdout


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# --- text


class Words:
    """What is said of modules, files and symbols in strings, comments and documents."""

    def __init__(self, moves: dict[str, str], symbols: dict[tuple[str, str], str]) -> None:
        self.moves = moves
        self.symbols = symbols
        self.paths = {
            str(layout.as_path(old)): str(layout.as_path(new)) for old, new in moves.items()
        }
        for old, new in layout.FOLDERS.items():
            self.paths.setdefault(old + "/", new + "/")
        leaves: dict[str, set[str]] = defaultdict(set)
        for old, new in moves.items():
            if old.startswith("wfbp."):
                leaves[old.rpartition(".")[2]].add(new.rpartition(".")[2])
        self.leaves = {f"{k}.py": f"{v.pop()}.py" for k, v in leaves.items() if len(v) == 1}
        self.classes: dict[str, str] = {}
        clash = set()
        for (_, old), new in symbols.items():
            if re.match(r"_?[A-Z][a-z]", old) and old not in names.NO_TEXT:
                if self.classes.get(old, new) != new:
                    clash.add(old)
                self.classes[old] = new
        for old in clash:
            self.classes.pop(old, None)
        path_words = sorted(self.paths, key=len, reverse=True)
        short = {}
        for old, new in self.paths.items():
            if old.startswith("wfbp/"):
                short[old[5:]] = new[5:]
        self.short = short
        everything = [*path_words, *sorted(short, key=len, reverse=True)]
        self.path_pattern = (
            re.compile("(?<![\\w/.-])(" + "|".join(map(re.escape, everything)) + ")(?!\\w)")
            if everything
            else None
        )

    def dotted(self, match: re.Match[str]) -> str:
        text = match.group(0)
        parts = text.split(".")
        for n in range(len(parts), 1, -1):
            module = ".".join(parts[:n])
            if module in self.moves or (module in self.known and n > 1):
                new = self.moves.get(module, module)
                rest = parts[n:]
                if rest:
                    rest[0] = self.symbols.get((module, rest[0]), rest[0])
                return ".".join([new, *rest])
        return text

    known: set[str] = set()

    def replace(self, text: str, *, code: bool) -> str:
        text = re.sub(r"\b(wfbp|tests)(\.[A-Za-z_]\w*)+", self.dotted, text)
        if self.path_pattern is not None:
            text = self.path_pattern.sub(
                lambda m: self.paths.get(m[1]) or self.short[m[1]], text
            )

        def ticked(match: re.Match[str]) -> str:
            inner = match.group(2)
            inner = self.leaves.get(inner, inner)
            inner = re.sub(
                r"(?<![\w.])[~.]?_?[A-Z]\w*", lambda w: self.class_word(w.group(0)), inner
            )
            return match.group(1) + inner + match.group(1)

        text = re.sub(r"(``|`)([^`\n]+)\1", ticked, text)
        for old, new in names.TEXT:
            text = re.sub(old, new, text)
        return text

    def class_word(self, word: str) -> str:
        lead = word[0] if word[0] in "~." else ""
        bare = word[len(lead) :]
        return lead + self.classes.get(bare, bare)


def strings_and_comments(module: Module) -> list[tuple[int, int]]:
    """Byte ranges of string tokens and comments."""
    import io
    import tokenize

    spans = []
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            lines = module.text.splitlines(keepends=True)
            (l1, c1), (l2, c2) = token.start, token.end
            start = module.at(l1, len(lines[l1 - 1][:c1].encode()))
            end = module.at(l2, len(lines[l2 - 1][:c2].encode()))
            spans.append((start, end))
    return spans


def rewrite_strings(module: Module, words: Words) -> None:
    for start, end in strings_and_comments(module):
        inside = [x for x in module.edits if x[0] < end and start < x[1]]
        old = module.data[start:end].decode()
        if inside:
            continue
        new = words.replace(old, code=True)
        for pattern, table in names.TOKENS:
            if re.fullmatch(pattern, str(module.path)) and old[1:-1] in table:
                new = f'"{table[old[1:-1]]}"'
        if new != old:
            module.edit(start, end, new)


def text_files(root: Path) -> list[Path]:
    result = []
    for line in git(root, "ls-files").splitlines():
        path = Path(line)
        if path.parts[0] in SKIP or path.name in SKIP:
            continue
        if any(path.match(pattern) for pattern in TEXTS):
            result.append(path)
    return result


# --- passes


def write_moves(root: Path, tree: Tree, moves: dict[str, str], report: Report) -> None:
    for name, module in tree.modules.items():
        new = moves.get(name, name)
        source = root / module.path
        text = module.result()
        if new == name:
            if text != module.text:
                source.write_text(text)
            continue
        target = root / layout.as_path(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        git(root, "mv", str(module.path), str(target.relative_to(root)))
        target.write_text(adjust_depth(text, module.path, layout.as_path(new), report))


def adjust_depth(text: str, old: Path, new: Path, report: Report) -> str:
    delta = len(new.parts) - len(old.parts)
    if not delta or "__file__" not in text:
        return text
    text = re.sub(
        r"(Path\(__file__\)(?:\.resolve\(\))?\.parents\[)(\d+)\]",
        lambda m: f"{m[1]}{int(m[2]) + delta}]",
        text,
    )
    if re.search(r"__file__\)(\.resolve\(\))?\.parent\b(?!s)", text):
        report.note(f"{new}: Path(__file__).parent in a file that has moved")
    return text


def make_packages(root: Path, moves: dict[str, str]) -> None:
    for new in {*moves.values()}:
        if not new.startswith("wfbp."):
            continue
        package = new.rpartition(".")[0]
        path = root / Path(*package.split(".")) / "__init__.py"
        if not path.exists():
            path.write_text(names.PACKAGE_DOCS.get(package, f'"""Parts of {package}."""\n'))
            git(root, "add", str(path.relative_to(root)))


def first_pass(root: Path, report: Report, cache: Path) -> dict[str, str]:
    from members import Analysis
    from rename import Members

    say("reading the tree")
    tree = Tree(root)
    moves, _, notes, _ = layout.package_moves(set(tree.modules))
    test_moves, more = layout.test_moves(set(tree.modules))
    report.lines += notes + more
    moves |= test_moves
    say("mypy, for the owners of attributes")
    os.chdir(root)
    analysis = Analysis(root, cache, root / ".venv" / "bin" / "python")
    say(f"mypy: {analysis.num_errors} errors outside of the package's own check")
    members = Members(analysis, tree, report)
    plan = Plan(
        moves,
        names.symbols(tree, report),
        names.qualified(names.LOCALS, tree, report, "local"),
        names.qualified(names.PARAMS, tree, report, "parameter"),
        members.rename,
        names.WORDS,
        names.NOT_WORDS,
        names.WORD_SCOPES,
    )
    relocation = Relocation(tree, plan, report, analysis)
    relocation.run()
    members.finish()
    Words.known = set(tree.modules) | tree.packages
    words = Words(moves, plan.symbols)
    for module in tree.modules.values():
        rewrite_strings(module, words)
    say("writing")
    others = text_files(root)
    write_moves(root, tree, moves, report)
    for path in others:
        if path.suffix == ".py" or not (root / path).exists():
            continue
        old = (root / path).read_text()
        new = words.replace(old, code=False)
        if new != old:
            (root / path).write_text(new)
    for old_folder, new_folder in layout.FOLDERS.items():
        if (root / old_folder).exists():
            git(root, "mv", old_folder, new_folder)
    make_packages(root, moves)
    for path, old_text, new_text in names.PATCHES_FIRST:
        patch(root, path, old_text, new_text, report)
    return moves


def patch(root: Path, path: str, old: str, new: str, report: Report) -> None:
    file = root / path
    if not file.exists():
        report.error(f"patch: {path} is missing")
        return
    text = file.read_text()
    if old not in text:
        report.error(f"patch: {path}: not found: {old[:70]!r}")
        return
    file.write_text(text.replace(old, new))


def second_pass(root: Path, report: Report, merges: dict[str, str], order: list[str]) -> None:
    tree = Tree(root)
    merges = {old: new for old, new in merges.items() if old in tree.modules}
    groups: dict[str, list[str]] = defaultdict(list)
    for part in order:
        if part in merges:
            groups[merges[part]].append(part)
        elif part in merges.values():
            groups[part].append(part)
    symbols = merge_collisions(tree, groups, report)
    plan = Plan(merges, symbols)
    relocation = Relocation(tree, plan, report)
    relocation.run()
    Words.known = set(tree.modules) | tree.packages
    words = Words(merges, symbols)
    for module in tree.modules.values():
        rewrite_strings(module, words)
    texts = {name: module.result() for name, module in tree.modules.items()}
    for name, module in tree.modules.items():
        if name not in merges and name not in groups and texts[name] != module.text:
            (root / module.path).write_text(texts[name])
    for new, parts in groups.items():
        paths = [tree.modules[part].path for part in parts]
        text = merged(new, [(part, texts[part]) for part in parts], report)
        target = root / layout.as_path(new)
        longest = max(paths, key=lambda p: len((root / p).read_text()))
        for path in paths:
            if path != longest and root / path != target:
                git(root, "rm", "-q", "-f", str(path))
        if root / longest != target:
            if target.exists():
                git(root, "rm", "-q", "-f", str(target.relative_to(root)))
            git(root, "mv", str(longest), str(target.relative_to(root)))
        target.write_text(text)
    for path in text_files(root):
        if path.suffix != ".py":
            old = (root / path).read_text()
            new_text = words.replace(old, code=False)
            if new_text != old:
                (root / path).write_text(new_text)
    for path, old_text, new_text in names.PATCHES_SECOND:
        patch(root, path, old_text, new_text, report)


def merge_collisions(
    tree: Tree, groups: dict[str, list[str]], report: Report
) -> dict[tuple[str, str], str]:
    """New names for what would have the same name in one module."""
    symbols: dict[tuple[str, str], str] = {}
    for new, parts in groups.items():
        seen: dict[str, tuple[str, object]] = {}
        for part in parts:
            module = tree.modules[part]
            for name, nodes in module.top.bound.items():
                what: object = None
                node = nodes[0]
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    what = imported(tree, part, name, node, parts)
                    if what is None:
                        continue
                else:
                    what = definition(module, name)
                if name == "__all__":
                    continue
                if name in seen and seen[name][1] != what:
                    other = seen[name][0]
                    if (new, part.rpartition(".")[2], name) in names.COLLISIONS:
                        fresh = names.COLLISIONS[new, part.rpartition(".")[2], name]
                    else:
                        private = "_" if name.startswith("_") else ""
                        bare = name.lstrip("_")
                        leaf = part.rpartition(".")[2]
                        fresh = (
                            f"{private}{''.join(w.title() for w in leaf.split('_'))}{bare}"
                            if bare[:1].isupper() and not bare.isupper()
                            else f"{leaf.upper() if bare.isupper() else leaf}_{bare}"
                        )
                        if private and not fresh.startswith("_"):
                            fresh = private + fresh
                        report.note(f"merge {new}: {name} of {other} and {part}: {part}'s is {fresh}")
                    if isinstance(node, (ast.Import, ast.ImportFrom)):
                        report.error(f"merge {new}: import {name} of {part} meets {other}'s")
                        continue
                    symbols[part, name] = fresh
                else:
                    seen.setdefault(name, (part, what))
    return symbols


def imported(tree: Tree, part: str, name: str, node: ast.AST, parts: list[str]) -> object:
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                origin = tree.origin(node.module or "", alias.name) or (node.module, alias.name)
                if origin[0] in parts and tree.is_module(node.module or ""):
                    return None
                if f"{node.module}.{alias.name}" in parts:
                    return None
                return ("import", *origin)
    return ("import", ast.unparse(node))


def definition(module: Module, name: str) -> object:
    for statement in module.tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return ("text", ast.unparse(statement))
    return ("definition", module.name, name)


def merged(new: str, parts: list[tuple[str, str]], report: Report) -> str:
    """One module of several: docstrings and imports united, the rest one after another."""
    docs: list[str] = []
    imports: list[str] = []
    typing_imports: list[str] = []
    bodies: list[str] = []
    exported: list[str] = []
    constants: set[str] = set()
    for part, text in parts:
        module = Module(layout.as_path(part), part, text)
        cut: list[tuple[int, int]] = []
        for n, statement in enumerate(module.tree.body):
            start, end = module.span(statement)
            source = module.data[start:end].decode()
            if n == 0 and ast.get_docstring(module.tree) is not None:
                docs.append(ast.get_docstring(module.tree) or "")
                cut.append((start, end))
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                line_end = module.data.find(b"\n", end)
                comment = module.data[end:line_end].decode()
                imports.append(source + comment)
                cut.append((start, line_end))
            elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
                typing_imports.append(source)
                cut.append((start, end))
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                plain = ast.unparse(statement)
                if plain.startswith("__all__"):
                    exported += ast.literal_eval(statement.value)  # type: ignore[arg-type]
                    cut.append((start, end))
                elif plain in constants:
                    follow = module.tree.body[n + 1 : n + 2]
                    cut.append((start, end))
                    if follow and isinstance(follow[0], ast.Expr):
                        cut.append(module.span(follow[0]))
                constants.add(plain)
        data = bytearray(module.data)
        for start, end in sorted(cut, reverse=True):
            del data[start:end]
        body = data.decode().replace("# wfbp-layout: import dropped\n", "")
        bodies.append(body.strip("\n"))
    doc = names.MODULE_DOCS.get(new) or "\n\n".join(d.strip() for d in docs)
    if new not in names.MODULE_DOCS:
        report.note(f"docstring: {new} has the {len(docs)} of its parts")
    imports = [line for line in imports if "__future__" not in line]
    out = [f'"""{doc}\n"""' if "\n" in doc else f'"""{doc}"""', "from __future__ import annotations"]
    out.append("\n".join(dict.fromkeys(imports)))
    out += dict.fromkeys(typing_imports)
    if exported:
        out.append(f"__all__ = {sorted(set(exported))!r}")
    return "\n\n".join([*out, *bodies]) + "\n"


def clean(root: Path, report: Report, paths: list[str]) -> None:
    for path in (root / "wfbp").rglob("*.py"):
        strip_dropped(path)
    for path in (root / "tests").rglob("*.py"):
        strip_dropped(path)
    ruff = str(root / ".venv" / "bin" / "ruff")
    for arguments in (
        ["check", "--fix", "-q", "--select", "I", *paths],
        ["check", "--fix", "-q", *paths],
        ["format", "-q", *paths],
    ):
        subprocess.run([ruff, *arguments], cwd=root, check=False, capture_output=True)
    wrap_long_lines(root, ruff)
    left = subprocess.run(
        [ruff, "check", "--output-format", "concise", "."], cwd=root, capture_output=True, text=True
    )
    if left.returncode:
        for line in left.stdout.splitlines()[:-1]:
            report.note(f"ruff: {line}")


def wrap_long_lines(root: Path, ruff: str) -> None:
    """Break comments and docstrings that have become too long; code is left to a person."""
    for _ in range(4):
        done = subprocess.run(
            [ruff, "check", "--select", "E501", "--output-format", "concise", "."],
            cwd=root, capture_output=True, text=True,
        )  # fmt: skip
        places = re.findall(r"^(\S+?):(\d+):\d+: E501", done.stdout, re.M)
        changed = False
        for name, number in sorted(places, key=lambda p: -int(p[1])):
            path = root / name
            lines = path.read_text().split("\n")
            k = int(number) - 1
            line = lines[k]
            inside = in_docstring(path, k + 1)
            indent = line[: len(line) - len(line.lstrip())]
            if line.lstrip().startswith("#"):
                lead = indent + "# "
            elif inside:
                body = line.lstrip()
                item = re.match(r"[\w*]+: ", body) and len(indent) >= 4
                lead = indent + ("    " if item else "")
            elif "  # " in line and len(line[: line.index("  # ")]) <= 100:
                code, _, comment = line.partition("  # ")
                lines[k : k + 1] = [f"{indent}# {comment}", code]
                path.write_text("\n".join(lines))
                changed = True
                continue
            elif (literal := re.fullmatch(r'(\s*)(f?)"([^"\\]*)"(,?)', line)) is not None:
                space, prefix, body, comma = literal.groups()
                for cut in range(min(len(body) - 1, 96 - len(space)), 20, -1):
                    head = body[: cut + 1]
                    if body[cut] == " " and head.count("{") == head.count("}"):
                        lines[k : k + 1] = [
                            f'{space}{prefix if "{" in head else ""}"{head}"',
                            f'{space}{prefix if "{" in body[cut:] else ""}"{body[cut + 1 :]}"{comma}',
                        ]
                        path.write_text("\n".join(lines))
                        changed = True
                        break
                continue
            else:
                continue
            if inside and line.lstrip().startswith('"""') and line.endswith('"""'):
                text = line.rstrip()[:-3]
                cut = text.rfind(" ", 0, 100)
                lines[k : k + 1] = [text[:cut], lead + text[cut + 1 :], indent + '"""']
            else:
                cut = line.rfind(" ", 0, 101)
                if cut <= len(lead):
                    continue
                rest = line[cut + 1 :]
                following = lines[k + 1] if k + 1 < len(lines) else ""
                joins = (
                    following.startswith(lead)
                    and following[len(lead) : len(lead) + 1] not in ("", " ", '"', "*", "-", ">")
                    and len(lead) + len(rest) + 1 + len(following.strip()) <= 400
                    and not re.match(r"[\w*]+: |:param", following.strip())
                )
                if joins:
                    lines[k : k + 2] = [line[:cut], lead + rest + " " + following[len(lead) :]]
                else:
                    lines[k : k + 1] = [line[:cut], lead + rest]
            path.write_text("\n".join(lines))
            changed = True
        if not changed:
            return


def in_docstring(path: Path, number: int) -> bool:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            and node.lineno <= number <= (node.end_lineno or 0)
        ):
            return True
    return False


def strip_dropped(path: Path) -> None:
    text = path.read_text()
    if "# wfbp-layout" in text:
        path.write_text(re.sub(r"\n[ ]*# wfbp-layout: import dropped(?=\n)", "", text))


def commit(root: Path, message: str, dry: bool) -> None:
    git(root, "add", "-A", "--", "wfbp", "tests", "docs", "csrc", "examples", "launch", "README.md",
        "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "setup.py", "Makefile",
        "MANIFEST.in", ".ci", ".pre-commit-config.yaml")  # fmt: skip
    if not dry:
        git(root, "commit", "-q", "-m", message)


def check_tables(root: Path) -> None:
    """What the tables do not know of a checkout; members are compared by name only."""
    report = Report()
    tree = Tree(root)
    _, _, notes, _ = layout.package_moves(set(tree.modules))
    _, more = layout.test_moves(set(tree.modules))
    names.symbols(tree, report)
    for old in names.MEMBERS:
        owner, _, member = f"wfbp.{old}".rpartition(".")
        module, _, kind = owner.rpartition(".")
        source = tree.modules.get(module)
        if source is None or kind not in source.top.bound:
            report.error(f"members: no class {owner}")
        elif not re.search(rf"\b{member}\b", source.text):
            report.error(f"members: {owner} has no {member}")
    print("\n".join([*notes, *more, *report.errors]) or "the tables know everything")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--no-commit", action="store_true")
    parser.add_argument("--only", default="abc")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "wfbp-layout-mypy")
    parser.add_argument("--check", action="store_true", help="only compare the tables with it")
    options = parser.parse_args()
    root = options.checkout.resolve()
    if options.check:
        check_tables(root)
        return
    if git(root, "status", "--porcelain", "--untracked-files=no").strip():
        raise SystemExit(f"{root} is not clean")
    report = Report()
    everything = ["wfbp", "tests", "examples", "launch", "setup.py"]
    names_now = {module.name for module in Tree(root).modules.values()}
    _, merges, _, order = layout.package_moves(names_now)
    options.cache.mkdir(parents=True, exist_ok=True)
    if "a" in options.only:
        first_pass(root, report, options.cache)
        clean(root, report, everything)
        commit(root, names.MESSAGES[0], options.no_commit)
        say("moves and renames are done")
    if "b" in options.only:
        if "a" not in options.only:
            merges, order = layout.merges_from_table()
        second_pass(root, report, merges, order)
        clean(root, report, everything)
        commit(root, names.MESSAGES[1], options.no_commit)
        say("merges are done")
    if "c" in options.only:
        third_pass(root, report)
        clean(root, report, everything)
        if git(root, "status", "--porcelain").strip():
            commit(root, names.MESSAGES[2], options.no_commit)
        say("aliases and removals are done")
    print("\n--- notes")
    print("\n".join(report.lines))
    print("\n--- errors: to be resolved in the tables or by hand")
    print("\n".join(report.errors) or "none")


if __name__ == "__main__":
    main()
