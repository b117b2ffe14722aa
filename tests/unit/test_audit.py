"""The pins of CI, and what its audit makes of an answer, of none, and of an environment that is another."""

import json
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AUDIT = runpy.run_path(str(ROOT / ".ci" / "audit"))
PINS_FILE = ROOT / "requirements" / "ci.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_dependency_has_a_pin_within_its_range() -> None:
    pins = AUDIT["read_pins"](PINS_FILE)
    assert AUDIT["unpinned"](PROJECT, pins) == []
    lines = [line for line in PINS_FILE.read_text().splitlines() if not line.startswith("#")]
    # Neither a place to install from nor a path.
    assert len(pins) == len(lines) and all(line.count("==") == 1 and "/" not in line for line in lines)


def test_what_has_no_pin_or_a_wrong_one_is_named() -> None:
    pins = {**AUDIT["read_pins"](PINS_FILE), "jax": "0.4.1"}
    del pins["numpy"]
    problems = AUDIT["unpinned"](PROJECT, pins)
    assert [problem.split(",")[0].split(" for ")[1].split(">")[0] for problem in problems] == ["jax", "numpy"]


def test_an_environment_that_is_another_is_told_by_name() -> None:
    there = {"a": "1", "b": "2", "c": "3", "pip": "23", "amsp-jax": "0.1.0"}
    assert AUDIT["differing"]({"a": "1", "b": "2.1", "d": "4"}, there) == [
        "b: pinned 2.1, installed 2",
        "c: pinned nowhere, installed 3",
        "d: pinned 4, installed nowhere",
    ]


SAFE = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "num_found", "said"),
    [
        ([SAFE], 0, "1 packages were audited"),
        ([SAFE, FLAWED], 1, "2 packages were audited"),
        ([SAFE, UNKNOWN], 0, "1 packages were audited, not c"),
        ([UNKNOWN], 0, "knows none of 1 packages, NOTHING WAS AUDITED: not found"),
        ([], 0, "NOTHING WAS AUDITED"),
    ],
)
def test_answers_of_the_service(packages: list[dict], num_found: int, said: str) -> None:
    found, text = AUDIT["read_answer"](json.dumps({"dependencies": packages}), "")
    assert len(found) == num_found and said in text
    assert not found or "b 2: CVE-1, mended in ['3']" in found[0]


def test_no_answer_is_said_and_no_success() -> None:
    found, text = AUDIT["read_answer"]("", "Traceback\n  ...\nConnectionError: no route\n")
    assert not found and text == "the service was not reachable, NOTHING WAS AUDITED: ConnectionError: no route"
