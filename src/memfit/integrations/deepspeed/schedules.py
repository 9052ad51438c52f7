"""DeepSpeed's schedules of the learning rate: what each sets before a step, computed in the order of operations that DeepSpeed has.

A rate follows from the number of the step and the rates the optimizer was made with, so a schedule can be taken up anywhere. DeepSpeed counts from
-1: step 0 is taken with the rates a schedule begins with, step n with those of iteration n - 1. So the warm-ups take two steps at their smallest
rate, and OneCycle begins with its smallest momentum and goes on from the largest.

Torch-free: all that is asked of an optimizer are its `param_groups` and `defaults`.

Source: deepspeed/runtime/lr_schedules.py (https://github.com/deepspeedai/DeepSpeed), in the version `keys.VERSION`; LRRangeTest and OneCycle after
Smith 2018, "A disciplined approach to neural network hyper-parameters: Part 1" (arXiv 1803.09820).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from memfit.errors import ConfigError
from memfit.integrations.deepspeed.sections import Scheduler
from memfit.integrations.deepspeed.values import shown

Rates = tuple[float, ...]
START: Final = -1  # the iteration before the first step


@dataclass(frozen=True, slots=True)
class Course:
    """How one schedule goes.

    Attributes:
        rates: of each parameter group, by iteration.
        betas: of each parameter group, by iteration; None where the schedule leaves them alone.
    """

    rates: Callable[[int], Rates]
    betas: Callable[[int], tuple[tuple[float, float], ...]] | None = None


def course(scheduler: Scheduler, full: Sequence[float], *, has_betas: bool = False) -> Course:
    """The course of one of DeepSpeed's own schedules.

    Args:
        scheduler: read already; no value is "auto" any more.
        full: rates that the optimizer was made with, one for each parameter group.
        has_betas: whether the optimizer has betas, which OneCycle moves too.

    Raises:
        ConfigError: a value that DeepSpeed refuses when it makes the schedule, or that is still "auto".
    """
    given = {name: value for name, value in scheduler.params.items() if name != "last_batch_iteration"}
    settled(given)
    made: Course = _COURSES[scheduler.type](tuple(full), has_betas, given)
    return made


def settled(params: Mapping[str, Any], section: str = "scheduler") -> None:
    """See that no value is "auto".

    Raises:
        ConfigError: one is.
    """
    for name, value in params.items():
        if value == "auto":
            path = f"{section}.params.{name}"
            raise ConfigError(f'{path} is "auto", which a plan does not decide: give a value, auto={{"{path}": ...}}')


class DeepSpeedSchedule:
    """One of DeepSpeed's schedules on an optimizer: the part of torch's schedulers that loops use.

    Args:
        scheduler: what the configuration says.
        optimizer: whose rates it sets, from here on.
    """

    def __init__(self, scheduler: Scheduler, optimizer: Any) -> None:
        full = [float(group["lr"]) for group in optimizer.param_groups]
        self.course = course(scheduler, full, has_betas="betas" in optimizer.defaults)
        self.optimizer = optimizer
        self.last_batch_iteration = int(scheduler.params.get("last_batch_iteration", START))
        if self.last_batch_iteration == START:  # else whoever goes on has the rates already
            self.set()

    def set(self) -> None:
        """Write the rates of the next step into the optimizer."""
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate
        if self.course.betas is not None:
            pairs = self.course.betas(self.last_batch_iteration)
            for group, pair in zip(self.optimizer.param_groups, pairs, strict=True):
                group["betas"] = pair

    def step(self) -> None:
        """A step was taken."""
        self.last_batch_iteration += 1
        self.set()

    def get_last_lr(self) -> list[float]:
        """Rates of the next step, one for each parameter group."""
        return list(self.course.rates(self.last_batch_iteration))

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the rates are in the optimizer's own state."""
        self.last_batch_iteration = state["last_batch_iteration"]


def _each(value: Any, groups: int, name: str) -> Rates:
    """One value for each parameter group."""
    if isinstance(value, (list, tuple)):
        if len(value) != groups:
            raise ConfigError(f"scheduler.params.{name}: {groups} values are needed, one for each parameter group")
        return tuple(_number(each, name) for each in value)
    return (_number(value, name),) * groups


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"scheduler.params.{name}: expected a number, found {shown(value)}")
    return value


# ------------------------------------------------------------------------------------------------------------- warm-ups


def _rising(warmup_num_steps: int, warmup_type: str) -> tuple[int, Callable[[int], float]]:
    """(Steps of the warm-up, share of the way done in it by iteration)."""
    steps = max(2, warmup_num_steps)
    inverse_log = 1.0 / math.log(steps)
    if warmup_type == "log":
        return steps, lambda iteration: inverse_log * math.log(iteration + 1)
    return steps, lambda iteration: iteration / steps


def _warmup(full: Rates, given: Mapping[str, Any], after: Callable[[int, int], float]) -> Course:
    low = _each(given.get("warmup_min_lr", 0.0), len(full), "warmup_min_lr")
    high = given.get("warmup_max_lr")
    high = full if high is None else _each(high, len(full), "warmup_max_lr")
    steps, share = _rising(given.get("warmup_num_steps", 1000), given.get("warmup_type", "log"))

    def rates(iteration: int) -> Rates:
        if iteration < 0:
            return low
        gamma = share(iteration) if iteration < steps else after(iteration, steps)
        return tuple(least + (most - least) * gamma for least, most in zip(low, high, strict=True))

    return Course(rates)


def _warmup_lr(full: Rates, _: bool, given: Mapping[str, Any]) -> Course:  # noqa: FBT001 - one of a table of functions
    return _warmup(full, given, lambda _iteration, _steps: 1.0)


