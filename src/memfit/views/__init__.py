"""Output for people: tables for the terminal, pictures, and the report as one page. Needs no torch."""

from memfit.views.tables import frontier_table, modules_table, plan_table, records_table
from memfit.views.verdict import Verdict, verdict
from memfit.views.write import write_report

__all__ = [
    "Verdict",
    "frontier_table",
    "modules_table",
    "plan_table",
    "records_table",
    "verdict",
    "write_report",
]
