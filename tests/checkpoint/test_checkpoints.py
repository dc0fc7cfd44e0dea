"""Checkpoints on disk are exact at any world size, and refused if anything in them has changed."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from worldsize.checkpoint import format
from worldsize.checkpoint.format import COMPLETE, MANIFEST, Retention, complete, read_checkpoint, verify_checkpoint
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.manifest_tree import join_tensors, split_tensors
from worldsize.checkpoint.safetensors import DTYPES, read_entries
from worldsize.checkpoint.save import Saver
from worldsize.core import ONE_UPDATE, StateDict, World
from worldsize.errors import CheckpointError, ConfigError, OtherSchemaError, SaveFailedError
from worldsize.strategies.schedules import Schedule
from worldsize.strategies.train_state import OptimizerPart, TrainState
from worldsize.testing.worlds import run_in_worlds


def a_tensor(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    """Draw random bits, so that the floats include every kind of NaN."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def a_state(seed: int) -> StateDict:
    tensors = {f"of {name}": a_tensor(dtype, seed, 3, 5) for name, dtype in DTYPES.items()}
    sizes = {
        "scalar": a_tensor(torch.float32, seed),
        "empty": torch.empty(0, 4),
        "long": a_tensor(torch.int16, seed, 999),
    }
    plain = {"lr": 0.1 + seed, "betas": (0.9, 0.95), "inf": math.inf, "by id": {3: [1, True, None]}, "name": "x"}
    return {"model": tensors, "optimizer": {"state": sizes, "groups": [plain]}}


def bits(state: StateDict) -> dict[str, bytes]:
    tensors, _ = split_tensors(state)
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def saver(root: Path, world: World, **changes: Any) -> Saver:
    group: Any = dist.new_group(backend="gloo") if world.size > 1 else None
    return Saver(root, world, group, **{"keep": Retention(last=9), **changes})


def saved(root: Path, world: World, *steps: int) -> None:
    writer = saver(root, world)
    for step in steps:
        writer.save(a_state(step), step=step, facts={"metrics": {"accuracy": 1 / (1 + abs(step - 2))}})
    writer.finish()
    writer.close()


def alone(body: Callable[[World], Any]) -> Any:
    return run_in_worlds(body, 1)[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run_in_worlds(lambda world: saved(tmp_path, world, 1, 2), 2)
    return tmp_path


@pytest.mark.bits
def test_a_loaded_state_has_the_order_and_the_memory_layout_of_a_trained_one(tmp_path: Path) -> None:
    """The layout determines bits: it sets the summation order of an all-reduce of the whole state in a ring."""

    def trained() -> TrainState:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10), nn.Linear(10, 2))
        model[3].requires_grad_(False)
        learning = TrainState(model, {ONE_UPDATE: OptimizerPart(model, torch.optim.AdamW(model.parameters()))})
        model(torch.ones(1, 1, 8, 8)).sum().backward()
        learning.optimizer.step()
        return learning

    def layout(state: StateDict) -> list[tuple[str, tuple[int, ...], int]]:
        return [(name, tensor.stride(), tensor.data_ptr() % 64) for name, tensor in split_tensors(state)[0].items()]

    def body(world: World) -> None:
        before, after = trained(), trained()
        writer = saver(tmp_path, world)
        writer.save(before.state(), step=1, facts={"metrics": {}})
        writer.finish()
        writer.close()
        checkpoint = find_newest(tmp_path, world)
        assert checkpoint is not None
        after.load(load_checkpoint(checkpoint, after.state()))
        assert bits(after.state()) == bits(before.state())
        assert layout(after.state()) == layout(before.state())
        kept = [[list(state) for state in part.optimizer.state.values()] for part in (before, after)]
        assert kept[0] == kept[1] == [["step", "exp_avg", "exp_avg_sq"]] * 4

    alone(body)


