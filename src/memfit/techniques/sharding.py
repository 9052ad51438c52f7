"""Sharding: several ranks train one model, each with its own part of the batch, and share out what need not be on all of them.

"data" is data parallelism (Li et al. 2020, PyTorch Distributed, arXiv:2006.15704): everything is on every rank. The rest is ZeRO (Rajbhandari et al. 2020,
arXiv:1910.02054): "zero1" shares out the optimizer's state, "zero2" also gradients and, between steps, parameters, "zero3" parameters inside the step, too.
"gpipe" (Huang et al. 2019, arXiv:1811.06965) and "1f1b" (Narayanan et al. 2021, arXiv:2006.09503) are pipelines: each rank has some of the layers, all of its
pipeline's batch passes through them in micro-batches, and pipelines beside each other are data parallel. The engines are torch's own; `memfit.sharding` and
`memfit.parallel` put them around the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from memfit.errors import InputError
from memfit.techniques.technique import Offer, StepFacts, Subject, Technique, listed

WAYS: Final = ("data", "zero1", "zero2", "zero3")
PIPELINES: Final = ("gpipe", "1f1b")
ANY_PIPELINE: Final = "pipeline"  # where a user leaves the schedule open

_WORDS: Final = {
    "data": "data parallel",
    "zero1": "optimizer state sharded (ZeRO 1)",
    "zero2": "optimizer state and gradients sharded (ZeRO 2)",
    "zero3": "optimizer state, gradients and parameters sharded (ZeRO 3)",
}
_SCHEDULES: Final = {"gpipe": "GPipe", "1f1b": "1F1B"}


def setting_of(way: str, ranks: int, rank: int = 0) -> str:
    """As `Choices` have it: "zero3/4" for ZeRO 3 on four ranks, "zero3/4@1" where it is the step of rank 1."""
    return f"{way}/{ranks}" + (f"@{rank}" if rank else "")


def pipeline_setting(schedule: str, stages: int, replicas: int = 1) -> str:
    """As `Choices` have it: "1f1b/4" for one pipeline of four stages, "1f1b/2x2" for two pipelines of two stages each."""
    return f"{schedule}/{stages}" + (f"x{replicas}" if replicas > 1 else "")


def is_pipeline(setting: str) -> bool:
    """Whether ranks have stages."""
    return setting.partition("/")[0] in PIPELINES


def stages_of(setting: str) -> tuple[int, int]:
    """Ranks of a pipeline, and how many pipelines there are beside each other.

    Raises:
        InputError: it is not of this form.
    """
    way, _, rest = setting.partition("/")
    stages, _, replicas = rest.partition("x")
    if way not in PIPELINES or not stages.isdecimal() or not (replicas or "1").isdecimal():
        raise _of_no_form(setting)
    if int(stages) < 2 or int(replicas or 1) < 1:
        raise _of_no_form(setting)
    return int(stages), int(replicas or 1)


def way_of(setting: str) -> tuple[str, int, int]:
    """Way, number of ranks, and the rank whose step it is.

    Raises:
        InputError: it is not of this form.
    """
    way, _, rest = setting.partition("/")
    if way in PIPELINES:
        stages, replicas = stages_of(setting)
        return way, stages * replicas, 0
    ranks, _, rank = rest.partition("@")
    if way not in WAYS or not ranks.isdecimal() or int(ranks) < 1 or not (rank or "0").isdecimal():
        raise _of_no_form(setting)
    if int(rank or 0) >= int(ranks):
        raise InputError(f"sharding={setting!r}: of {ranks} ranks the last one is {int(ranks) - 1}")
    return way, int(ranks), int(rank or 0)


def _of_no_form(setting: str) -> InputError:
    return InputError(
        f"sharding={setting!r}: one of {listed((*WAYS, *PIPELINES))} and the number of ranks is needed, as in {setting_of('zero3', 4)!r}; of pipelines the "
        f"stages of one and how many there are, as in {pipeline_setting('1f1b', 2, 2)!r}"
    )


class Sharding(Technique):
    """Setting: way and number of ranks, "zero3/4", or schedule, stages and pipelines, "1f1b/2x2"; "" for one device."""

    name = "sharding"
    baseline = ""
    lasting = True
    sizes_state = True
    reorders = True
    page = "sharding.md"
    unsaid: ClassVar[Mapping[str, str]] = {
        "deepspeed": "that the step is shared out among ranks: memfit trains it with torch's own engines"
    }

    def words(self, setting: str) -> str:
        """As in: data parallel on 4 ranks."""
        way, ranks, _ = way_of(setting)
        if way in PIPELINES:
            stages, replicas = stages_of(setting)
            return f"{f'{replicas} pipelines' if replicas > 1 else 'a pipeline'} of {stages} stages ({_SCHEDULES[way]}) on {ranks} ranks"
        return f"{_WORDS[way]} on {ranks} ranks"

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """All but one rank's share of what is sharded (Rajbhandari et al. 2020, figure 1)."""
        del used
        way, ranks, _ = way_of(setting)
        shared = {
            "data": 0,
            "zero1": without.state_bytes,
            "zero2": without.state_bytes + without.gradient_bytes,
            "zero3": without.state_bytes + without.gradient_bytes + without.parameter_bytes,
        }[way]
        return shared - shared // ranks, f"all but one of {ranks} parts of what is sharded"

    def offer(self, subject: Subject) -> Offer:
        """Never weighed beside the step of one device: how many ranks there are is the user's to say."""
        pinned = str(subject.fixed.get(self.name, ""))
        if is_pipeline(pinned) or pinned == ANY_PIPELINE:
            ranks = way_of(pinned)[1] if "/" in pinned else 4
            raise InputError(
                f"fixed sharding={pinned!r} is a pipeline, which is planned for devices that are named: give devices, as in devices={ranks}"
            )
        return Offer(on_request=(pinned,) if pinned else ())

    def conflict(self, setting: Any, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """What moves parameters itself, or updates them before all ranks' gradients are there."""
        del setting, clips
        if used.get("streamed"):
            return "layers that are streamed are not sharded: leave out one of the two"
        if used.get("update") == "in_backward":
            return "an update inside backward comes before the gradients of all ranks are there: update after backward"
        return None

    def check(self, setting: Any) -> None:
        """Check the form; the baseline is one device."""
        super().check(setting)
        if setting != self.baseline:
            way_of(setting)


SHARDING = Sharding()
