"""A real browser without a window, which reaches no network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

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
)


def dump(page: Path, profile: Path, *flags: str) -> tuple[str, str]:
    """The page's document after its scripts ran, and what the browser logged.

    Skips the calling test where no browser is installed.

    Args:
        page: a file.
        profile: a folder for the browser's own files.
        flags: more options of the browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    done = subprocess.run(
        [browser, *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
