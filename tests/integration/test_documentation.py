"""The documentation as a site: it builds without a warning, and its front page fits a screen."""

from __future__ import annotations

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
MEASURE = """<!doctype html><body><iframe style="width:{width}px;height:900px;border:0"
src="{page}"></iframe><script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument
  const pictures = [...page.querySelectorAll("article img")]
  const told = {{
    hidden: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    title: page.querySelector("h1").innerText,
    pictures: pictures.length,
    drawn: pictures.filter((picture) => picture.naturalWidth > 0).length,
  }}
  document.body.innerHTML = "<pre>" + JSON.stringify(told) + "</pre>"
}}
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


@pytest.mark.parametrize("width", [390, 1280])
def test_the_front_page_fits(width: int, site: Path, tmp_path: Path) -> None:
    page = tmp_path / "measure.html"
    page.write_text(MEASURE.format(width=width, page=(site / "index.html").as_uri()))
    dom, log = dump(page, tmp_path, "--allow-file-access-from-files", "--window-size=1400,1000")
    found = re.search(r"<pre>(.*)</pre>", dom)
    assert found is not None, log
    told = json.loads(found[1])
    assert told == {"hidden": 0, "title": "wfbp", "pictures": 2, "drawn": 2}
    assert "CONSOLE" not in log, log
