"""Each rank's checkpoint file opens with the safetensors library and contains the tensors that its keys name."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from worldsize.checkpoint.format import COMPLETE, MANIFEST, Retention, complete, read_checkpoint, verify_checkpoint
from worldsize.checkpoint.load import load_checkpoint
from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.checkpoint.safetensors import DTYPES
from worldsize.checkpoint.save import Saver
from worldsize.checkpoint.weights import CheckpointWeights, open_weights
from worldsize.collectives.gather_full import gather_full
from worldsize.core import RunContext, StateDict, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.errors import CheckpointError
from worldsize.loop.fit import LoopCallbacks, LoopConfig, fit
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

ALONE = World.create_single(torch.device("cpu"))
PART = re.compile(r"(?s)(.*)\[([\d:,]*)\]")


def saved(root: Path, state: StateDict, world: World = ALONE) -> None:
    writer = Saver(root, world, world.groups.get("checkpoint/worker"), keep=Retention())
    writer.save(state, step=3, facts={"metrics": {}})
    writer.finish()
    writer.close()


def shards_of(root: Path) -> list[Path]:
    return sorted(complete(root)[-1].glob("rank_*.safetensors"))


def told(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a shard's tensors, in their dtypes, and its metadata with only the safetensors library."""
    with safetensors.safe_open(file, "pt") as opened:
        facts = {key: json.loads(text) if text[0] == "{" else text for key, text in opened.metadata().items()}
    tensors = safetensors.torch.load_file(file)
    for name, tensor in tensors.items():
        match = PART.fullmatch(name)
        if dtype := facts.get("dtypes", {}).get(match[1] if match else name):
            tensors[name] = tensor.view(getattr(torch, dtype)).squeeze(-1)
    return tensors, facts


def put_together(files: list[Path]) -> dict[str, Tensor]:
    """Reassemble all tensors of a state from the names and metadata of its shards."""
    whole: dict[str, Tensor] = {}
    for file in files:
        tensors, facts = told(file)
        for name, tensor in tensors.items():
            match = PART.fullmatch(name)
            if match is None:
                whole[name] = tensor
                continue
            shape = facts.get("shapes", {}).get(match[1], list(tensor.shape))
            place = tuple(slice(*map(int, side.split(":"))) for side in match[2].split(",") if side)
            whole.setdefault(match[1], torch.empty(shape, dtype=tensor.dtype))[place] = tensor
    return whole


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(actual[name]) == bits(tensor), name


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------- shards of each strategy

STRATEGIES: dict[str, Strategy] = {
    "ddp": DDP(),
    "zero": ZeRO(),
    "fsdp": FSDP(),
    "pipeline": Mesh(pipeline=2),
    "tensor": Mesh(tensor=2),
}


def trained(strategy: Strategy, world: World) -> StateDict:
    recipe = Chain()
    replica = strategy.replica(recipe, RunContext(world))
    mine = (0, 1) if isinstance(strategy, Mesh) else assign_logical_ranks(world.rank, world.size, 2)
    order = Order(seed=3, batch_size=8, logical_ranks=2, mine=mine)
    batches = micro_batches(recipe.data("train"), order, world.device)
    config = LoopConfig(2, batch_size=8)
    fit(replica, batches, world, config=config, callbacks=LoopCallbacks(lambda step: {}, lambda event: None))
    return replica.state()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_library_reads_what_each_rank_of_a_strategy_has_saved(name: str, tmp_path: Path) -> None:
    def body(world: World) -> dict[str, Any]:
        state = trained(STRATEGIES[name], world)
        saved(tmp_path, state, world)
        return {path: each.numpy() for path, each in gather_full(split_tensors(state)[0], world).items()}

    expected = {path: torch.from_numpy(values) for path, values in run_in_worlds(body, 2)[0].items()}
    files = shards_of(tmp_path)
    assert [file.name for file in files] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    assert {part.partition("/")[0] for part in expected} >= {"model", "optimizer"}
    assert any(tensor.ndim == 0 for tensor in expected.values())  # counts of the optimizer's steps
    assert_same_bits(put_together(files), expected)
    cut = {path for file in files for path in told(file)[0] if path.endswith("]")}
    assert bool(cut) == (name in ("fsdp", "tensor"))
    verify_checkpoint(read_checkpoint(complete(tmp_path)[-1]))


