"""The page of ``wfbp report``, in a real browser that cannot reach any network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.browser import dump
from tests.support.cli_runs import wfbp
from tests.support.run_documents import record
from wfbp.cli.page import library


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with two engines, one of which never got to its plan."""
    folder = record(tmp_path_factory.mktemp("run"))
    record(folder, name="early", trace=None, costs=None)
    outcome = wfbp("report", folder)
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{folder / 'report.html'}\n"
    return folder / "report.html"


@pytest.mark.parametrize(("scheme", "setting"), [("light", 1), ("dark", 0)])
def test_a_browser_draws_every_figure(
    scheme: str, setting: int, page: Path, tmp_path: Path
) -> None:
    asked = len(re.findall(r'<div class="figure" id=', page.read_text()))
    assert asked == 4
    dom, log = dump(
        page,
        tmp_path,
        "--window-size=1280,3000",
        f"--blink-settings=preferredColorScheme={setting}",
    )
    assert f'data-theme="{scheme}"' in dom
    assert f'data-drawn="{asked}"' in dom
    assert dom.count('class="picture"') == asked
    body = dom[dom.index("<main>") : dom.index("</main>")]
    assert "rank 1 messages" in body  # a label of the Gantt chart, drawn
    assert "lower bound" in body
    assert "CONSOLE" not in log, log  # scripts that fail, and what the policy had to stop


def test_the_page_fetches_nothing(page: Path) -> None:
    text = page.read_text().replace(library(), "")
    assert len(text) < 300_000
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe|script[^>]+src)", text)


def test_names_cannot_leave_their_place(tmp_path: Path) -> None:
    folder = record(tmp_path / "<b>run", name="</script><img src=x onerror=alert(1)>")
    text = Path(wfbp("report", folder).out.strip()).read_text().replace(library(), "")
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "<b>" not in text


def test_the_page_fits_a_telephone(page: Path, tmp_path: Path) -> None:
    """At 390 pixels nothing is wider than the page. (The browser's window is at least 500 wide.)"""
    text = page.read_text().replace("<body>", '<body style="width: 390px">')
    check = """<script>
    const wide = [...document.querySelectorAll("body *")].filter(
      (e) => e.getBoundingClientRect().right > 390.5);
    document.documentElement.dataset.wide = "checked " + wide.map((e) => e.tagName).join();
    </script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(text.replace("</body>", check))
    dom, log = dump(copy, tmp_path / "profile", "--window-size=500,3000")
    assert 'data-wide="checked "' in dom, re.findall('data-wide="[^"]*"', dom)
    assert "CONSOLE" not in log, log


def test_the_page_is_small(page: Path) -> None:
    assert page.stat().st_size < 1_500_000
