"""The page of ``wfbp report``, in a real browser that cannot reach any network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from tests.support.browser import dump
from tests.support.cli_runs import wfbp
from tests.support.run_documents import record


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with two engines, one of which never got to its plan."""
    folder = record(tmp_path_factory.mktemp("run"))
    record(folder, name="early", trace=None, costs=None)
    outcome = wfbp("report", folder)
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{folder / 'report.html'}\n"
    return folder / "report.html"


def test_a_browser_draws_every_figure(page: Path, tmp_path: Path) -> None:
    asked = page.read_text().count('class="plotly-graph-div"')
    assert asked == 4
    dom, log = dump(page, tmp_path, "--window-size=1280,3000")
    assert dom.count('class="plot-container') == asked
    body = dom[dom.index("<body>") : dom.index("</body>")]
    assert "rank 1 messages" in body  # a label of the Gantt chart, drawn
    assert body.count('<ul class="legend">') == asked
    assert "lower bound" in body
    assert "CONSOLE" not in log, log  # scripts that fail, and what the policy had to stop


def test_the_page_fetches_nothing(page: Path) -> None:
    text = page.read_text().replace(get_plotlyjs(), "")
    assert len(text) < 300_000
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe|script[^>]+src)", text)


def test_names_cannot_leave_their_place(tmp_path: Path) -> None:
    folder = record(tmp_path / "<b>run", name="</script><img src=x onerror=alert(1)>")
    text = Path(wfbp("report", folder).out.strip()).read_text().replace(get_plotlyjs(), "")
    assert "<img" not in text
    assert text.count("</script>") == text.count("<script") == 4
    assert "<b>run" not in text


def test_the_page_fits_a_telephone(page: Path, tmp_path: Path) -> None:
    """At 390 pixels nothing is wider than the page. (The browser's window is at least 500 wide.)"""
    text = page.read_text().replace("<body>", '<body style="width: 358px; margin: 0">')
    check = """<script>
    const wide = [...document.querySelectorAll(
      "body > *, .plot-container, .legend li, .xtitle, .ytitle")].filter(
      (e) => e.getBoundingClientRect().right > 390.5);
    document.documentElement.dataset.wide = "checked " + wide.map((e) => e.tagName).join();
    </script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(text.replace("</body>", check))
    dom, log = dump(copy, tmp_path / "profile", "--window-size=500,3000")
    assert 'data-wide="checked "' in dom, re.findall('data-wide="[^"]*"', dom)
    assert "CONSOLE" not in log, log
