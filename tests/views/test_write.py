"""A report becomes a file: a page, or a picture."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from memfit.errors import InputError
from memfit.values.report import Report
from memfit.views import write_report
from views import reports

Make = Callable[[], Report]
ALL = [reports.report, reports.plain_report, reports.bare_report, reports.split_report]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("ending", ["html", "svg", "png"])
def test_every_report_is_written_in_every_form(make: Make, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"report.{ending}"

    write_report(make(), path)

    content = path.read_bytes()
    start = {"html": b"<!DOCTYPE html>", "svg": b"<?xml", "png": b"\x89PNG\r\n\x1a\n"}[ending]
    assert content.startswith(start)
    assert b"nan" not in content.lower() or ending == "png"


def test_a_written_report_that_was_saved_and_read_back_is_the_same_page(tmp_path: Path) -> None:
    report = reports.report()
    write_report(report, tmp_path / "a.html")
    write_report(Report.from_json(report.to_json()), tmp_path / "b.html")

    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_svg_file_is_xml_with_a_label_and_both_panels(tmp_path: Path) -> None:
    write_report(reports.report(), tmp_path / "report.svg")

    root = ET.parse(tmp_path / "report.svg").getroot()  # noqa: S314 - our own file
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("role") == "img"
    assert "budget 8.00 GiB" in root.get("aria-label", "")
    assert {"Bytes over the step", "Bytes against time", "budget 8.00 GiB", "this plan", "plain"} <= set(texts)


def test_the_png_is_twice_as_sharp_as_the_drawing(tmp_path: Path) -> None:
    write_report(reports.report(), tmp_path / "report.svg")
    write_report(reports.report(), tmp_path / "report.png")

    root = ET.parse(tmp_path / "report.svg").getroot()  # noqa: S314 - our own file
    width, height = struct.unpack(">II", (tmp_path / "report.png").read_bytes()[16:24])
    assert (width, height) == (2 * int(float(root.get("width", 0))), 2 * int(float(root.get("height", 0))))


def test_a_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(InputError, match=r"pip install 'memfit\[pictures\]'"):
        write_report(reports.report(), tmp_path / "report.png")
    assert not (tmp_path / "report.png").exists()


@pytest.mark.parametrize("name", ["report.pdf", "report"])
def test_other_endings_are_refused_with_the_ones_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.html .*\.svg or \.png"):
        write_report(reports.report(), tmp_path / name)


def test_missing_folders_are_made_and_an_ending_may_be_in_capitals(tmp_path: Path) -> None:
    write_report(reports.plain_report(), tmp_path / "out" / "today" / "Report.HTML")

    assert (tmp_path / "out" / "today" / "Report.HTML").is_file()


def test_a_place_that_cannot_be_written_to_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(InputError, match="cannot write the report"):
        write_report(reports.plain_report(), tmp_path / "file" / "report.html")
