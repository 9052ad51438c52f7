"""Tables for the terminal."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from memfit.techniques.choices import Choices
from memfit.units import format_bytes, format_seconds
from memfit.values.prediction import ModuleSaving, Saving
from memfit.views import frontier_table, modules_table, plan_table, records_table
from memfit.views.tables import frontier_cells, modules_cells, plan_cells, records_cells, savings_cells
from views import reports


def shown(table: Table) -> str:
    console = Console(width=140, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_plan_is_told_in_a_few_lines() -> None:
    text = shown(plan_table(reports.plan()))

    for expected in ("8.00 GiB", "7.68 GiB (96.0 %)", "20.7 GiB", "743 ms", "601 ms", "0.8 %"):
        assert expected in text
    assert "nothing" in shown(plan_table(reports.plain_report().plan))
    assert "1 operation " in text
    split = shown(plan_table(reports.split_report().plan))
    assert "4 (losses by tokens:labels)" in split
    assert "1 operation per micro-batch" in split


def test_modules_come_with_the_most_dropped_first() -> None:
    cells = modules_cells(reports.plan())

    assert [row[0] for row in cells.rows][:2] == ["transformer.layers.0", "transformer.layers.1"]
    assert cells.rows[-1][0] == "(model)"


def test_many_modules_are_summed_up_at_the_end() -> None:
    plan = replace(reports.plan(), by_module=tuple(ModuleSaving(f"m{i}", 1024, 2048, 0.0) for i in range(43)))

    assert modules_cells(plan).remark == "3 more modules: 3.00 KiB kept, 6.00 KiB dropped."


def test_names_with_brackets_are_shown_as_they_are() -> None:
    plan = replace(reports.plan(), by_module=(ModuleSaving("blocks[red].0", 1, 2, 0.0),))

    assert "blocks[red].0" in shown(modules_table(plan))


def test_the_frontier_marks_the_chosen_budget() -> None:
    report = reports.report()
    cells = frontier_cells(report.plan, report.frontier)

    assert cells.marked is not None
    assert cells.rows[cells.marked][0] == "8.00 GiB"
    assert "7.68 GiB" in shown(frontier_table(report.plan, report.frontier))
    assert frontier_cells(report.plan, report.frontier[:1]).marked is None


def test_of_many_steps_the_first_and_the_last_are_listed() -> None:
    cells = records_cells(reports.records(300))

    assert [cells.rows[0][0], cells.rows[-1][0]] == ["1", "300"]
    assert len(cells.rows) == 40
    assert "260 steps between are left out" in cells.remark
    assert "another branch" in shown(records_table(reports.records(30)))


def test_empty_tables_are_tables() -> None:
    assert shown(frontier_table(reports.plan(), ()))
    assert shown(records_table(()))
    assert shown(modules_table(replace(reports.plan(), by_module=())))


def test_what_goes_below_has_a_column_only_where_something_does() -> None:
    base = reports.plan()
    assert "offloaded" not in modules_cells(base).columns
    offloading = replace(base, by_module=(ModuleSaving("m", 0, 0, 0.0, 4096),))
    cells = modules_cells(offloading)
    assert cells.columns[3] == "offloaded"
    assert cells.rows[0][3] == format_bytes(4096)


def test_techniques_are_shown_with_what_they_save_and_cost() -> None:
    base = reports.plan()
    assert savings_cells(base).rows == ()
    saving = Saving("bf16", 2048, -1024, "half of what is saved for backward", -0.5)
    cells = savings_cells(replace(base, savings=(saving,)))
    assert cells.rows == (
        (
            "bf16",
            "-" + format_bytes(1024),
            format_bytes(2048),
            "-" + format_seconds(0.5),
            "half of what is saved for backward",
        ),
    )
    copied = replace(base, choices=Choices(state_place="disk"))
    copied = replace(copied, prediction=replace(copied.prediction, copy_seconds=2.0, exposed_seconds=0.5))
    rows = dict(plan_cells(copied).rows)  # type: ignore[arg-type]
    assert rows["techniques"] == "optimizer state on the disk"
    assert rows["offload copies"] == f"{format_seconds(2.0)}, 75 % overlapped"
