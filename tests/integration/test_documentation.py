"""The documentation as a site: it builds without a warning, and its pages fit a screen."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
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


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.long)])
def test_pages_fit(width: int, site: Path, tmp_path: Path) -> None:
    """Nothing is wider than the window, and pictures are there and large enough to be read."""
    pages = {
        name: (site / name).with_suffix(".html").as_uri()
        for path in (ROOT / "docs").rglob("*.md")
        if (name := path.relative_to(ROOT / "docs").as_posix())
    }
    page = tmp_path / "measure.html"
    page.write_text(MEASURE.format(width=width, pages=json.dumps(pages)))
    dom, log = dump(page, tmp_path, "--allow-file-access-from-files", "--window-size=1400,1000")
    found = re.search(r"<pre>(.*)</pre>", dom)
    assert found is not None, log
    told = json.loads(html.unescape(found[1]))
    assert told.keys() == pages.keys()
    assert told["index.md"]["title"] == "wfbp"
    assert told["index.md"]["pictures"] == 2
    assert told["explanation/concepts.md"]["pictures"] == 5
    for name, measured in told.items():
        assert measured["hidden"] == 0, f"{name} is wider than {width} pixels"
        assert measured["drawn"] == measured["pictures"], f"{name} lacks pictures"
        assert measured["narrow"] > 0.8 * min(width, 600), f"{name} has small pictures: {measured}"
    assert "CONSOLE" not in log, log
