"""The page: complete, self-contained, safe."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from memfit.units import format_bytes, format_seconds, one_unit
from memfit.values.prediction import ModuleSaving
from memfit.values.report import Report, StepRecord
from memfit.views import colours
from memfit.views.frontier_picture import frontier_picture
from memfit.views.page import page, reproducing_call
from memfit.views.svg import svg_file
from views import reports

ALL = [reports.report, reports.plain_report, reports.bare_report, reports.split_report]
NASTY = "<script>alert('x')</script> & \"quotes\" \x00\ud800"
Make = Callable[[], Report]
VOID = {"meta", "!doctype"}


class Balanced(HTMLParser):
    """Checks that tags close in order, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def spaced(text: str) -> str:
    """With plain spaces, as tests write them."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def parsed(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("make", ALL)
def test_nothing_is_asked_of_the_network_and_nothing_runs(make: Make) -> None:
    text = page(make())

    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text
    assert not re.search(r"url\(|@import|<script|<link|<img|<iframe", text)
    names = {name for _, attributes in parsed(text).tags for name in attributes}
    assert not names & {"src", "href", "srcset", "action", "data", "style"}
    assert not [name for name in names if name.startswith("on")]


@pytest.mark.parametrize("make", ALL)
def test_pictures_are_xml_and_say_in_words_what_they_show(make: Make) -> None:
    drawn = re.findall(r"<svg.*?</svg>", page(make()), re.DOTALL)

    assert len(drawn) >= 2
    for text in drawn:
        root = ET.fromstring(text)  # noqa: S314 - our own text
        assert root.get("role") == "img"
        assert len(root.get("aria-label", "")) > 20


def test_a_file_follows_a_dark_screen_where_it_is_asked_to() -> None:
    drawing = frontier_picture(reports.plan())
    plain, both = svg_file(drawing), svg_file(drawing, also_dark=True)

    assert "<style>" not in plain
    style = ET.fromstring(both).find("{http://www.w3.org/2000/svg}style")  # noqa: S314 - our own text
    assert style is not None
    rules = style.text or ""
    assert rules.startswith("@media (prefers-color-scheme: dark)")
    assert all(f'[fill="{light}"] {{ fill: {dark}; }}' in rules for light, dark in colours.DARK.items())


@pytest.mark.parametrize("make", ALL)
def test_every_head_of_a_table_says_what_it_heads(make: Make) -> None:
    heads = [attributes for tag, attributes in parsed(page(make())).tags if tag == "th"]

    assert all(h.get("scope") in {"col", "row"} for h in heads)


def test_every_number_of_the_report_is_on_the_page() -> None:
    report = reports.report()
    text = spaced(page(report))
    p, rehearsal = report.plan.prediction, report.rehearsal

    assert rehearsal is not None
    sizes = [report.plan.budget_bytes, p.peak_bytes, p.plain_peak_bytes, rehearsal.measured_peak_bytes]
    sizes += [n for n in p.categories_at_peak.values() if n]
    sizes += [n for m in report.plan.by_module for n in (m.kept_bytes, m.dropped_bytes)]
    sizes += [n for f in report.frontier for n in (f.budget_bytes, f.peak_bytes)]
    seconds = [p.step_seconds, p.plain_step_seconds, *(m.recompute_seconds for m in report.plan.by_module)]
    seconds += [s for f in report.frontier for s in (f.step_seconds, f.bound_seconds)]
    with one_unit(report.plan.budget_bytes):
        assert [n for n in sizes if format_bytes(n) not in text] == []
    assert [s for s in seconds if format_seconds(s) not in text] == []
    for expected in (
        "9,437,184 bytes (0.11 %) too low",
        "8,589,934,592 bytes",
        f"{p.slowdown:.2f}",
        f"{100 * report.plan.gap:.1f} %",
    ):
        assert expected in text
    for words in (*report.plan.rejected, *report.plan.notes, report.plan.device, report.plan.signature):
        assert words in text
    for name, fact in report.facts:
        assert f"<dt>{name}</dt><dd>{fact}</dd>" in text


def test_texts_of_others_are_shown_and_not_obeyed() -> None:
    full = reports.report()
    plan = replace(
        full.plan,
        prediction=replace(full.plan.prediction, peak_module=NASTY, peak_operation=NASTY, phases=(NASTY,) * 340),
        by_module=(ModuleSaving(NASTY, 1, 2, 0.1),),
        rejected=(NASTY,),
        notes=(NASTY,),
        device=NASTY,
        signature=NASTY,
        model=NASTY,
        torch_version=NASTY,
        source=NASTY,
    )
    assert full.rehearsal is not None
    text = page(
        replace(
            full,
            title=NASTY,
            plan=plan,
            rehearsal=replace(full.rehearsal, divergences=(NASTY,)),
            records=(StepRecord(1, 2.0, 0.1, divergences=(NASTY,)),),
            facts=((NASTY, NASTY),),
        )
    )

    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;quotes&quot; \ufffd\ufffd" in text
    assert "\x00" not in text
    text.encode()
    parsed(text)


def test_a_measurement_over_budget_is_said_first() -> None:
    text = spaced(page(reports.split_report()))

    assert '<p class="verdict over">Over budget: 8.20 GiB measured, 0.195 GiB more than the 8.00 GiB allowed.' in text
    assert "layers.0: another branch was taken (rehearsal)" in text


def test_without_rehearsal_the_verdict_says_that_it_is_a_prediction() -> None:
    text = page(reports.plain_report())

    assert '<p class="verdict predicted">Predicted to fit, not measured yet' in text
    assert "not rehearsed" in text


@pytest.mark.parametrize("make", ALL)
def test_no_line_ends_between_a_number_and_its_unit(make: Make) -> None:
    text = re.sub(r"<(svg|table|style|pre).*?</\1>", "", page(make()), flags=re.DOTALL)
    # A card's number is kept on one line by its style.
    text = re.sub(r'<dd class="number">.*?</dd>', "", text)

    assert re.findall(r"\d (?:[KMG]iB|%|ms|s|bytes)\b", text) == []
    assert not text.count("GiB") or re.search(r"\d\u00a0GiB", text)


def test_sizes_of_a_page_are_in_the_unit_of_its_budget() -> None:
    report = reports.report()
    text = re.sub(
        r"<title>.*?</title>", "", spaced(page(report))
    )  # what is told to who points at a moment is told of that moment

    assert "0.869 GiB" in text  # parameters, 890 MiB
    assert "890 MiB" not in text
    assert "340 MiB" not in text
    assert "890 MiB" in report.plan.explain()  # elsewhere each size has the unit that suits it


def test_the_slowdown_is_told_as_predicted_and_as_measured_without_metered_steps() -> None:
    report = reports.report()
    text = spaced(page(report))
    seconds = sorted(r.seconds for r in report.records[1:])

    assert report.records[0].peak_bytes is not None
    assert f"{seconds[149] / report.plan.prediction.plain_step_seconds:.2f}" in text
    assert "Slowdown measured" in text
    assert "in the median of 299 steps" in text
    elsewhere = replace(report.plan, prediction=replace(report.plan.prediction, seconds_are="estimated"))
    assert "Slowdown measured" not in page(replace(report, plan=elsewhere))


def test_each_picture_is_there_for_a_desk_and_for_a_phone() -> None:
    text = page(reports.report())

    assert text.count('<div class="wide">') == text.count('<div class="narrow">') == 3
    assert "min-width: 680px" not in text


def test_every_colour_of_a_picture_has_a_dark_one_or_belongs_to_a_band() -> None:
    text = page(reports.report())
    bands = {colour for _, colour in colours.BANDS.values()}
    used = set(re.findall(r'(?:fill|stroke)="(#[0-9A-Fa-f]+)"', "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))))

    assert len(used) > 15
    assert used - bands - set(colours.DARK) == set()
    for light in used - bands:
        assert f'svg [fill="{light}"] {{ fill: {colours.DARK[light]}; }}' in text


@pytest.mark.parametrize("name", ["INK", "QUIET", "BUDGET", "PREDICTED", "FRONTIER", "BOUND"])
def test_letters_can_be_read_on_either_ground(name: str) -> None:
    light = getattr(colours, name)

    assert contrast(light, colours.SURFACE) >= 4.5
    assert contrast(colours.DARK[light], colours.DARK[colours.SURFACE]) >= 4.5


def contrast(one: str, other: str) -> float:
    """Source: Web Content Accessibility Guidelines 2.2, contrast ratio."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_sections_without_content_are_left_out() -> None:
    text = page(reports.bare_report())

    for heading in ("Training", "Notes", "Rejected", "Facts", "Divergences", "What backward needs, by module"):
        assert f"<h2>{heading}" not in text


