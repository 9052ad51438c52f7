"""How long the page takes to show something, and to show its runs, in a real browser."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

LOADS = 7
PAINTED = (
    "performance.getEntriesByType('paint').find(each => each.name === 'first-contentful-paint')?.startTime ?? null"
)
FILLED = "() => document.querySelectorAll('#runs tr').length > 0 && performance.now()"


def measured(url: str, token: str) -> dict[str, Any] | None:
    """Seconds from the beginning of navigation to the first contentful paint, and until runs are in the table.

    Of the first load of a new browser, the median, and the slowest; None where no Chromium or no playwright is installed.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not importlib.util.find_spec("playwright"):
        return None
    from playwright.sync_api import sync_playwright

    paints, fills = [], []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(LOADS):
            page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
            page.goto(f"{url}/#token={token}")
            fills.append(page.wait_for_function(FILLED).json_value() / 1e3)
            paints.append(page.wait_for_function(PAINTED).json_value() / 1e3)
            page.context.close()
        browser.close()
    return {
        "first_paint": paints[0],
        "paint": sorted(paints)[LOADS // 2],
        "slowest_paint": max(paints),
        "first_filled": fills[0],
        "filled": sorted(fills)[LOADS // 2],
    }
