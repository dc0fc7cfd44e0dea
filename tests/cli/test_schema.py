"""Editors check and complete the YAML files of a project with the schema that ``worldsize schema`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match
from omegaconf import OmegaConf

from tests.support.runs import REPOSITORY
from worldsize.cli import schema

GOLDEN = REPOSITORY / "tests" / "config" / "golden"
FOLDERS = ("conf", "recipes", "plugins", "examples", "benchmarks")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr("sys.argv", ["worldsize schema"])
    schema.main()
    return json.loads(capsys.readouterr().out)


def find_mistake(printed: Any, text: str) -> str | None:
    """Return the place of the mistake in a file, None if there is none."""
    error = best_match(Draft7Validator(printed).iter_errors(OmegaConf.to_container(OmegaConf.create(text))))
    return None if error is None else ".".join(map(str, error.absolute_path))


def test_the_schema_accepts_the_files_of_this_repository(printed: Any) -> None:
    Draft7Validator.check_schema(printed)
    texts = [path.read_text() for folder in FOLDERS for path in (REPOSITORY / folder).rglob("conf/**/*.yaml")]
    parts = [text for text in texts if text.startswith("# @package _global_")]
    whole = [path.read_text() for path in (REPOSITORY / "conf" / "config.yaml", *GOLDEN.glob("*.yaml"))]
    assert len(whole) > 4
    assert len(parts) > 10
    assert [(text, found) for text in whole + parts if (found := find_mistake(printed, text)) is not None] == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("steps: many", "steps"),
        ("steps: 0", "steps"),
        ("lr: -0.1", "lr"),
        ("seed: null", "seed"),
        ("stepz: 10", ""),
        ("shuffle: {blok: 2}", "shuffle"),
        ("shuffle: {block: 2.5}", "shuffle.block"),
        ("precision: fp31", "precision"),
        ("checkpoint: {every: sometimes}", "checkpoint.every"),
        ("run: {name: a/b}", "run.name"),
        ("run: {root: ''}", "run.root"),
        ("evaluation: {splits: test}", "evaluation.splits"),
        ("profile: {steps: [0, 2]}", "profile.steps.0"),
        ("cluster: {links: {node: {incast: 2}}}", "cluster.links.node.incast"),
        ("cluster: {port: 70000}", "cluster.port"),
        ("strategy: ddp", "strategy"),
        ("defaults: ddp", "defaults"),
    ],
)
def test_a_mistake_is_found_where_it_is(printed: Any, text: str, place: str) -> None:
    assert find_mistake(printed, text) == place


@pytest.mark.parametrize(
    "text",
    [
        "steps: ${oc.env:STEPS,10}",
        "precision: ${oc.env:PRECISION}",
        "shuffle: ${mine}",
        "profile: {steps: ['${seed}', 3]}",
        "run: {name: '${now:%Y/%m}'}",
        "batch_size: ???",
        "checkpoint: {every: auto}",
        "checkpoint: {every: 5}",
        "run: {name: 2024, examine: null}",
        "cluster: {partition: gpu, tiers: {rack: {nodes: 16}}}",
        "strategy: {bucket_mb: 50}",
        "defaults: [_self_, {override /recipe: digits}, {/logger: null}]",
    ],
)
def test_interpolations_and_parts_of_a_configuration_are_accepted(printed: Any, text: str) -> None:
    assert find_mistake(printed, text) is None


def test_each_key_is_described(printed: Any) -> None:
    assert [place for place, key in list_keys(printed) if not key.get("description")] == ["numerics._target_"]
    keys = dict(list_keys(printed))
    assert keys["shuffle.window"]["description"] == "Number of blocks whose samples are mixed."
    assert keys["shuffle.window"]["default"] == 64
    assert keys["ema"]["description"].startswith("Exponential moving average")
    assert {"enum": ["run", "show", "write"]} in keys["launch"]["anyOf"]


def list_keys(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, key in node.get("properties", {}).items():
        yield f"{above}{name}", key
        yield from list_keys(key, f"{above}{name}.")
