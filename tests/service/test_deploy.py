"""The script that puts a new image in the old one's place, with a docker that only writes down what it is asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "deploy.sh"
DOCKER = """#!/bin/sh
echo "$*" >> "$STATE/asked"
case "$1 $2" in
  "inspect --format")
    [ -e "$STATE/image" ] || exit 1
    case "$3" in
      *Health*) [ "$(cat "$STATE/image")" = bad ] && echo unhealthy || echo healthy ;;
      *) cat "$STATE/image" ;;
    esac ;;
  "rm --force") rm -f "$STATE/image" ;;
  "run --detach") for word; do :; done; echo "$word" > "$STATE/image" ;;
esac
"""


def deployed(folder: Path, image: str, before: str = "") -> tuple[int, list[str], str]:
    """Status, what docker was asked, and what runs in the end."""
    (folder / "docker").write_text(DOCKER, encoding="utf-8")
    (folder / "docker").chmod(0o755)
    if before:
        (folder / "image").write_text(before + "\n")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "STATE": str(folder), "DEPLOY_SECONDS": "0"}
    done = subprocess.run(["/bin/sh", str(SCRIPT), image], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, (folder / "asked").read_text().splitlines(), (folder / "image").read_text().strip()


@pytest.mark.parametrize("before", ["", "old"])
def test_a_good_image_runs_in_the_place_of_the_one_before(tmp_path: Path, before: str) -> None:
    status, asked, runs = deployed(tmp_path, "good", before)
    assert (status, runs) == (0, "good")
    drained = [line for line in asked if "--drain" in line or "--backup" in line or line.startswith("stop")]
    assert len(drained) == (3 if before else 0)


def test_a_bad_image_is_rolled_back_with_the_store_from_before(tmp_path: Path) -> None:
    status, asked, runs = deployed(tmp_path, "bad", "old")
    assert (status, runs) == (1, "old")
    order = [line for line in asked if "--backup" in line or "--restore" in line or "--detach" in line]
    assert [line.split()[0] for line in order] == ["exec", "run", "run", "run"]
    assert "--restore /var/lib/memfit/before-upgrade.sqlite" in order[2]


def test_a_bad_image_where_there_was_none_is_told(tmp_path: Path) -> None:
    assert deployed(tmp_path, "bad")[::2] == (1, "bad")
