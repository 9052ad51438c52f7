"""Sharding: several ranks train one model, each with its own part of the batch, and share out what need not be on all of them.

"data" is data parallelism (Li et al. 2020, PyTorch Distributed, arXiv:2006.15704): everything is on every rank. The rest is ZeRO (Rajbhandari et al. 2020,
arXiv:1910.02054): "zero1" shares out the optimizer's state, "zero2" also gradients and, between steps, parameters, "zero3" parameters inside the step, too.
"gpipe" (Huang et al. 2019, arXiv:1811.06965) and "1f1b" (Narayanan et al. 2021, arXiv:2006.09503) are pipelines: each rank has some of the layers, all of its
pipeline's batch passes through them in micro-batches, and pipelines beside each other are data parallel; with "+zero1" they share out the optimizer's state. In
an "interleaved" one (Narayanan et al. 2021, arXiv:2104.04473) each rank has two stages.
The engines are torch's own; `memfit.sharding` and `memfit.parallel` put them around the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from memfit.errors import InputError
from memfit.techniques.technique import Offer, StepFacts, Subject, Technique, listed

WAYS: Final = ("data", "zero1", "zero2", "zero3")
PIPELINES: Final = ("gpipe", "1f1b", "interleaved")
ANY_PIPELINE: Final = "pipeline"  # where a user leaves the schedule open
SHARDED_STATE: Final = "zero1"  # of pipelines beside each other
ONE_UNIT: Final = "zero2+whole"  # ZeRO 2, parameters of the whole model gathered and their gradients reduced at once, not block by block

_WORDS: Final = {
    "data": "data parallel",
    "zero1": "optimizer state sharded (ZeRO 1)",
    "zero2": "optimizer state and gradients sharded (ZeRO 2)",
    "zero3": "optimizer state, gradients and parameters sharded (ZeRO 3)",
}
_SCHEDULES: Final = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
INTERLEAVED: Final = 2  # stages on each rank: more of them send more often, and leave less of the waiting to save


def setting_of(way: str, ranks: int, rank: int = 0) -> str:
    """As `Choices` have it: "zero3/4" for ZeRO 3 on four ranks, "zero3/4@1" where it is the step of rank 1."""
    return f"{way}/{ranks}" + (f"@{rank}" if rank else "")


def at_rank(setting: str, rank: int) -> str:
    """The same way, as the step of another rank."""
    return setting_of(setting.partition("/")[0], way_of(setting)[1], rank)


def is_one_unit(setting: str) -> bool:
    """Whether it is ZeRO 2 with the whole model gathered and reduced at once."""
    return setting.partition("/")[0] == ONE_UNIT


@dataclass(frozen=True, slots=True)
class Pipelines:
    """Pipelines beside each other: "1f1b/4" is one of four stages, "1f1b/2x3" three of two stages each, "1f1b/2x3+zero1" the same with sharded state.

    "interleaved/4" is one of eight stages on four ranks.

    Attributes:
        schedule: in which order micro-batches pass, one of `PIPELINES`.
        ranks: of one pipeline, each with a stage, or `INTERLEAVED` of them.
        replicas: how many pipelines there are; they are data parallel.
        shards_state: the ranks that have the same stage share out its optimizer state.
    """

    schedule: str
    ranks: int
    replicas: int = 1
    shards_state: bool = False

    def __str__(self) -> str:
        """As `Choices` have it."""
        shape = f"{self.ranks}x{self.replicas}" if self.replicas > 1 else str(self.ranks)
        return f"{self.schedule}/{shape}" + (f"+{SHARDED_STATE}" if self.shards_state else "")

    @classmethod
    def of(cls, setting: str) -> Pipelines:
        """From what `str` makes of it.

        Raises:
            InputError: it is not of this form.
        """
        shape, plus, sharded = setting.partition("+")
        schedule, _, numbers = shape.partition("/")
        ranks, _, replicas = numbers.partition("x")
        if schedule not in PIPELINES or not ranks.isdecimal() or not (replicas or "1").isdecimal():
            raise _of_no_form(setting)
        made = cls(schedule, int(ranks), int(replicas or 1), shards_state=bool(plus))
        if made.ranks < 2 or made.replicas < 1 or (plus and (sharded != SHARDED_STATE or made.replicas < 2)):
            raise _of_no_form(setting)
        return made

    @property
    def per_rank(self) -> int:
        """Stages on each rank."""
        return INTERLEAVED if self.schedule == "interleaved" else 1

    def in_words(self) -> str:
        """As in: 2 pipelines of 2 stages (1F1B) on 4 ranks."""
        what = f"{self.replicas} pipelines" if self.replicas > 1 else "a pipeline"
        state = ", each stage's optimizer state sharded (ZeRO 1)" if self.shards_state else ""
        return f"{what} of {self.ranks * self.per_rank} stages ({_SCHEDULES[self.schedule]}) on {self.ranks * self.replicas} ranks{state}"


def is_pipeline(setting: str) -> bool:
    """Whether ranks have stages."""
    return setting.partition("/")[0].partition("+")[0] in PIPELINES


def way_of(setting: str) -> tuple[str, int, int]:
    """Way, of `WAYS` or `PIPELINES`, number of ranks, and the rank whose step it is.

    Raises:
        InputError: it is not of this form.
    """
    way, _, rest = setting.partition("/")
    if way in PIPELINES:
        pipelines = Pipelines.of(setting)
        return way, pipelines.ranks * pipelines.replicas, 0
    if way == ONE_UNIT:
        way = "zero2"
    ranks, _, rank = rest.partition("@")
    if way not in WAYS or not ranks.isdecimal() or int(ranks) < 1 or not (rank or "0").isdecimal():
        raise _of_no_form(setting)
    if int(rank or 0) >= int(ranks):
        raise InputError(f"sharding={setting!r}: of {ranks} ranks the last one is {int(ranks) - 1}")
    return way, int(ranks), int(rank or 0)


def _of_no_form(setting: str) -> InputError:
    return InputError(
        f"sharding={setting!r}: one of {listed((*WAYS, *PIPELINES))} and the number of ranks is needed, as in {setting_of('zero3', 4)!r}; of pipelines the "
        f"ranks of one and how many there are, as in {str(Pipelines('1f1b', 2, 2))!r}, and +{SHARDED_STATE} where several share out their optimizer's state"
    )


class Sharding(Technique):
    """Setting: way and number of ranks, "zero3/4", or schedule, ranks of a pipeline and pipelines, "1f1b/2x2" or "1f1b/2x2+zero1"; "" for one device."""

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
            return Pipelines.of(setting).in_words()
        unit = ", the model as one unit," if is_one_unit(setting) else ""
        return f"{_WORDS[way]}{unit} on {ranks} ranks"

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
