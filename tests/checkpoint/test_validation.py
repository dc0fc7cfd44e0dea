"""A re-sealed manifest is refused if it is inconsistent, with the file and the reason."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worldsize.checkpoint.format import COMPLETE, MANIFEST, Retention, read_checkpoint
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.manifest_tree import Box, check_encoded, covers_exactly, split_tensors
from worldsize.checkpoint.save import Saver
from worldsize.core import World
from worldsize.errors import CheckpointError

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a vector of eight numbers, a scalar and some plain values."""
    world = World.create_single(torch.device("cpu"))
    writer = Saver(tmp_path, world, None, keep=Retention())
    state = {"model": {"x": torch.arange(8.0), "y": torch.tensor(1.0)}, "schedule": {"lr": 0.1, "ends": (1, math.inf)}}
    writer.save(state, step=3, facts={"metrics": {"accuracy": 0.5}, "skipped": 0, "evaluated": True})
    writer.finish()
    writer.close()
    return tmp_path / "step_0000003"


def sealed_again(folder: Path, change: Change) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / COMPLETE).write_text(f"{hashlib.sha256(text).hexdigest()}\n")


def put(*keys: str | int, value: Any) -> Change:
    """Return a change that sets one value in a manifest."""

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return change


def chunks_of_x(*spans: tuple[int, int]) -> Change:
    """Return a change that splits the vector into chunks of these (offset, size), with consecutive bytes."""

    def change(manifest: dict[str, Any]) -> None:
        (first,) = manifest["tensors"]["model/x"]["chunks"]
        starts = np.cumsum([0, *(4 * size for _, size in spans[:-1])]).tolist()
        manifest["tensors"]["model/x"]["chunks"] = [
            {**first, "offsets": [offset], "sizes": [size], "offset": first["offset"] + start, "length": 4 * size}
            for (offset, size), start in zip(spans, starts, strict=True)
        ]

    return change


def shared_bytes(manifest: dict[str, Any]) -> None:
    """Let both halves of a vector of sixteen refer to the same eight numbers."""
    (first,) = manifest["tensors"]["model/x"]["chunks"]
    manifest["tensors"]["model/x"] = {
        "dtype": "float32",
        "shape": [16],
        "chunks": [first, {**first, "offsets": [8]}],
    }


