"""Figures of what a reader meets first: sentences, words, public names, settings.

    python -m tools.front_door               # all figures
    python -m tools.front_door --findings    # each sentence that a reader may stumble over

A *finding* is a sentence of more than 32 words, or one that matches a pattern below. The patterns
cannot read, so some findings are fine. Prose is running text of Markdown, docstrings and comments.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from wfbp.config import Config

ROOT = Path(__file__).resolve().parents[1]
DOCS, PACKAGE = [ROOT / "README.md", ROOT / "docs"], [ROOT / "wfbp"]
USER_PAGES = ("tutorials", "how-to", "reference", "explanation")
MODULES = ("wfbp", "wfbp.torch", "wfbp.jax")
LONG = 32
PATTERNS = [
    r"\bbehind (?:it|that|them|backward|forward|training|steps?|zero_grad|another|`)",
    r"\bbehind (?:the (?:step|last|first|gather|call|update)|a (?:step|call))",
    r"^(?:What|Where|Who|Whoever|Whatever|Of what|That which)\b(?!.*\?$)",
    r"\b(?:by|in) turns\b",
    r"\b(?:lie|lies|lay|stands?|stood) (?:in|on|at|where|beside|apart|there|between|within)\b",
    r"\b(?:lets? go|gives? up|given up|taken back|takes? back|comes? out of)\b",
    r"\b(?:goes? on|has gone|are gone)\b",
    r"\bwithout a word\b|\bin words of\b|\bsays? (?:so|it|that it)\b",
    r"\bof (?:its|their|his|our|one's) own\b|\bof ours\b",
    r"^(?:Nothing|Nobody|No one)\b",
    r"\b(?:which|that|what) (?:is|are) there\b",
    r"\b(?:whoever|nobody|somebody|anybody|everybody)\b",
    r"\b(?:by|in|of|to|from|behind|beside) which\b",
    r"\b(?:in the midst|beforehand|[Bb]esides|thereby|whereby|thus)\b",
]
END = r"(?<=[.!?:;])\s+(?=[A-Z`\"(])|\n\s*\n|\n\s*(?:[-*]|\d+\.) "


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each passage of prose."""
    yield from (of_markdown if path.suffix == ".md" else of_python)(path.read_text())


def of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and lists; no code, tables, headings, quotes or images."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    passage: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not line.startswith(("    ", "|", "#", ">", "<", "[", "!")):
            passage.append(line)
        elif passage:
            yield number - len(passage), "\n".join(passage)
            passage = []


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, also those of variables, and comments."""
    for node in ast.walk(ast.parse(source)):
        for child in body if isinstance(body := getattr(node, "body", None), list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, re.sub(r"^\s*(?:>>>|\.\.\.).*$", "", value.value, flags=re.M)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def findings(passages: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Line and text of each sentence that a reader may stumble over."""
    for line, passage in passages:
        for part in re.split(END, re.sub(r"`[^`]*`", "`x`", passage)):
            sentence = " ".join(part.split())
            words = len(sentence.split())
            if words > 3:
                reasons = sum(bool(re.search(pattern, sentence)) for pattern in PATTERNS)
                yield from [(line, sentence)] * (reasons + (words > LONG))


def files(roots: list[Path]) -> list[Path]:
    """All pages and sources of these files and folders."""
    found = [path for root in roots for path in sorted(root.rglob("*")) or [root]]
    return [path for path in found if path.suffix in (".md", ".py")]


class Prose(NamedTuple):
    """The prose of some files."""

    num_words: int
    findings: list[str]

    @classmethod
    def of(cls, roots: list[Path]) -> Prose:
        """Read the files."""
        words, found = 0, []
        for path in files(roots):
            text = list(passages(path))
            words += sum(len(passage.split()) for _, passage in text)
            name = path.relative_to(ROOT)
            found += [f"{name}:{line}: {sentence}" for line, sentence in findings(text)]
        return cls(words, found)

    @property
    def per_1000(self) -> float:
        """Findings per 1,000 words."""
        return 1000 * len(self.findings) / self.num_words


def num_words(*folders: str) -> int:
    """Words of these folders of the documentation, also in tables and code."""
    pages = files([ROOT / "docs" / folder for folder in folders])
    words = (word for page in pages for word in page.read_text().split())
    return sum(any(map(str.isalnum, word)) for word in words)


def num_names(module: str) -> int:
    """The number of a module's public names."""
    return len(import_module(module).__all__)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.front_door")
    parser.add_argument("--findings", action="store_true")
    options = parser.parse_args()
    for name, roots in (("README and docs", DOCS), ("package", PACKAGE)):
        prose = Prose.of(roots)
        print(
            f"{name}: {len(prose.findings)} findings in {prose.num_words} words of prose, ", end=""
        )
        print(f"{prose.per_1000:.1f} per 1,000")
        for finding in prose.findings if options.findings else ():
            print(f"    {finding[:160]}")
    print(f"README: {len((ROOT / 'README.md').read_text().splitlines())} lines")
    print(f"words in user pages: {num_words(*USER_PAGES)}")
    print(f"words in pages for contributors: {num_words('benchmarks', 'contributing')}")
    for module in MODULES:
        print(f"{module}: {num_names(module)} public names")
    print(f"settings: {len(fields(Config))}")


if __name__ == "__main__":
    main()
