"""The page in a real browser, without a network: a newcomer submits a run and sees it train inside its budget.

Needs Chromium (Debian's package is enough) and `pip install playwright axe-core-python`; without them the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.service import demo
from memfit.service.serving import Serving
from service import small_runs
from service.http import client, listening

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
# Where pictures of the page go, to be looked at.
PICTURES = Path(os.environ["MEMFIT_PICTURES"]) if "MEMFIT_PICTURES" in os.environ else None


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with listening(
        tmp_path_factory.mktemp("page") / "service", capacity={"cpu": 16 << 20}, modules=(demo.MODULE,)
    ) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Seen:
    """A page, and what went wrong in it."""

    def __init__(self, browser: Any, **told: Any) -> None:
        self.page = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **told}).new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.set_default_timeout(600_000)

    def picture(self, name: str) -> None:
        if PICTURES is not None:
            PICTURES.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    def violations(self) -> list[str]:
        """What axe finds; by the protocol, as the page's own policy lets no other script in."""
        axe = pytest.importorskip("axe_core_python")
        source = next(Path(axe.__file__).parent.rglob("axe*.js")).read_text(encoding="utf-8")
        session = self.page.context.new_cdp_session(self.page)
        session.send("Runtime.evaluate", {"expression": source})
        told = session.send(
            "Runtime.evaluate",
            {
                "expression": "axe.run().then(r => r.violations.flatMap(v => v.nodes.map(n => v.id + ': ' + n.html)))",
                "awaitPromise": True,
                "returnByValue": True,
            },
        )
        found: list[str] = told["result"]["value"]
        return found


def token(serving: Serving, role: str = "admin") -> str:
    return serving.service.tokens.make("anna", role)


def test_a_newcomer_submits_the_example_and_sees_it_train_inside_its_budget(browser: Any, serving: Serving) -> None:
    seen = Seen(browser, color_scheme="light")
    page = seen.page
    page.goto(f"{serving.url}/#token={token(serving)}")
    page.get_by_role("button", name="Submit a run").click()
    seen.picture("submit")
    assert seen.violations() == []
    page.get_by_label("Name").fill("sorting <b>digits</b>")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.locator("#loss svg").wait_for()
    playwright.expect(page.locator("#devices .box.running")).to_have_count(1)
    seen.picture("running")
    playwright.expect(page.locator("#run-state")).to_have_text(re.compile("^done"), timeout=600_000)
    page.locator("#files li").first.wait_for()
    seen.picture("done")

    assert "token" not in page.url
    assert page.locator("#run-title").inner_text().startswith("sorting <b>digits</b> (run ")
    (run,) = [each for each in serving.store.listed(owner="anna") if each.name.startswith("sorting")]
    assert run.state == "done"
    assert run.plan is not None
    assert run.measured_peak_bytes is not None
    assert run.measured_peak_bytes <= run.plan["budget_bytes"] < run.plan["plain_peak_bytes"]
    assert "Fits:" in page.locator("#words").inner_text()
    assert page.locator("#bytes svg").get_attribute("aria-label").startswith("Peak: plain PyTorch")
    assert seen.violations() == []
    page.get_by_role("button", name="Dark").click()
    seen.picture("dark")
    assert seen.violations() == []
    assert seen.problems == []


def test_a_phone_the_keyboard_alone_and_a_refusal(browser: Any, serving: Serving, tmp_path: Path) -> None:
    with client(serving) as asking:
        code = asking.upload(small_runs.code(tmp_path / "code"))
        refused = asking.submit(small_runs.run_file(budget="30KiB"), code=code, name="too large")["run"]
        asking.wait_for(refused)
    seen = Seen(browser, viewport={"width": 390, "height": 844}, has_touch=True)
    page = seen.page
    page.goto(serving.url)
    page.get_by_label("Token").fill("memfit_wrong")
    page.keyboard.press("Enter")
    page.get_by_text("This token is not good").wait_for()
    seen.problems.clear()  # the browser notes an answer of 401
    page.get_by_label("Token").fill(token(serving, "submit"))
    page.keyboard.press("Enter")
    button = page.get_by_role("button", name=f"{refused} too large")
    button.wait_for()
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_text("The smallest budget that would do").wait_for()
    assert "is too little: the smallest plan found needs" in page.locator("#run-state").inner_text()
    assert page.get_by_role("button", name="Cancel").is_disabled()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    seen.picture("phone")
    assert seen.violations() == []
    assert seen.problems == []


def test_it_paints_at_once_and_asks_nobody_else(browser: Any, serving: Serving) -> None:
    seen = Seen(browser)
    asked: list[str] = []
    seen.page.on("request", lambda request: asked.append(request.url))
    seen.page.goto(f"{serving.url}/#token={token(serving)}")
    seen.page.locator("#devices svg").first.wait_for()
    assert all(url.startswith((serving.url, "data:")) for url in asked)
    assert seen.problems == []


def test_a_study_its_trials_and_their_runs(browser: Any, serving: Serving) -> None:
    # As `memfit.service.studies` writes them: what runs is the business of other tests.
    search = {"space": {"optim.lr": [0.003, 0.03]}, "objective": "loss", "trials": 3}
    objectives = [["loss", "minimize"]]
    rows = [
        {"number": n, "state": state, "values": values, "params": {"optim.lr": rate}, "peak_bytes": 300 << 10, "seconds": 2.0, "why": why, "run": None}
        for n, (state, values, rate, why) in enumerate(
            [("done", [0.5], 0.003, "done"), ("done", [0.25], 0.03, "done"), ("infeasible", [], 0.01, "needs <b>900</b> KiB, and there are 400 KiB")]
        )
    ]  # fmt: skip
    studies = serving.studies
    run = serving.store.add(
        {"owner": "anna", "name": "rates, trial-00001", "digest": "0" * 64, "config": {}, "state": "done"}
    )
    rows[1]["run"] = run.number
    summary = {
        "states": {"done": 2, "infeasible": 1},
        "objectives": objectives,
        "best": [{"trial": 1, "values": [0.25], "params": {"optim.lr": 0.03}}],
    }
    columns = {
        "owner": "anna",
        "name": "rates",
        "digest": "0" * 64,
        "config": {"search": search},
        "state": "done",
        "reason": "2 done, 1 infeasible",
    }
    study = studies.store.add({**columns, "summary": summary})
    studies.folder(study).mkdir(parents=True)
    (studies.folder(study) / "trials.json").write_text(json.dumps(rows), encoding="utf-8")
    (studies.folder(study) / "trials.csv").write_text("trial,state\n", encoding="utf-8")
    for told in (
        {"color_scheme": "light"},
        {"color_scheme": "dark", "viewport": {"width": 375, "height": 740}, "has_touch": True},
    ):
        seen = Seen(browser, **told)
        page = seen.page
        page.goto(f"{serving.url}/#token={token(serving)}")
        page.get_by_role("button", name=f"{study.number} rates", exact=True).focus()
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#study-state")).to_have_text("done: 2 done, 1 infeasible")
        assert page.locator("#study-picture svg circle").count() == 2
        assert page.locator("#studies progress").get_attribute("value") == "3"
        assert page.locator("#trials").inner_text().count("<b>900</b>") == 1
        assert page.locator("#study-files li").count() == 1
        assert page.get_by_role("button", name="Cancel").first.is_disabled()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        seen.picture(f"study-{told['color_scheme']}")
        assert seen.violations() == []
        page.get_by_role("button", name=f"1, run {run.number}").click()
        playwright.expect(page.locator("#run-title")).to_contain_text("trial-00001")
        assert seen.problems == []