X, Y = ("tensors", "model/x"), ("tensors", "model/y")
VALUE = ("values", "model", "x")
HOSTILE: dict[str, tuple[Change, str]] = {
    "step NaN": (put("step", value=math.nan), "step is nan"),
    "step text": (put("step", value="x"), "step is 'x'"),
    "step negative": (put("step", value=-5), "step is -5"),
    "step true": (put("step", value=True), "step is True"),
    "another step": (put("step", value=4), "step is 4, but the folder is step_0000003"),
    "no step": (lambda manifest: manifest.pop("step"), "KeyError: 'step'"),
    "world_size 0": (put("world_size", value=0), "world_size is 0"),
    "world_size half": (put("world_size", value=1.5), "world_size is 1.5"),
    "schema_version NaN": (put("schema_version", value=math.nan), "schema_version is nan"),
    "facts": (put("facts", value=[]), "facts are not a mapping"),
    "skipped": (put("facts", "skipped", value="x"), "skipped is 'x'"),
    "evaluated": (put("facts", "evaluated", value=1), "evaluated is 1"),
    "metric": (put("facts", "metrics", "accuracy", value="best"), "metric 'accuracy' is 'best'"),
    "file size": (put("files", "rank_00000.safetensors", "size", value=-1), "size of rank_00000.safetensors is -1"),
    "file digest": (put("files", "rank_00000.safetensors", "sha256", value=7), "TypeError"),
    "file name": (put("files", "../rank_00000.safetensors", value={"size": 1, "sha256": "0" * 64}), "invalid name"),
    "dtype": (put(*X, "dtype", value="float4"), "KeyError: 'float4'"),
    "shape of minus one": (put(*X, "shape", value=[-1]), "shape of model/x is -1"),
    "shape that overflows": (put(*X, "shape", value=[0, 1 << 62]), "shape of model/x exceeds"),
    "shape beyond int64": (put(*X, "shape", value=[1 << 70]), "which is too large"),
    "shape text": (put(*X, "shape", value="8"), "not a list"),
    "many dimensions": (put(*Y, "shape", value=[1] * 65), "shape of model/y exceeds"),
    "negative size": (put(*X, "chunks", 0, "sizes", value=[-8]), "sizes of a chunk of model/x is -8"),
    "huge length": (put(*X, "chunks", 0, "length", value=1 << 80), "length of a chunk of model/x is"),
    "overlap that leaves a gap": (chunks_of_x((0, 4), (2, 4)), "the chunks of model/x overlap or do not cover"),
    "overlap beside a gap": (chunks_of_x((0, 3), (1, 3), (6, 2)), "the chunks of model/x overlap or do not cover"),
    "one chunk twice": (chunks_of_x((0, 4), (0, 4)), "the chunks of model/x overlap or do not cover"),
    "gap": (chunks_of_x((0, 3), (5, 3)), "the chunks of model/x overlap or do not cover"),
    "no chunks": (put(*X, "chunks", value=[]), "the chunks of model/x overlap or do not cover"),
    "a scalar twice": (
        lambda manifest: manifest["tensors"]["model/y"]["chunks"].append(manifest["tensors"]["model/y"]["chunks"][0]),
        "the chunks of model/y overlap or do not cover",
    ),
    "shared bytes": (shared_bytes, "two chunks overlap in rank_00000.safetensors"),
    "values": (put("values", value=[]), "values are not a mapping"),
    "values of a tuple": (put("values", value={"$tuple": []}), "values are not a mapping"),
    "unknown tensor": (put(*VALUE, "$tensor", value="model/z"), "'model/x' in values refers to a different tensor"),
    "another's tensor": (put(*VALUE, "$tensor", value="model/y"), "'model/x' in values refers to a different tensor"),
    "tensor by number": (put(*VALUE, "$tensor", value=5), "'model/x' in values is invalid: {'$tensor': 5}"),
    "tensor without a name": (put(*VALUE, "$tensor", value=None), "'model/x' in values is invalid"),
    "tensor and more": (put(*VALUE, "more", value=1), "'model/x' in values is invalid"),
    "no reference": (put(*VALUE, value=1), "the tensor 'model/x' is missing from values"),
    "one more reference": (put("values", "model", "z", value={"$tensor": "model/z"}), "unknown tensor 'model/z'"),
    "no such code": (put("values", "schedule", "lr", value={"$code": "x"}), "'schedule/lr' in values is invalid"),
    "a float by text": (put("values", "schedule", "lr", value={"$float": "x"}), "'schedule/lr' in values is invalid"),
    "a bare NaN": (put("values", "schedule", "lr", value=math.nan), "'schedule/lr' in values is invalid: nan"),
    "a tuple of nothing": (
        put("values", "schedule", "ends", value={"$tuple": 3}),
        "'schedule/ends' in values is invalid",
    ),
    "items that are none": (put("values", "schedule", value={"$items": [[1]]}), "'schedule' in values is"),
    "a key that is a list": (put("values", "schedule", value={"$items": [[[], 1]]}), "'schedule' in values is"),
}