def test_a_frozen_parameter_has_no_optimizer_state_before_or_after_a_load() -> None:
    """Adagrad creates this state in its constructor, and torch omits it on load."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
    learning = TrainState(model, {ONE_UPDATE: OptimizerPart(model, torch.optim.Adagrad(model.parameters()))})
    model(torch.ones(1, 3)).sum().backward()
    learning.optimizer.step()
    before = learning.state()
    learning.load(before)
    assert before["optimizer"]["state"].keys() == {"0.weight", "0.bias"}
    assert split_tensors(learning.state())[1] == split_tensors(before)[1]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (4, 2)])
def test_every_bit_comes_back_at_any_world_size(tmp_path: Path, before: int, after: int) -> None:
    run_in_worlds(lambda world: saved(tmp_path, world, 7), before)

    def loaded(world: World) -> bool:
        checkpoint = find_newest(tmp_path, world)
        assert checkpoint is not None
        state = load_checkpoint(checkpoint, a_state(1))
        assert state["optimizer"]["groups"] == a_state(7)["optimizer"]["groups"]
        return bits(state) == bits(a_state(7)) and checkpoint.step == 7

    assert all(run_in_worlds(loaded, after))


def test_each_rank_writes_its_part(root: Path) -> None:
    checkpoint = read_checkpoint(complete(root)[-1])
    headers = [read_entries(checkpoint.path / name).values() for name in checkpoint.files]
    sizes = [sum(entry.nbytes for entry in entries) for entries in headers]
    assert len(sizes) == 2
    assert sum(sizes) == sum(map(len, bits(a_state(2)).values()))
    assert max(sizes) < 0.7 * sum(sizes)


def layers(seed: int, *, shard: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if shard:
        fully_shard(model)
    return model


def test_sharded_state_is_loaded_by_another_number_of_ranks_and_unsharded(tmp_path: Path) -> None:
    def save(world: World) -> None:
        model = layers(1, shard=True)
        writer = saver(tmp_path, world)
        writer.save({"model": model.state_dict()}, step=1, facts={"metrics": {}})
        writer.finish()

    def sharded(world: World) -> dict[str, Any]:
        model = layers(2, shard=True)
        checkpoint = find_newest(tmp_path, world)
        assert checkpoint is not None
        model.load_state_dict(load_checkpoint(checkpoint, {"model": model.state_dict()})["model"])
        return {name: tensor.full_tensor().numpy() for name, tensor in model.state_dict().items()}

    def plain(world: World) -> dict[str, Any]:
        checkpoint = find_newest(tmp_path, world)
        assert checkpoint is not None
        state = load_checkpoint(checkpoint, {"model": layers(2).state_dict()})["model"]
        return {name: tensor.numpy() for name, tensor in state.items()}

    run_in_worlds(save, 4)
    for result in (*run_in_worlds(sharded, 2), alone(plain)):
        assert {name: value.tobytes() for name, value in result.items()} == {
            name: tensor.numpy().tobytes() for name, tensor in layers(1).state_dict().items()
        }


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    def body(world: World) -> bool:
        state, writer = a_state(1), saver(tmp_path, world)
        before = bits(state)
        writer.save(state, step=1, facts={"metrics": {}})
        for tensor in split_tensors(state)[0].values():
            tensor.zero_()
        writer.finish()
        checkpoint = find_newest(tmp_path, world)
        assert checkpoint is not None
        return bits(load_checkpoint(checkpoint, a_state(2))) == before

    assert all(run_in_worlds(body, 2))


def flipped(data: bytearray, place: int) -> None:
    data[place] ^= 1 << place % 8


def holed(data: bytearray, place: int) -> None:
    hole = slice(place, place + 64)
    data[hole] = bytes(byte ^ 0xFF for byte in data[hole])


def truncated(data: bytearray, place: int) -> None:
    del data[place:]


@pytest.mark.parametrize("damage", [flipped, holed, truncated])
def test_damage_anywhere_in_any_file_is_refused_with_file_and_digests(
    root: Path, damage: Callable[[bytearray, int], None]
) -> None:
    folder, chance = complete(root)[-1], random.Random(0)
    files = sorted(folder.iterdir())
    assert len(files) == 4
    for path in files:
        original = path.read_bytes()
        for place in chance.sample(range(len(original)), min(200, len(original))):
            data = bytearray(original)
            damage(data, place)
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match=rf"damaged: .*({path.name}|{MANIFEST}) has .*, expected"):
                verify_checkpoint(read_checkpoint(folder))
        path.write_bytes(original)
    verify_checkpoint(read_checkpoint(folder))


def missing_shard(folder: Path) -> None:
    (folder / "rank_00001.safetensors").unlink()


def extra_shard(folder: Path) -> None:
    shutil.copy(folder / "rank_00001.safetensors", folder / "rank_00002.safetensors")


def swapped_shards(folder: Path) -> None:
    (folder / "rank_00000.safetensors").rename(folder / "x")
    (folder / "rank_00001.safetensors").rename(folder / "rank_00000.safetensors")
    (folder / "x").rename(folder / "rank_00001.safetensors")


def linked_shard(folder: Path) -> None:
    shutil.copy(folder / "rank_00001.safetensors", folder.parent / "elsewhere")
    (folder / "rank_00001.safetensors").unlink()
    (folder / "rank_00001.safetensors").symlink_to(folder.parent / "elsewhere")


def unsealed(folder: Path) -> None:
    (folder / COMPLETE).unlink()


def lost_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def resealed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and re-seal it, as an attacker would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / COMPLETE).write_text(hashlib.sha256(text).hexdigest() + "\n")


def path_traversal(folder: Path) -> None:
    shutil.copy(folder / "rank_00001.safetensors", folder.parent / "rank_00009.safetensors")

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["../rank_00009.safetensors"] = manifest["files"].pop("rank_00001.safetensors")

    resealed(folder, change)


@pytest.mark.parametrize(
    "craft",
    [
        missing_shard,
        extra_shard,
        swapped_shards,
        linked_shard,
        unsealed,
        lost_manifest,
        path_traversal,
    ],
)
def test_a_folder_that_is_not_as_it_was_written_is_refused_and_an_older_one_used_only_on_request(
    root: Path, craft: Callable[[Path], None]
) -> None:
    craft(complete(root)[-1])
    with pytest.raises(RuntimeError, match="step_0000002.*--allow-older"):
        run_in_worlds(lambda world: find_newest(root, world), 2)
    older = alone(lambda world: find_newest(root, world, allow_older=True))
    assert older.step == 1


@pytest.mark.parametrize(
    ("version", "remedy"), [(1, "Use the worldsize version that wrote it"), (99, "Upgrade worldsize")]
)
def test_a_checkpoint_of_another_schema_is_refused_with_what_reads_it(root: Path, version: int, remedy: str) -> None:
    folder = complete(root)[-1]
    resealed(folder, lambda manifest: manifest.update(schema_version=version))
    said = rf"schema version {version}; this worldsize reads version 2. {remedy}"
    with pytest.raises(OtherSchemaError, match=said):
        read_checkpoint(folder)
    for allow_older in (False, True):  # it may be intact: no older checkpoint replaces it, and none is saved over it
        with pytest.raises(RuntimeError, match=said):
            run_in_worlds(lambda world: find_newest(root, world, allow_older=allow_older), 2)  # noqa: B023
    with pytest.raises(RuntimeError, match=said):
        alone(lambda world: saved_again(root, world))
    assert complete(root)[-1] == folder


def saved_again(root: Path, world: World) -> None:
    writer = saver(root, world)
    writer.save({"a": torch.zeros(8)}, step=2, facts={"metrics": {}})
    writer.finish()


def test_where_every_checkpoint_is_damaged_nothing_begins_anew(root: Path) -> None:
    for folder in complete(root):
        unsealed(folder)
    with pytest.raises(CheckpointError, match="no valid checkpoint found in .* Remove the checkpoints to start over"):
        alone_newest(root, allow_older=True)


class Malice:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("name", ["rank_00000.safetensors", MANIFEST, COMPLETE, ".metadata"])
def test_no_pickle_in_any_file_is_ever_run(root: Path, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    assert pickle.loads(pickle.dumps(Malice(canary))) is None
    canary.unlink()  # unpickling does create it
    (complete(root)[-1] / name).write_bytes(pickle.dumps(Malice(canary)))
    with pytest.raises(RuntimeError, match="damaged"):
        alone(lambda world: find_newest(root, world))
    assert not canary.exists()


def test_another_model_is_refused_before_anything_is_written_and_a_part_can_be_ignored(root: Path) -> None:
    checkpoint, template = read_checkpoint(complete(root)[-1]), a_state(1)
    template["model"]["of int8"] = torch.zeros(4, 4, dtype=torch.int8)
    before = bits(template)
    with pytest.raises(
        CheckpointError, match=r"model/of int8: int8\[3, 5\] in the checkpoint, int8\[4, 4\] in the run"
    ):
        load_checkpoint(checkpoint, template)
    assert bits(template) == before
    state = load_checkpoint(checkpoint, template, ignore=["model"])
    assert bits({"optimizer": state["optimizer"]}) == bits({"optimizer": a_state(2)["optimizer"]})
    assert bits({"model": state["model"]}) == bits({"model": template["model"]})


def learning(lr: float, weight_decay: float = 0.0) -> TrainState:
    """Return a linear model whose learning rate is halved after each step."""
    optimizer = torch.optim.SGD((model := nn.Linear(2, 1)).parameters(), lr, momentum=0.9, weight_decay=weight_decay)
    schedule = Schedule(torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    return TrainState(model, {ONE_UPDATE: OptimizerPart(model, optimizer, schedule)})


@pytest.mark.parametrize(
    ("ignore", "now", "rate", "then_decay"),
    [
        ((), 0.3, 0.05, 0.0),
        (("hyperparameters",), 0.3, 0.15, 0.01),
        (("hyperparameters",), 0.1, 0.05, 0.01),  # exact, since 0.05 / 0.1 * 0.1 == 0.05
        (("schedule",), 0.3, 0.3, 0.01),
    ],
)
def test_ignored_hyperparameters_are_those_of_now_and_the_rate_keeps_its_place_in_the_schedule(
    tmp_path: Path, ignore: tuple[str, ...], now: float, rate: float, then_decay: float
) -> None:
    def save_and_load(world: World) -> tuple[float, float, float]:
        first, second = learning(0.1), learning(now, weight_decay=0.01)
        first.model(torch.ones(2)).sum().backward()
        first.optimizer.step()
        first.schedules[0].step()
        writer = saver(tmp_path, world)
        writer.save(first.state(), step=1, facts={})
        writer.finish()
        writer.close()
        second.load(load_checkpoint(read_checkpoint(complete(tmp_path)[-1]), second.state(), ignore=ignore))
        (group,) = second.optimizer.param_groups
        momentum = second.optimizer.state[second.model.bias]["momentum_buffer"]  # type: ignore[index]
        return group["lr"], group["weight_decay"], float(momentum)

    loaded_rate, decay, momentum = alone(save_and_load)
    assert (loaded_rate, decay, momentum) == (pytest.approx(rate, rel=0 if now == 0.1 else 1e-12), then_decay, 1.0)


def test_a_value_that_is_neither_a_tensor_nor_plain_data_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="a/b is a function"):
        split_tensors({"a": {"b": lambda: 0}})
    tree = {"a": [1, (2.5, None)], "b": {1: "x"}, "c": {"$tensor": "not one"}, "d": -math.inf}
    tensors, value = split_tensors(tree)
    assert join_tensors(json.loads(json.dumps(value)), tensors) == tree


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Retention(last=2), [5, 6]),
        (Retention(last=1, every=3), [3, 6]),
        (Retention(last=1, best="accuracy"), [2, 6]),
        (Retention(last=1, best="accuracy", direction="min"), [6]),
    ],
)
def test_retention_keeps_the_last_the_spaced_and_the_best(tmp_path: Path, keep: Retention, left: list[int]) -> None:
    alone(lambda world: saved(tmp_path, world, 1, 2, 3, 4, 5, 6))
    format.apply_retention(keep, complete(tmp_path)[-1], lambda _: None)
    assert [read_checkpoint(path).step for path in complete(tmp_path)] == left
    assert {path.name[:5] for path in tmp_path.iterdir()} == {"step_"}


def test_at_least_one_checkpoint_is_kept() -> None:
    with pytest.raises(ConfigError, match="keep.last=0"):
        Retention(last=0)


def test_a_save_of_new_ranks_does_not_wait_for_one_that_is_stuck(tmp_path: Path) -> None:
    is_inside, is_released = threading.Event(), threading.Event()

    def at(point: str) -> None:
        if point == "checkpoint:in-shard" and not is_inside.is_set():
            is_inside.set()
            assert is_released.wait(120.0)

    world = World.create_single(torch.device("cpu"))
    before = saver(tmp_path, world, at=at)
    before.save(a_state(1), step=1, facts={})
    assert is_inside.wait(120.0)
    now = before.regroup_ranks(world, None)
    now.save(a_state(2), step=2, facts={})
    assert [saved.step for saved in now.finish()] == [2]
    is_released.set()
    with pytest.raises(CheckpointError):
        before.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000002"]
    verify_checkpoint(read_checkpoint(tmp_path / "step_0000002"))


@pytest.mark.parametrize(
    ("where", "rank"), [("checkpoint:after-shard", 1), ("checkpoint:after-shards", 0), ("checkpoint:after-manifest", 0)]
)
def test_a_failure_on_one_rank_is_a_failure_on_all_and_leaves_nothing_behind(
    tmp_path: Path, where: str, rank: int
) -> None:
    def body(world: World) -> list[str]:
        def at(point: str) -> None:
            if point == where and world.rank == rank:
                raise OSError(28, "No space left on device")

        saved(tmp_path, world, 1)
        writer, state = saver(tmp_path, world, at=at), a_state(2)
        writer.save(state, step=2, facts={"metrics": {}})
        with pytest.raises(
            CheckpointError, match=f"failed to write the checkpoint of step 2: rank {rank}: .*No space left"
        ):
            writer.save(state, step=3, facts={"metrics": {}})
        return sorted(path.name for path in tmp_path.iterdir())

    assert run_in_worlds(body, 3) == [["step_0000001"]] * 3


@pytest.mark.parametrize(
    ("where", "rank"),
    [
        ("checkpoint:in-shard", 1),
        ("checkpoint:after-shard", 2),
        ("checkpoint:after-shards", 0),
        ("checkpoint:after-manifest", 0),
        ("checkpoint:after-rename", 0),
        ("retention:begin", 0),
    ],
)
def test_after_a_failure_on_any_rank_all_know_where_a_restart_begins_and_save_again(
    tmp_path: Path, where: str, rank: int
) -> None:
    is_published = where in ("checkpoint:after-rename", "retention:begin")

    def body(world: World) -> int | None:
        failures = [OSError(28, "No space left on device"), OSError(5, "Input/output error")]

        def at(point: str) -> None:
            if point == where and world.rank == rank and failures:
                raise failures.pop()

        saved(tmp_path, world, 1)
        writer, newest = saver(tmp_path, world, at=at), None
        for step in (2, 3):
            writer.save(a_state(step), step=step, facts={"metrics": {}})
            with pytest.raises(SaveFailedError, match=f"failed to write the checkpoint of step {step}") as failed:
                writer.finish()
            newest = failed.value.newest
        writer.save(a_state(4), step=4, facts={"metrics": {}})
        assert [event.step for event in writer.finish()] == [4]
        writer.close()
        return newest

    assert run_in_worlds(body, 3) == [3 if is_published else 1] * 3
    checkpoints = [read_checkpoint(path) for path in complete(tmp_path)]
    assert [each.step for each in checkpoints] == ([1, 2, 3, 4] if is_published else [1, 4])
    for each in checkpoints:
        verify_checkpoint(each)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("step_")] == []


def test_a_folder_that_cannot_be_made_fails_each_save_until_it_can(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.touch()  # stands in for a folder without write permission: root ignores permissions

    def body(world: World) -> None:
        writer = saver(root, world)
        for step in (1, 2):
            writer.save(a_state(step), step=step, facts={"metrics": {}})
            with pytest.raises(SaveFailedError, match=f"{root}. Free disk space, or use another folder") as failed:
                writer.finish()
            assert failed.value.newest is None
        dist.barrier()
        if world.rank == 0:
            root.unlink()
        writer.save(a_state(3), step=3, facts={"metrics": {}})
        assert [event.step for event in writer.finish()] == [3]
        writer.close()

    run_in_worlds(body, 2)
    assert [read_checkpoint(path).step for path in complete(root)] == [3]


def test_a_model_with_a_nan_is_not_saved_over_a_good_one(tmp_path: Path) -> None:
    def body(world: World) -> None:
        state: StateDict = {"model": {"w": torch.ones(3), "v": torch.ones(3)}}
        writer = saver(tmp_path, world, finite=True, keep=Retention(last=1))
        writer.save(state, step=1, facts={"metrics": {}})
        state["model"]["v"][1] = math.nan
        writer.save(state, step=2, facts={"metrics": {}})
        with pytest.raises(CheckpointError, match="model/v contains NaN or infinity") as failed:
            writer.finish()
        assert not isinstance(failed.value, SaveFailedError)  # training must stop instead of continuing with a NaN

    run_in_worlds(body, 2)
    assert [read_checkpoint(path).step for path in complete(tmp_path)] == [1]


def test_a_damaged_later_checkpoint_does_not_push_out_the_one_that_training_goes_on_with(tmp_path: Path) -> None:
    alone(lambda world: saved(tmp_path, world, 4, 8))
    (tmp_path / "step_0000008" / "rank_00000.safetensors").write_bytes(b"")

    def body(world: World) -> None:
        writer = saver(tmp_path, world, keep=Retention(last=1))
        writer.save(a_state(6), step=6, facts={"metrics": {}})
        writer.finish()

    alone(body)
    assert alone(lambda world: find_newest(tmp_path, world, allow_older=True)).step == 6


def sealed_over(folder: Path, text: bytes) -> None:
    """Write a manifest with a valid ``COMPLETE``, as anyone with write access to the folder could."""
    (folder / MANIFEST).write_bytes(text)
    (folder / COMPLETE).write_text(f"{hashlib.sha256(text).hexdigest()}\n")


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../secret"},
        {"file": "manifest.json"},
        {"offset": 8},
        {"offset": -1},
        {"sizes": [2], "length": 8},
        {"sizes": [16], "length": 64},
        {"offsets": [1]},
    ],
    ids=str,
)
def test_a_sealed_manifest_cannot_lead_out_of_the_checkpoint_or_leave_a_tensor_unread(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    def body(world: World) -> None:
        writer = saver(tmp_path / "root", world)
        writer.save({"x": torch.arange(8.0)}, step=1, facts={"metrics": {}})
        writer.finish()

    alone(body)
    (tmp_path / "secret").write_bytes(bytes(32))
    folder = tmp_path / "root" / "step_0000001"
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["tensors"]["x"]["chunks"][0].update(change)
    sealed_over(folder, json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="is not a valid manifest"):
        alone_newest(folder.parent)


@pytest.mark.parametrize("text", [b"{}", b"[]", b"\x80\x04.", b'{"schema_version": "9"}', b"[" * 100_000])
def test_a_sealed_file_that_is_no_manifest_is_refused_and_an_older_checkpoint_used_on_request(
    root: Path, text: bytes
) -> None:
    sealed_over(root / "step_0000002", text)
    with pytest.raises(CheckpointError, match="is not a valid manifest"):
        alone_newest(root)
    assert alone_newest(root, allow_older=True).step == 1


def alone_newest(root: Path, *, allow_older: bool = False) -> Any:
    """Call ``newest`` in this process, so that its own errors are raised."""
    return find_newest(root, World.create_single(torch.device("cpu")), allow_older=allow_older)


@pytest.mark.parametrize("state", [{"a/b": 1, "a": {"b": 2}}, {0: 1, "0": 2}])
def test_two_tensors_of_one_path_are_refused_instead_of_one_being_lost(state: dict[Any, Any]) -> None:
    def tensors(node: Any) -> Any:
        return {key: tensors(child) for key, child in node.items()} if isinstance(node, dict) else torch.tensor(node)

    with pytest.raises(CheckpointError, match="two tensors of the state have the same name"):
        split_tensors(tensors(state))


def test_a_tensor_may_change_shape_and_dtype_from_save_to_save(tmp_path: Path) -> None:
    given = {1: torch.tensor([1.0, 2.0, 3.0]), 2: torch.tensor([7.5]), 3: torch.tensor([2**40 + 1, 2, 3])}

    def body(world: World) -> None:
        writer = saver(tmp_path, world)
        for step, tensor in given.items():
            writer.save({"x": tensor}, step=step, facts={"metrics": {}})
        writer.finish()

    alone(body)
    for path in complete(tmp_path):
        tensor = given[read_checkpoint(path).step]
        loaded = load_checkpoint(read_checkpoint(path), {"x": torch.zeros_like(tensor)})
        assert torch.equal(loaded["x"], tensor)


def test_a_metric_that_is_nan_is_never_the_best(tmp_path: Path) -> None:
    def body(world: World) -> None:
        writer = saver(tmp_path, world, keep=Retention(last=1, best="accuracy"))
        for step, accuracy in enumerate((math.nan, 0.9, 0.5, 0.4), 1):
            writer.save({"x": torch.zeros(1)}, step=step, facts={"metrics": {"accuracy": accuracy}})
        writer.finish()

    alone(body)
    assert [read_checkpoint(path).step for path in complete(tmp_path)] == [2, 4]


def test_any_error_of_rank_0_reaches_every_rank_at_once(tmp_path: Path) -> None:
    def body(world: World) -> None:
        def at(point: str) -> None:
            if point == "checkpoint:after-rename":
                raise ValueError("planted")

        writer = saver(tmp_path, world, at=at)
        writer.save(a_state(1), step=1, facts={"metrics": {}})
        with pytest.raises(CheckpointError, match="ValueError: planted"):
            writer.finish()

    run_in_worlds(body, 2)


def test_a_tensor_that_only_some_ranks_have_fails_the_save_instead_of_being_lost(tmp_path: Path) -> None:
    def body(world: World) -> None:
        extra = {"c": torch.ones(100)} if world.rank == 1 else {}
        writer = saver(tmp_path, world)
        with pytest.raises(CheckpointError, match="tensor names, dtypes or shapes differ between ranks"):
            writer.save({"a": torch.zeros(8), "b": torch.ones(4), **extra}, step=1, facts={"metrics": {}})

    run_in_worlds(body, 2)
    assert complete(tmp_path) == []
