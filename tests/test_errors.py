"""The exception tree is the one that is drawn, and an error keeps what it knows wherever it travels."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest

from memfit import errors
from memfit.errors import InfeasibleError, InputError, MemfitError, Remedy

CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, BaseException)
}


def drawn() -> dict[str, str]:
    """Read name -> name of its base from the drawing at the top of the module."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        name = line.strip(" │├└─").split(" ")[0]
        if name in CLASSES:
            column = line.index(name) // 4 - 1
            path[column:] = [name]
            parents[name] = path[column - 1] if column else "Exception"
    return parents


def test_the_tree_is_the_one_drawn() -> None:
    assert drawn() == {name: cls.__bases__[0].__name__ for name, cls in CLASSES.items()}


def test_everything_is_a_memfit_error_and_bad_input_is_a_value_error_too() -> None:
    assert all(issubclass(cls, MemfitError) for cls in CLASSES.values())
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_class_says_when_it_is_raised(name: str) -> None:
    assert (CLASSES[name].__doc__ or "").splitlines()[0].endswith(".")


@pytest.fixture
def infeasible() -> InfeasibleError:
    return InfeasibleError(
        "8.00 GiB is too little: the smallest plan needs 9.30 GiB, set by encoder.11",
        budget_bytes=8 * 2**30,
        minimum_bytes=9_985_798_963,
        moment="backward of encoder.11",
        module="encoder.11",
        remedies=(Remedy('allow="bf16"', 2**31, -0.2), Remedy('fixed={"micro_batches": 4}', 2**30, 0.1)),
    )


def through_pickle(error: InfeasibleError) -> InfeasibleError:
    arrived = pickle.loads(pickle.dumps(error))  # noqa: S301 - what we pickled ourselves
    assert isinstance(arrived, InfeasibleError)
    return arrived


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, through_pickle])
def test_an_infeasible_budget_keeps_its_figures_from_one_process_to_another(
    infeasible: InfeasibleError, travel: Callable[[InfeasibleError], InfeasibleError]
) -> None:
    arrived = travel(infeasible)

    assert str(arrived) == str(infeasible)
    assert vars(arrived) == vars(infeasible)
    assert type(arrived) is InfeasibleError


def test_an_infeasible_budget_may_know_nothing_but_the_budget() -> None:
    error = InfeasibleError("too little", budget_bytes=1)

    assert (error.minimum_bytes, error.moment, error.module, error.remedies) == (None, "", "", ())


def test_a_remedy_reads_as_text_bytes_and_seconds(infeasible: InfeasibleError) -> None:
    text, saved_bytes, extra_seconds, kind, arguments, settings = infeasible.remedies[0]

    assert (text, saved_bytes, extra_seconds, kind, arguments) == ('allow="bf16"', 2**31, -0.2, "", None)
    assert settings == ()