def test_one_step_makes_a_row_and_no_curve() -> None:
    text = page(replace(reports.report(), records=reports.records(1)))

    assert ">Loss<" not in text
    assert "<h2>Training</h2>" in text
    assert "<details>" not in text


def test_steps_are_counted_by_steps_and_not_by_the_lines_of_a_thinned_log() -> None:
    every = reports.records(171)
    thinned = tuple(r for r in every if r.step % 10 == 0 or r.step in {1, 171})
    whole, some = (page(replace(reports.report(), records=records)) for records in (every, thinned))
    assert len(thinned) < 171
    for text in (whole, some):
        assert '<dt>Steps run</dt><dd class="number">171</dd>' in text
        assert "Loss from step 1 to step 171" in text
    assert f"each, in the median of the {len(thinned)} in the log" in some
    assert "in the log" not in whole
    assert f"{171 - len(thinned)} steps between are left out." in some


def test_divergences_are_listed_once_with_their_steps() -> None:
    assert page(reports.report()).count("layers.3: another branch was taken (step 18, step 41)") == 1


def test_the_call_to_reproduce_names_what_the_plan_was_made_with() -> None:
    split = reports.split_report().plan
    text = reproducing_call(split)
    call = ast.parse(text).body[0]

    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    named = {k.arg: ast.unparse(k.value) for k in call.value.keywords}
    assert named["fixed"] == "{'micro_batches': 4}"
    assert named["budget"] == str(split.budget_bytes)
    assert named["clip_norm"] == "1.0"
    assert "device" not in named
    assert "fixed={&quot;micro_batches&quot;: 4}" in page(reports.split_report())
    assert 'device="cpu"' in reproducing_call(reports.bare_report().plan)
    assert "clip_norm" not in reproducing_call(reports.bare_report().plan)


def test_what_is_short_comes_before_what_is_long() -> None:
    text = page(reports.report())
    headings = re.findall(r"<h2>(.*?)</h2>", text)

    assert headings.index("Facts") < headings.index("Notes") < headings.index("Training")
    assert headings.index("Training") < headings.index("What backward needs, by module")


def test_a_long_table_is_folded_and_a_short_one_is_not() -> None:
    full = reports.report()
    many = tuple(ModuleSaving(f"m{i}", 1024, 2048, 0.0) for i in range(30))
    long = page(replace(full, plan=replace(full.plan, by_module=many)))

    assert "<summary>All 30 rows</summary>" in long
    assert "<summary>All" not in page(full)


@pytest.mark.parametrize("make", ALL)
def test_one_is_not_many(make: Make) -> None:
    base = make()
    few = replace(base, records=base.records[:1], frontier=base.frontier[:1])
    words = re.sub(r"<[^>]*>", " ", page(few))

    assert re.findall(r"(?<![\d.,])1 (?:micro-batches|steps|budgets|plans|modules|more modules)", words) == []