def _warmup_decay(full: Rates, _: bool, given: Mapping[str, Any]) -> Course:  # noqa: FBT001 - as above
    total = given["total_num_steps"]

    def after(iteration: int, steps: int) -> float:
        return max(0.0, float(total - iteration) / float(max(1.0, total - steps)))

    return _warmup(full, {"warmup_max_lr": 0.001, **given}, after)


def _warmup_cosine(full: Rates, _: bool, given: Mapping[str, Any]) -> Course:  # noqa: FBT001 - as above
    total = given["total_num_steps"]
    first = _number(given.get("warmup_min_ratio", 0.0), "warmup_min_ratio")
    last = _number(given.get("cos_min_ratio", 0.0001), "cos_min_ratio")
    steps, share = _rising(given.get("warmup_num_steps", 1000), given.get("warmup_type", "log"))

    def ratio(iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < steps:
            return first + share(iteration) * (1.0 - first)
        done = min(1.0, (iteration - steps + 1) / max(1, total - steps))
        return max(0.0, last + (1.0 - last) * ((1 + math.cos(math.pi * done)) / 2))

    return Course(lambda iteration: tuple(rate * ratio(iteration) for rate in full))


# --------------------------------------------------------------------------------------------------------------- cycles


def _range_test(full: Rates, _: bool, given: Mapping[str, Any]) -> Course:  # noqa: FBT001 - as above
    low = _each(given.get("lr_range_test_min_lr", 1e-3), len(full), "lr_range_test_min_lr")
    size = given.get("lr_range_test_step_size", 2000)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"scheduler.params.lr_range_test_step_size: expected a whole number from 1 on, found {size}")
    pace = _number(given.get("lr_range_test_step_rate", 1.0), "lr_range_test_step_rate")
    stairs = given.get("lr_range_test_staircase", False)

    def rates(iteration: int) -> Rates:
        if iteration == START:
            return low
        done = float(iteration + 1) / size
        grown = 1 + pace * (math.floor(done) if stairs else done)
        return tuple(least * grown for least in low)

    return Course(rates)


@dataclass(frozen=True, slots=True)
class _Cycle:
    """One rise and one fall: how far from bottom to top, by iteration."""

    first: float
    second: float
    first_stairs: int
    second_stairs: int

    @property
    def size(self) -> float:
        return self.first + self.second

    def share(self, iteration: int) -> float:
        count = iteration + 1
        turn = self.first / self.size
        x = 1.0 + count / self.size - math.floor(1 + count / self.size)
        rising = x <= turn
        stairs = self.first_stairs if rising else self.second_stairs
        if not stairs > 0:
            return x / turn if rising else (x - 1) / (turn - 1)
        # From whole counts: a share that lands just below an exact stair would be one stair off.
        inside = count % self.size
        if inside <= self.first:
            return math.floor(inside * stairs / self.first) / stairs
        return math.floor((self.size - inside) * stairs / self.second) / stairs


def _one_cycle(full: Rates, has_betas: bool, given: Mapping[str, Any]) -> Course:  # noqa: FBT001 - as above
    said = {
        "decay_lr_rate": 0.0, "cycle_first_step_size": 2000, "cycle_second_step_size": None, "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None, "decay_step_size": 0, "cycle_momentum": True, "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9, "decay_mom_rate": 0.0, **given,
    }  # fmt: skip
    first = float(_number(said["cycle_first_step_size"], "cycle_first_step_size"))
    second = said["cycle_second_step_size"]
    second = first if second is None else float(_number(second, "cycle_second_step_size"))
    if first <= 0 or second < 0:
        raise ConfigError(
            f"scheduler.params: cycle_first_step_size {first:g} must be positive, and cycle_second_step_size {second:g} not negative"
        )
    stairs = said["cycle_first_stair_count"]
    second_stairs = said["cycle_second_stair_count"]
    cycle = _Cycle(first, second, stairs, stairs if second_stairs is None else second_stairs)
    low = _each(said["cycle_min_lr"], len(full), "cycle_min_lr")
    high = _each(said["cycle_max_lr"], len(full), "cycle_max_lr")
    decay = _number(said["decay_step_size"], "decay_step_size")
    lr_decay = _number(said["decay_lr_rate"], "decay_lr_rate")
    mom_decay = _number(said["decay_mom_rate"], "decay_mom_rate")

    def rates(iteration: int) -> Rates:
        if iteration == START:
            return low
        if iteration < cycle.size:
            share = cycle.share(iteration)
            return tuple(least + (most - least) * share for least, most in zip(low, high, strict=True))
        if math.isclose(decay, 0) or math.isclose(lr_decay, 0):
            return low
        shrunk = 1 + lr_decay * ((iteration - cycle.size + 1) / decay)
        return tuple(least / shrunk for least in low)

    slow = _each(said["cycle_min_mom"], len(full), "cycle_min_mom")
    fast = _each(said["cycle_max_mom"], len(full), "cycle_max_mom")

    def betas(iteration: int) -> tuple[tuple[float, float], ...]:
        if iteration == START:
            firsts = slow
        elif iteration < cycle.size:
            share = cycle.share(iteration)
            firsts = tuple(most - (most - least) * share for least, most in zip(slow, fast, strict=True))
        elif math.isclose(decay, 0) or math.isclose(mom_decay, 0):
            firsts = fast
        else:
            grown = 1 + mom_decay * ((iteration - cycle.size + 1) / decay)
            firsts = tuple(most * grown for most in fast)
        return tuple((each, 0.99) for each in firsts)

    return Course(rates, betas if said["cycle_momentum"] and has_betas else None)


_COURSES: Final[Mapping[str, Callable[[Rates, bool, Mapping[str, Any]], Course]]] = {
    "LRRangeTest": _range_test,
    "OneCycle": _one_cycle,
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
}
