"""A store on a PostgreSQL server, started here from the system's package where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import postgresql_server
from memfit.errors import ConfigError
from memfit.tune import run
from tune import searches
from tune.test_tuning import check_race

pytestmark = [pytest.mark.slow, postgresql_server.needed]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server's URL."""
    with postgresql_server.started() as found:
        yield found.url.replace("://", "+psycopg2://")


def test_workers_that_race_for_an_empty_database_share_its_trials(tmp_path: Path, server: str) -> None:
    study = check_race(tmp_path, server)
    assert len({trial.user_attrs["memfit:worker"] for trial in study.trials}) > 1


def test_studies_of_other_searches_are_told_apart_there_too(tmp_path: Path, server: str) -> None:
    found = run(searches.command(tmp_path, trials=2, store=server, study="first"))
    assert found.count("done") == 2
    with pytest.raises(ConfigError, match="has a study 'first' that searches something else"):
        run(searches.command(tmp_path, space={"x": [1, 2], "y": [1]}, store=server, study="first", out="other"))
