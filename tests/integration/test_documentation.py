"""The documentation as a site: it builds without a warning, and its pages fit a screen."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.browser import dump

pytest.importorskip("furo")
pytest.importorskip("myst_nb")

ROOT = Path(__file__).resolve().parents[2]
MEASURE = """<!doctype html><body>
<iframe style="width:{width}px;height:900px;border:0"></iframe><script>
const frame = document.querySelector("iframe")
const measure = (page) => {{
  const root = page.documentElement, pictures = [...page.querySelectorAll("article img")]
  return {{
    hidden: root.scrollWidth - root.clientWidth,
    title: page.querySelector("h1").innerText,
    pictures: pictures.length,
    drawn: pictures.filter((picture) => picture.naturalWidth > 0).length,
    narrow: Math.min(1000, ...pictures.map((picture) => picture.getBoundingClientRect().width)),
  }}
}}
const show = async () => {{
  const told = {{}}
  for (const [name, address] of Object.entries({pages})) {{
    await new Promise((loaded) => {{ frame.onload = loaded; frame.src = address }})
    told[name] = measure(frame.contentDocument)
  }}
  document.body.innerHTML = "<pre>" + JSON.stringify(told) + "</pre>"
}}
show()
</script></body>
"""

PICTURED = {"index.md": 1, "explanation/concepts.md": 5}
"""Pages and how many pictures they have."""
WIDE = (
    "reference/settings.md",
    "reference/cli.md",
    "contributing/where.md",
    "benchmarks/training.md",
)
"""Those with the widest tables and lines of code."""

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages; warnings are errors, such as links to nowhere and names without docstrings."""
    folder = tmp_path_factory.mktemp("site")
    options = ("-q", "-E", "-n", "-W", "--keep-going", "-b", "html", "-d", folder / "doctrees")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *map(str, options), "docs", str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_page_is_there_and_fetches_nothing(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(sources) > 35
    for source in sources:
        text = (site / source).with_suffix(".html").read_text()
        foreign = re.findall(r"""<(?:script|img|link)[^>]+(?:src|href)=["']https?://[^>]*>""", text)
        assert not foreign, f"{source} fetches {foreign}"


def test_the_notebook_was_executed(site: Path) -> None:
    text = (site / "tutorials/plan-from-a-trace.html").read_text()
    assert re.search(r"161 tensors, 97\.5 MiB", text)
    assert text.count("<img alt=") + text.count("<img src=") >= 2


def check_fits(names: Collection[str], width: int, site: Path, tmp_path: Path) -> None:
    """Pages fit the window's width, with all pictures, large enough to be read."""
    addresses = {name: (site / name).with_suffix(".html").as_uri() for name in names}
    page = tmp_path / "measure.html"
    page.write_text(MEASURE.format(width=width, pages=json.dumps(addresses)))
    dom, log = dump(page, tmp_path, "--allow-file-access-from-files", "--window-size=1400,1000")
    found = re.search(r"<pre>(.*)</pre>", dom)
    assert found is not None, log
    told = json.loads(html.unescape(found[1]))
    assert told.keys() == addresses.keys()
    assert told["index.md"]["title"] == "wfbp"
    assert {name: told[name]["pictures"] for name in PICTURED} == PICTURED
    for name, measured in told.items():
        assert measured["hidden"] == 0, f"{name} is wider than {width} pixels"
        assert measured["drawn"] == measured["pictures"], f"{name} lacks pictures"
        assert measured["narrow"] > 0.8 * min(width, 600), f"{name} has small pictures: {measured}"
    assert "CONSOLE" not in log, log


def test_pages_fit(site: Path, tmp_path: Path) -> None:
    check_fits([*PICTURED, *WIDE], 390, site, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("width", [390, 1280])
def test_all_pages_fit(width: int, site: Path, tmp_path: Path) -> None:
    pages = (ROOT / "docs").rglob("*.md")
    check_fits(
        [page.relative_to(ROOT / "docs").as_posix() for page in pages], width, site, tmp_path
    )