@pytest.mark.parametrize(("change", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_refused_with_its_file_and_the_reason(folder: Path, change: Change, reason: str) -> None:
    sealed_again(folder, change)
    with pytest.raises(CheckpointError) as refused:
        find_newest(folder.parent, World.create_single(torch.device("cpu")))
    assert str(refused.value).startswith(f"the checkpoint is damaged: {folder / MANIFEST} is not a valid manifest (")
    assert reason in str(refused.value)


def test_a_manifest_that_is_sealed_again_unchanged_is_read(folder: Path) -> None:
    sealed_again(folder, chunks_of_x((5, 3), (0, 5)))
    checkpoint = read_checkpoint(folder)
    state = load_checkpoint(checkpoint, {"model": {"x": torch.zeros(8), "y": torch.zeros(())}, "schedule": {}})
    assert state["model"]["x"].tolist() == [3, 4, 5, 6, 7, 0, 1, 2]  # in the order of the new chunks
    assert state["schedule"] == {"lr": 0.1, "ends": (1, math.inf)}


def test_an_empty_chunk_beside_a_full_one_of_the_same_origin_hides_nothing(folder: Path) -> None:
    sealed_again(folder, chunks_of_x((0, 8), (0, 0)))
    state = load_checkpoint(
        read_checkpoint(folder), {"model": {"x": torch.zeros(8), "y": torch.zeros(())}, "schedule": {}}
    )
    assert state["model"]["x"].tolist() == list(range(8))


def test_values_without_end_are_refused(folder: Path) -> None:
    nested: Any = 0
    for _ in range(200):
        nested = [nested]
    sealed_again(folder, put("values", "schedule", value=nested))
    with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
        read_checkpoint(folder)


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(CheckpointError, match=r"manifest.json is not a file, expected a regular file"):
        read_checkpoint(folder)


def test_an_optimizer_of_another_form_is_refused_when_its_options_are_those_of_now(folder: Path) -> None:
    tensor = {"x": torch.zeros(8), "y": torch.zeros(())}
    now = {"model": tensor, "schedule": {}, "optimizer": {"param_groups": [{"lr": 0.1, "params": [0]}]}}
    with pytest.raises(CheckpointError, match=r"step_0000003 does not match the optimizer or schedule .*KeyError"):
        load_checkpoint(read_checkpoint(folder), now, ignore=["hyperparameters"])


# ---------------------------------------------------------------- exact covers


def counted(shape: list[int], boxes: list[Box]) -> bool:
    """Count how often each element is covered, by definition."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[tuple(slice(*side) for side in box)] += 1
    return bool((count == 1).all())


@st.composite
def covers(draw: st.DrawFn) -> tuple[list[int], list[Box]]:
    """Draw a shape, and boxes that tile it, by repeated cuts."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 12)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        begin, end = box[dimension]
        cut = draw(st.integers(begin, end))
        for side in ((begin, cut), (cut, end)):
            boxes.append((*box[:dimension], side, *box[dimension + 1 :]))
    return shape, draw(st.permutations(boxes))


@given(covers())
def test_boxes_that_a_shape_was_cut_into_cover_it(cover: tuple[list[int], list[Box]]) -> None:
    shape, boxes = cover
    assert counted(shape, boxes)
    assert covers_exactly(shape, boxes)


@given(covers(), st.data())
def test_boxes_that_nearly_cover_a_shape_are_told_from_those_that_do(
    cover: tuple[list[int], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cover
    changed: list[list[tuple[int, int]]] = [list(box) for box in boxes]
    for _ in range(data.draw(st.integers(1, 3))):
        one = data.draw(st.integers(0, len(changed) - 1))
        if not shape or data.draw(st.booleans()):  # a copy of one box replaces a box or is added
            other = data.draw(st.integers(0, len(changed)))
            changed[other : other + 1] = [list(changed[one])]
            continue
        dimension = data.draw(st.integers(0, len(shape) - 1))
        begin, end = sorted(data.draw(st.integers(0, shape[dimension])) for _ in range(2))
        changed[one][dimension] = (begin, end)
    near: list[Box] = [tuple(box) for box in changed]
    assert covers_exactly(shape, near) == counted(shape, near)


def test_boxes_of_the_same_volume_that_overlap_and_leave_a_gap_do_not_cover() -> None:
    """A pinwheel cannot be cut by straight lines; its mirror image has the same volume and a different shape."""
    pinwheel: list[Box] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    assert covers_exactly([3, 3], pinwheel)
    assert not covers_exactly([3, 3], [*pinwheel[:-1], ((0, 1), (0, 1))])


def test_a_table_of_many_shards_is_checked_without_comparing_all_pairs() -> None:
    """Comparing all pairs would take minutes."""
    count = 20_000
    rows: list[Box] = [((row, row + 1), (0, 64)) for row in reversed(range(count))]
    assert covers_exactly([count, 64], rows)
    assert not covers_exactly([count, 64], [*rows[1:], rows[5]])


# ---------------------------------------------------------------- values

texts = st.text("ab$/ö", max_size=3)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(torch.zeros(1))
keys = texts | st.integers()
trees = st.recursive(
    leaves,
    lambda child: st.lists(child) | st.lists(child).map(tuple) | st.dictionaries(keys, child, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text("abc", min_size=1), trees, max_size=3))
def test_what_is_written_of_any_state_is_accepted(state: dict[str, Any]) -> None:
    tensors: dict[str, Tensor]
    try:
        tensors, value = split_tensors(state)
    except CheckpointError:  # keys such as 1 and '1' would give their tensors the same path
        return
    check_encoded(json.loads(json.dumps(value)), tensors.keys())
