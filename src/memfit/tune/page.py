"""The report of a search as one page: the objective beside the bytes of each trial, in the style of the other reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memfit.errors import InputError
from memfit.tune.results import PAGE_NAME, Results, TrialRow
from memfit.units import format_bytes, format_seconds
from memfit.views.document import cards, definitions, document, figure, section, table
from memfit.views.drawing import counted
from memfit.views.tables import Cells
from memfit.views.trials_picture import TrialPoint, trials_picture


def write_page(found: Results, capacity: Mapping[str, int]) -> Path:
    """Write the page into the folder of the search.

    Args:
        found: what is shown.
        capacity: bytes that all trials shared, by device.

    Raises:
        InputError: it cannot be written.
    """
    file = found.search.out / PAGE_NAME
    try:
        file.write_text(page(found, capacity), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the report {file}: {error.strerror or error}") from error
    return file


def page(found: Results, capacity: Mapping[str, int]) -> str:
    """The whole page."""
    config = found.search.config
    names = [each.name for each in config.objectives]
    title = f"Search {found.search.name}"
    sentence, outcome = _verdict(found, names)
    return document(
        title,
        sentence,
        outcome,
        [
            cards(_cards(found, names, capacity)),
            figure(
                lambda layout: trials_picture(
                    [_point(row) for row in found.rows if row.values and row.peak_bytes],
                    names[0],
                    [row.number for row in found.best],
                    layout,
                )
            ),
            section("All trials", table(_cells(found, names))),
            section(
                "How to go on",
                definitions(
                    [
                        ("store", found.store),
                        ("study", found.search.name),
                        ("folder", str(found.search.out)),
                        (
                            "objective",
                            ", ".join(f"{each.direction} {each.name} ({each.take})" for each in config.objectives),
                        ),
                        ("sampler, pruner", f"{_name(config.sampler)}, {_name(config.pruner)}, seed {config.seed}"),
                        ("dashboard", f"optuna-dashboard {found.store}"),
                    ]
                ),
            ),
        ],
    )


def _verdict(found: Results, names: list[str]) -> tuple[str, str]:
    done = counted(found.count("done"), "trial")
    if not found.best or not found.best[0].values:
        return (
            f"No trial was done: {counted(found.count('infeasible'), 'trial')} did not fit, {found.count('failed')} failed.",
            "over",
        )
    best = found.best[0]
    values = ", ".join(f"{name} {value:.6g}" for name, value in zip(names, best.values or (), strict=True))
    front = "" if len(found.best) == 1 else f" and {len(found.best) - 1} more that no other surpasses in all objectives"
    return f"Of {done} that were done, trial {best.number} is best: {values}{front}.", "fits"


def _cards(found: Results, names: list[str], capacity: Mapping[str, int]) -> list[tuple[str, str, str]]:
    made = [
        (
            "Trials",
            f"{len(found.rows)}",
            f"{found.count('done')} done, {found.count('pruned')} pruned, {found.count('failed')} failed",
        ),
        ("Infeasible", f"{found.count('infeasible')}", "recorded with their bytes, never started"),
        ("Out of memory", f"{found.count('out of memory')}", "constraints for the sampler"),
    ]
    made += [(f"Bytes on {name}", format_bytes(size), "for all trials together") for name, size in capacity.items()]
    if found.best and found.best[0].values:
        params = ", ".join(f"{name} {_value(each)}" for name, each in found.best[0].params.items())
        made.append((f"Best {names[0]}", f"{found.best[0].values[0]:.6g}", params))
    return made


def _point(row: TrialRow) -> TrialPoint:
    assert row.values
    assert row.peak_bytes
    params = ", ".join(f"{name} {_value(each)}" for name, each in row.params.items())
    return TrialPoint(row.number, row.peak_bytes, row.values[0], params)


def _cells(found: Results, names: list[str]) -> Cells:
    params = list(found.search.space)
    best = {row.number for row in found.best}
    columns = ("trial", "state", *names, "peak", "time", *params, "how it ended")
    rows: list[tuple[str, ...]] = []
    marked = None
    for row in found.rows:
        if row.number in best and marked is None:
            marked = len(rows)
        values = [f"{value:.6g}" for value in row.values] if row.values else ["-"] * len(names)
        size = "-" if row.peak_bytes is None else format_bytes(row.peak_bytes)
        seconds = "-" if row.seconds is None else format_seconds(row.seconds)
        rows.append(
            (
                str(row.number),
                row.state,
                *values,
                size,
                seconds,
                *(_value(row.params.get(name, "-")) for name in params),
                row.why,
            )
        )
    return Cells("All trials", columns, tuple(rows), marked=marked, words=frozenset({1, len(columns) - 1}))


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _name(value: object) -> str:
    return value if isinstance(value, str) else str(getattr(value, "name", value))
