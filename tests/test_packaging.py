"""The wheel, in an environment of its own: quick to import, without torch; and each extra that is missing names its install command."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.cli import serve, submit
from memfit.cli.main import parser
from memfit.errors import InputError
from memfit.integrations.deepspeed import source
from memfit.runner.cluster import ClusterRunner
from memfit.train import tables
from memfit.train.assemble import assemble
from memfit.train.config import Config, DataConfig, ModelConfig
from memfit.train.text import FolderEncoder
from memfit.tune import read_search
from memfit.tune.ray_tune import ray_tune
from memfit.tune.study_store import open_study
from memfit.views.png import png

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORT_SECONDS = 0.3
TRIES = 5


def ran(*command: object, **more: Any) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
        **more,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this folder, without the network."""
    pytest.importorskip("hatchling", reason="the wheel is built with it: it is in the dev extra")
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    ran(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the commands of an environment that holds the wheel, and finds what else there is where this one does."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    commands = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", commands / "python")
    ran(*pip, "install", "--no-deps", "--no-index", wheel)
    (home,) = folder.rglob("site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (home / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    return commands


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "memfit").rglob("*.py")}

    page = {f"memfit/service/page/{path.name}" for path in (ROOT / "src" / "memfit" / "service" / "page").iterdir()}
    assert "memfit/service/page/index.html" in page
    assert names == {*sources, *page, "memfit/py.typed"}


def test_the_wheel_offers_every_extra(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (each for each in opened.namelist() if each.endswith("METADATA"))
        lines = opened.read(name).decode("utf-8").splitlines()

    offered = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    assert offered == set(PROJECT["optional-dependencies"])


def test_the_installed_package_imports_quickly_and_without_torch(installed: Path) -> None:
    code = (
        "import sys, time; start = time.process_time(); import memfit; seconds = time.process_time() - start; import importlib.util;"
        "assert importlib.util.find_spec('torch'), 'or it proves nothing';"
        "print(seconds, 'torch' in sys.modules, memfit.__file__)"
    )

    answers = [ran(installed / "python", "-c", code).split() for _ in range(TRIES)]

    assert {Path(file).is_relative_to(installed.parent) for _, _, file in answers} == {True}
    assert {with_torch for _, with_torch, _ in answers} == {"False"}
    assert min(float(seconds) for seconds, *_ in answers) < IMPORT_SECONDS


def test_the_installed_command_helps_and_knows_its_version(installed: Path) -> None:
    assert "doctor" in ran(installed / "memfit", "--help")
    assert ran(installed / "memfit", "--version") == f"memfit {PROJECT['version']}\n"


def test_the_installed_command_tells_its_extras(installed: Path) -> None:
    code = "import json; from memfit.cli.extras import extras; print(' '.join(extras()))"

    assert set(ran(installed / "python", "-c", code).split()) == set(PROJECT["optional-dependencies"]) - {"dev"}


# ---------------------------------------------------------------------------------------------------------- missing extras


def a_model(folder: Path) -> None:
    assemble(Config(ModelConfig(hf=str(folder), task="causal-lm"), DataConfig(train=("x.txt",))), lambda *_: None)


def a_parquet_file(folder: Path) -> None:
    list(tables.rows_of_parquet(folder / "data.parquet"))


def a_saved_dataset(folder: Path) -> None:
    list(tables.rows_of_dataset(folder))


def eight_bit(_: Path) -> None:
    memfit.eight_bit(torch.optim.AdamW([torch.nn.Parameter(torch.ones(8))]), backend="bitsandbytes")


def hjson(folder: Path) -> None:
    (folder / "ds.json").write_text("{train_batch_size: 8 # samples\n}", encoding="utf-8")
    source.load(folder / "ds.json")


def searching(store: str) -> Callable[[Path], object]:
    search = {"space": {"x": [1, 2]}, "command": "python3 {x}", "objective": "value", "store": store}
    return lambda folder: open_study(read_search({"search": search}, folder))


def search_by_ray(folder: Path) -> None:
    search = {"space": {"x": [1, 2]}, "command": "python3 {x}", "objective": "value"}
    ray_tune(read_search({"search": search}, folder))


def tracked(kind: str) -> Callable[[Path], object]:
    return lambda folder: memfit.tracker(kind, folder)


def serving(folder: Path) -> object:
    return serve.run(parser().parse_args(["serve", "--folder", str(folder)]))


def submitting(folder: Path) -> object:
    return submit.client_of(parser().parse_args(["runs", "--folder", str(folder)]))


EXTRAS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("transformers", "transformers", a_model),
    ("transformers", "transformers", FolderEncoder),
    ("datasets", "pyarrow", a_parquet_file),
    ("datasets", "datasets", a_saved_dataset),
    ("bnb", "bitsandbytes", eight_bit),
    ("deepspeed", "hjson", hjson),
    ("pictures", "matplotlib.backends.backend_agg", lambda _: png(None)),  # type: ignore[arg-type]
    ("tune", "optuna", searching("study.sqlite")),
    ("postgresql", "psycopg2", searching("postgresql+psycopg2://me@127.0.0.1:9/none")),
    ("service", "uvicorn", serving),
    ("service", "httpx2", submitting),
    ("ray", "ray", ClusterRunner),
    ("raytune", "ray", search_by_ray),
    *((kind, kind, tracked(kind)) for kind in ("tensorboard", "mlflow", "wandb", "trackio")),
]


@pytest.mark.parametrize(("extra", "package", "use"), EXTRAS)
def test_each_missing_extra_names_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, package: str, use: Callable[[Path], object]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what is None there cannot be imported

    with pytest.raises(InputError, match=rf"pip install 'memfit\[{extra}\]'"):
        use(tmp_path)


def test_no_extra_is_left_out_above() -> None:
    # No code asks for the tools of the site and of developers; Lightning is left out in the tests of its integration.
    asked_for = set(PROJECT["optional-dependencies"]) - {"dev", "docs", "lightning"}
    assert {extra for extra, *_ in EXTRAS} == asked_for
