"""Plans for many configurations, one after the other, in a process of its own: `python -m memfit.train.plan_server`.

Whoever weighs many runs (`memfit tune`) asks here, and never imports torch itself. Model, data and traces are kept between questions: configurations that
differ in learning rate or seed share everything; those that differ in the budget alone share all traces; and those that differ in what is allowed, frozen
or fixed share the traces of the techniques that both have.

A question is a line of JSON on standard input: {"config": {...}, "plan": FILE}. The answer is a line on standard output: {"fits": true, "peak_bytes": ...,
"rank_bytes": [...]} after the plan was written to FILE; {"fits": false, "minimum_bytes": ...}; or {"error": "ConfigError", "message": ...}.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from memfit.capture.trace_source import TraceSource
from memfit.errors import InfeasibleError, in_words
from memfit.lower_tiers import requested
from memfit.offers import planning_for
from memfit.planning import Planning
from memfit.train import ranks
from memfit.train.assemble import Assembly
from memfit.train.config import Config, from_json
from memfit.train.plans import assembled, check_budget, lower_tier, make_plan, plan_arguments
from memfit.train.progress import SilentDisplay
from memfit.values.plan import Plan
from memfit.values.trace import Category

_MOST_SOURCES: Final = 8  # models with their data and traces, kept at a time


@dataclass
class _Known:
    """One model with its data: what every question about it shares."""

    assembly: Assembly
    source: TraceSource
    plannings: dict[str, Planning] = field(default_factory=dict)
    of_ranks: dict[str, Plan] = field(default_factory=dict)


class PlanServer:
    """Answers questions, and remembers what the next may need."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self.captures = 0  # models captured so far; tests look at it

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, as plain data; what was foreseen to go wrong is one, too."""
        try:
            config = from_json(question["config"], Path(question["config"].get("folder") or "."))
            plan = self.plan(config)
        except InfeasibleError as error:
            return {"fits": False, "minimum_bytes": error.minimum_bytes, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - the user's model; the study goes on without this trial
            return {"error": type(error).__name__, "message": in_words(error)}
        if question.get("plan"):
            plan.save(question["plan"])
        prediction = plan.prediction
        return {
            "fits": True,
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": prediction.peak_bytes,
            "rank_bytes": [rank.peak_bytes for rank in prediction.by_rank],
            "tiers": {use.tier: use.all_bytes for use in prediction.tiers},
            "snapshot_bytes": self._snapshot_bytes(config, plan),
            "step_seconds": prediction.step_seconds,
            "device": plan.device_kind,
        }

    def plan(self, config: Config) -> Plan:
        """The plan for one configuration.

        Raises:
            MemfitError: as for `memfit.plan`.
        """
        check_budget(config)
        known = self._of(config)
        if config.fit.devices is not None:
            return self._plan_of_ranks(config, known)
        request = requested(
            known.assembly.model,
            budget=config.fit.budget,
            **plan_arguments(config, known.assembly),
            folder=lower_tier(known.assembly).get("lower_tier"),
        )
        key = json.dumps({**request.to_json(), "budget": None}, sort_keys=True)
        if key not in known.plannings:
            known.plannings[key] = planning_for(known.source, request)
        assert request.budget is not None
        return known.plannings[key].plan(request.budget.bytes)

    def _snapshot_bytes(self, config: Config, plan: Plan) -> int:
        """Bytes that a snapshot takes at least: what the device holds of parameters and optimizer state. 0 for several devices."""
        # A bundle's own keys do not say how many samples the largest micro-batch has.
        ran = plan.choices.but(weights="whole")
        plannings = self._of(config).plannings.values()
        traces = [trace for each in plannings for trace in each.bundle.traces.values() if trace.choices == ran]
        return traces[0].bytes_of(Category.PARAMETER, Category.OPTIMIZER_STATE) if traces else 0

    def _plan_of_ranks(self, config: Config, known: _Known) -> Plan:
        """A plan for several devices; runs that differ in learning rate or seed share it."""
        ranks.check(config, ranks.number_of(config))
        key = json.dumps(config.to_json()["fit"], sort_keys=True)
        if key not in known.of_ranks:
            known.of_ranks[key] = make_plan(config, known.assembly, None, SilentDisplay())
        return known.of_ranks[key]

    def _of(self, config: Config) -> _Known:
        data = config.to_json()
        fit = {name: data["fit"].get(name) for name in ("global_batch", "clip_norm", "device")}
        optim = {name: value for name, value in data.get("optim", {}).items() if name != "lr"}
        parts = (data["model"], data.get("lora"), data["data"], fit, optim, data.get("deepspeed"), data.get("folder"))
        key = json.dumps(parts, sort_keys=True)
        if key not in self._known:
            assembly = assembled(config, SilentDisplay())
            source = TraceSource(
                assembly.model,
                assembly.batches.sample(),
                assembly.loss_fn,
                assembly.optimizer,
                config.fit.clip_norm,
            )
            self._known[key] = _Known(assembly, source)
            self.captures += 1
            while len(self._known) > _MOST_SOURCES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answer until there are no more questions."""
    server = PlanServer()
    for line in questions:
        answers.write(json.dumps(server.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> int:
    """Answers go to standard output, and what a user's model prints to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
