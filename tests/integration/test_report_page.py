"""The page of ``wfbp report``, in a real browser that cannot reach any network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.cli_runs import wfbp
from tests.support.run_documents import record
from wfbp.cli.page import library

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1200,3000",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with two engines, one of which never got to its plan."""
    folder = record(tmp_path_factory.mktemp("run"))
    record(folder, name="early", trace=None, costs=None)
    outcome = wfbp("report", folder)
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{folder / 'report.html'}\n"
    return folder / "report.html"


def dump(page: Path, folder: Path, *flags: str) -> tuple[str, str]:
    """The page's document after its scripts ran, and what the browser logged."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    done = subprocess.run(
        [browser, *FLAGS, *flags, f"--user-data-dir={folder}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(("scheme", "setting"), [("light", 1), ("dark", 0)])
def test_a_browser_draws_every_figure(
    scheme: str, setting: int, page: Path, tmp_path: Path
) -> None:
    asked = len(re.findall(r'<div class="figure" id=', page.read_text()))
    assert asked >= 6
    dom, log = dump(page, tmp_path, f"--blink-settings=preferredColorScheme={setting}")
    assert f'data-theme="{scheme}"' in dom
    assert f'data-drawn="{asked}"' in dom
    assert dom.count('class="plot-container') == asked
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


def test_without_the_plotting_library_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    code, out, err = wfbp("report", record(tmp_path))
    assert (code, out) == (1, "")
    assert err == "wfbp: error: pages need plotly; install it by: pip install 'wfbp[report]'\n"
