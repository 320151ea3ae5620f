"""Pages stay short and readable, and public names few; ``tools.front_door`` counts."""

from __future__ import annotations

import dataclasses

import pytest

from tools import front_door
from tools.front_door import Prose
from wfbp.config import Config


def test_readers_do_not_stumble() -> None:
    docs, package = Prose.of(front_door.DOCS), Prose.of(front_door.PACKAGE)
    assert docs.num_words > 10_000
    assert package.num_words > 30_000
    assert docs.per_1000 <= 2, docs.findings
    assert package.per_1000 <= 3, package.findings


def test_pages_are_short() -> None:
    assert len((front_door.ROOT / "README.md").read_text().splitlines()) <= 120
    assert 10_000 < front_door.num_words(*front_door.USER_PAGES) <= 20_000


@pytest.mark.parametrize(("module", "most"), [("wfbp", 41), ("wfbp.torch", 45), ("wfbp.jax", 28)])
def test_few_names_are_public(module: str, most: int) -> None:
    pytest.importorskip(module.replace("wfbp.", ""))
    assert front_door.num_names(module) <= most


def test_settings_are_few() -> None:
    assert len(dataclasses.fields(Config)) <= 21


@pytest.mark.parametrize(
    ("sentence", "count"),
    [
        ("The buffer holds all gradients of the group.", 0),
        ("It is sent in one message behind backward.", 1),
        ("What travels is hidden by the forward pass.", 1),
        ("Each rank has a buffer of its own.", 1),
        ("One word " + "and another word " * 11, 1),
        ("Short, of ours.", 0),
    ],
)
def test_a_sentence_is_judged(sentence: str, count: int) -> None:
    assert len(list(front_door.findings([(1, sentence)]))) == count


def test_prose_is_found() -> None:
    page = "# Heading\n\nText of\na page.\n\n```python\ncode()\n```\n\n| a | b |\n"
    assert list(front_door.of_markdown(page)) == [(3, "Text of\na page.")]
    source = '"""Doc."""\nx = 1  # why\n"""Of x."""\n\ndef f():\n    """Of f."""\n'
    assert sorted(front_door.of_python(source)) == [
        (1, "Doc."),
        (2, "why"),
        (3, "Of x."),
        (6, "Of f."),
    ]