def test_a_shard_tells_a_reader_without_the_manifest_what_it_is(tmp_path: Path) -> None:
    whole = torch.arange(15.0).reshape(5, 3)
    wave = torch.arange(6).to(torch.complex128) * 1j

    def body(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,))
        rows, columns = (distribute_tensor(whole, mesh, [Shard(dimension)]) for dimension in (0, 1))
        waves = distribute_tensor(wave, mesh, [Shard(0)])
        saved(tmp_path, {"model": {"rows": rows, "columns": columns, "wave": waves, "all": whole}}, world)

    run_in_worlds(body, 2)
    first, facts = told(shards_of(tmp_path)[1])
    assert facts == {
        "format": "pt",
        "schema_version": "2",
        "step": "3",
        "rank": "1",
        "world_size": "2",
        "shapes": {"model/rows": [5, 3], "model/columns": [5, 3], "model/wave": [6]},
        "dtypes": {"model/wave": "complex128"},
    }
    assert first.keys() - {"model/all"} == {"model/rows[3:5,0:3]", "model/columns[0:5,2:3]", "model/wave[3:6]"}
    assert torch.equal(first["model/wave[3:6]"], wave[3:])
    assert safetensors.torch.load_file(shards_of(tmp_path)[1])["model/wave[3:6]"].shape == (3, 16)  # as bytes
    expected = {"rows": whole, "columns": whole, "wave": wave, "all": whole}
    assert_same_bits(put_together(shards_of(tmp_path)), {f"model/{name}": each for name, each in expected.items()})


# ---------------------------------------------------------------- any state

names = st.sampled_from(["w", "w[0:2]", "w[]", "]", "", "__metadata__", "[0:1]"]) | st.text(max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    largest = 1 if dtype == torch.bool else 255
    raw = torch.tensor(draw(st.lists(st.integers(0, largest), min_size=count, max_size=count)), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@settings(max_examples=60)
@given(st.dictionaries(names, tensors() | st.dictionaries(names, tensors(), max_size=3), max_size=5))
def test_the_library_opens_the_checkpoint_of_any_state(state: StateDict) -> None:
    try:
        expected, _ = split_tensors(state)
    except CheckpointError:  # two tensors with the same path
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        saved(root, state)
        checkpoint = read_checkpoint(complete(root)[-1])
        verify_checkpoint(checkpoint)
        files = shards_of(root)
        assert len(files) == bool(expected)
        assert_same_bits(put_together(files), expected)
        for facts in checkpoint.tensors.values():
            for chunk in facts["chunks"]:
                assert chunk["offset"] % DTYPES[facts["dtype"]].itemsize == 0 or not chunk["length"]
        empty = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        assert_same_bits(split_tensors(load_checkpoint(checkpoint, _with(state, iter(empty.values()))))[0], expected)


def _with(state: Any, values: Any) -> Any:
    return {key: _with(each, values) for key, each in state.items()} if isinstance(state, dict) else next(values)


def test_a_dtype_that_a_checkpoint_cannot_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 0: x: dtype uint16 is not supported in checkpoints"):
        saved(tmp_path, {"x": torch.zeros(3, dtype=torch.uint16)})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two vectors of four numbers each."""
    saved(tmp_path, {"x": torch.arange(4.0), "y": torch.arange(4.0) + 9})
    return tmp_path / "step_0000003"


def sealed_again(folder: Path, data: bytes, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a shard and a changed manifest with valid digests, as anyone with write access to the folder could."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / "rank_00000.safetensors").write_bytes(data)
    manifest["files"]["rank_00000.safetensors"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / COMPLETE).write_text(f"{hashlib.sha256(text).hexdigest()}\n")


def nothing(manifest: dict[str, Any]) -> None: ...


def swapped(manifest: dict[str, Any]) -> None:
    x, y = (manifest["tensors"][name]["chunks"][0] for name in "xy")
    x["offset"], y["offset"] = y["offset"], x["offset"]


def of_integers(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["x"]["dtype"] = "int32"


def of_two_dimensions(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["x"]["shape"] = [2, 2]
    manifest["tensors"]["x"]["chunks"][0].update(offsets=[0, 0], sizes=[2, 2])


def cut_in_two(manifest: dict[str, Any]) -> None:
    (chunk,) = manifest["tensors"]["x"]["chunks"]
    half = {**chunk, "sizes": [2], "length": 8}
    manifest["tensors"]["x"]["chunks"] = [half, {**half, "offsets": [2], "offset": chunk["offset"] + 8}]


@pytest.mark.parametrize(
    ("old", "new", "change", "said"),
    [
        (
            b'"x"',
            b'"z"',
            nothing,
            r"has no tensor x in its header, expected x as F32\[4\] at byte \d+ according to manifest.json",
        ),
        (b'"F32"', b'"I32"', nothing, r"has x as I32\[4\] at byte \d+ in its header, expected x as F32\[4\] at byte"),
        (b"[4]", b"[4,1]", nothing, r"has x as F32\[4, 1\] at byte \d+ in its header, expected x as F32\[4\] at byte"),
        (b"", b"", of_integers, r"has x as F32\[4\] at byte \d+ in its header, expected x as I32\[4\] at byte"),
        (b"", b"", of_two_dimensions, r"has x as F32\[4\] at byte \d+ in its header, expected x as F32\[2, 2\] at"),
        (
            b"",
            b"",
            cut_in_two,
            r"has x as F32\[4\] at byte \d+ in its header, expected no tensor x according to manifest.json",
        ),
        (
            b"",
            b"",
            swapped,
            r"has x as F32\[4\] at byte (\d+) in its header, expected x as F32\[4\] at byte (?!\1)\d+ ",
        ),
        (b'"x":{', b'"x":[', nothing, r"is damaged or not a safetensors file \("),
        (
            b'"step":"3"',
            b'"step":"9"',
            nothing,
            "has other metadata in its header, expected the",
        ),
        (b'"step":"3"', b'"step":3', nothing, "has other metadata in its header, expected the"),
        (
            b'"shape":[4]',
            b'"shape":""',
            nothing,
            r"is damaged or not a safetensors file \(the shape of x is not a list",
        ),
    ],
)
def test_a_header_that_disagrees_with_the_manifest_is_damage_though_all_digests_are_right(
    folder: Path, old: bytes, new: bytes, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    file = folder / "rank_00000.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].replace(old, new, 1)
    text = text.rstrip().ljust(length)  # so that the numbers stay where they are
    assert len(text) == length
    sealed_again(folder, data[:8] + text + data[8 + length :], change)
    with pytest.raises(CheckpointError) as refused:
        verify_checkpoint(read_checkpoint(folder))
    assert re.match(rf"the checkpoint is damaged: {re.escape(str(file))} {said}", str(refused.value))


def test_a_header_that_is_far_too_long_is_not_looked_into(folder: Path) -> None:
    file = folder / "rank_00000.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()[:-1] + b', "__metadata__": {"a": [' + b"[]," * 30_000 + b"[]]}}"
    text = text.ljust(-(-len(text) // 16) * 16 + 8)
    added = len(text) - length

    def later(manifest: dict[str, Any]) -> None:
        for name in "xy":
            manifest["tensors"][name]["chunks"][0]["offset"] += added

    sealed_again(folder, len(text).to_bytes(8, "little") + text + data[8 + length :], later)
    with pytest.raises(CheckpointError, match=f"invalid header length: {len(text)} bytes"):
        verify_checkpoint(read_checkpoint(folder))


def test_a_manifest_that_gives_a_tensor_the_bytes_of_the_header_or_leaves_some_to_nobody_is_refused(
    folder: Path,
) -> None:
    data = (folder / "rank_00000.safetensors").read_bytes()

    def in_the_header(manifest: dict[str, Any]) -> None:
        manifest["tensors"]["x"]["chunks"][0]["offset"] = 16

    def between(manifest: dict[str, Any]) -> None:
        chunk = manifest["tensors"]["x"]["chunks"][0]
        chunk["offset"] -= 2

    for change, said in ((in_the_header, "bytes .* do not belong to any chunk"), (between, "not aligned to its dtype")):
        sealed_again(folder, data, change)
        with pytest.raises(CheckpointError, match=f"is not a valid manifest .*{said}"):
            read_checkpoint(folder)


# ---------------------------------------------------------------- parts of weights


def test_a_part_of_a_weight_is_read_from_the_shards_that_have_some_of_it(tmp_path: Path) -> None:
    whole, chance = torch.randn(13, 7, generator=torch.Generator().manual_seed(1)), random.Random(0)

    def body(world: World) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        grid = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        saved(tmp_path, {"model": {"grid": grid, "scale": torch.tensor(2.0)}}, world)

    run_in_worlds(body, 4)
    weights = CheckpointWeights(read_checkpoint(complete(tmp_path)[-1]))
    for _ in range(200):
        place = tuple(slice(*sorted(chance.choices(range(size + 1), k=2))) for size in whole.shape)
        assert torch.equal(weights.read_slice("grid", place), whole[place])
    assert torch.equal(weights.read_tensor("grid"), whole)
    assert weights.read_slice("scale", ()) == 2
    for file in shards_of(tmp_path)[1:]:
        file.unlink()
    assert torch.equal(weights.read_slice("grid", (slice(1, 7), slice(0, 3))), whole[1:7, :3])
    with pytest.raises(FileNotFoundError):
        weights.read_slice("grid", (slice(1, 8), slice(0, 3)))


def test_one_rank_s_file_is_not_taken_for_a_model(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    for place in (folder, folder / "rank_00000.safetensors"):
        with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is a shard of a checkpoint"):
            open_weights(place)
