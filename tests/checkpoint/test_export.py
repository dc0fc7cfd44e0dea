"""Weights are exported from checkpoints to files that other libraries read, and imported back."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from worldsize.checkpoint.export import SelectedWeights, publish_output, write_safetensors, write_torch
from worldsize.checkpoint.format import Retention, complete, read_checkpoint
from worldsize.checkpoint.safetensors import read_entries
from worldsize.checkpoint.save import Saver
from worldsize.checkpoint.weights import INDEX, CheckpointWeights, open_weights, resolve_source
from worldsize.core import World
from worldsize.errors import CheckpointError, WorldsizeError
from worldsize.testing.worlds import run_in_worlds

MODEL = {
    "count": torch.arange(3, dtype=torch.int8),
    "net.weight": torch.arange(24, dtype=torch.float32).reshape(6, 4) / 7,
    "net.bias": torch.linspace(0, 1, 5, dtype=torch.float64),
    "half": torch.linspace(0, 1, 7).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(5),
    "flag": torch.tensor([True, False]),
}


def saved(folder: Path, model: dict[str, Tensor], world: World | None = None, **parts: Any) -> Path:
    own = world or World.create_single(torch.device("cpu"))
    saver = Saver(folder / "checkpoints", own, own.groups.get("checkpoint/worker"), keep=Retention())
    saver.save({"model": model, **parts}, step=3, facts={"metrics": {}})
    saver.finish()
    saver.close()
    return folder


def weights_of(run: Path, **options: Any) -> CheckpointWeights:
    return CheckpointWeights(read_checkpoint(complete(run / "checkpoints")[-1]), **options)


def assert_same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def nothing(count: int) -> None: ...


def written(run: Path, folder: Path, shard_bytes: int = 1 << 30) -> list[Path]:
    folder.mkdir()
    write_safetensors(weights_of(run), folder, shard_bytes=shard_bytes, written=nothing)
    return sorted(folder.glob("*.safetensors"))


def test_safetensors_own_reader_reads_what_is_written(tmp_path: Path) -> None:
    (file,) = written(saved(tmp_path, MODEL), tmp_path / "out")
    assert_same(safetensors.torch.load_file(file), MODEL)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    files = written(saved(tmp_path, MODEL), tmp_path / "out", shard_bytes=60)
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    together = {}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "out" / file, "pt") as opened:
            together[name] = opened.get_tensor(name)
    assert_same(together, MODEL)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in MODEL.values())


def test_a_model_that_ranks_have_saved_in_parts_is_put_together(tmp_path: Path) -> None:
    whole = torch.arange(40, dtype=torch.float32).reshape(10, 4)

    def body(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,))
        columns = distribute_tensor(whole, mesh, [Shard(1)])
        saved(tmp_path, {"rows": distribute_tensor(whole, mesh, [Shard(0)]), "columns": columns}, world)

    run_in_worlds(body, 3)
    weights = weights_of(tmp_path)
    assert_same({name: weights.read_tensor(name) for name in weights.entries}, {"rows": whole, "columns": whole})


def test_torch_loads_the_state_dict_that_is_written(tmp_path: Path) -> None:
    write_torch(weights_of(saved(tmp_path, MODEL)), tmp_path / "model.pt", nothing)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), MODEL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model.pt"]


def test_averaged_weights_and_another_precision_are_exported(tmp_path: Path) -> None:
    average = {"weights": {"net.weight": MODEL["net.weight"] + 1}, "updates": 2}
    run = saved(tmp_path, MODEL, ema=average)
    weights = SelectedWeights(weights_of(run, averaged=True), dtype=torch.float16, without=["flag"])
    assert "flag" not in weights.entries
    assert torch.equal(weights.read_tensor("net.weight"), (MODEL["net.weight"] + 1).half())
    assert weights.read_tensor("count").dtype == torch.int8
    assert weights.entries["half"].dtype == torch.float16


def test_no_more_than_a_tensor_is_held_in_memory(tmp_path: Path) -> None:
    model = {f"layer.{number}": torch.zeros(1 << 18) for number in range(32)}  # 1 MiB each
    weights = weights_of(saved(tmp_path, model))
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    write_safetensors(weights, tmp_path / "out", shard_bytes=1 << 30, written=nothing)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


@pytest.mark.parametrize("fails", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, fails: BaseException) -> None:
    def export(make: Callable[[Path], object]) -> None:
        with publish_output(tmp_path / "out") as draft:
            make(draft)
            raise fails

    for make in (Path.mkdir, Path.touch):
        with pytest.raises((WorldsizeError, KeyboardInterrupt)):
            export(make)
        assert list(tmp_path.iterdir()) == []


def test_the_output_is_blamed_for_what_cannot_be_written_there_only(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, publish_output(tmp_path / "out"):
        (tmp_path / "tokenizer.json").read_text()
    assert caught.value.filename == str(tmp_path / "tokenizer.json")
    with pytest.raises(OSError, match="no tokenizer"), publish_output(tmp_path / "out"):
        raise OSError("no tokenizer")  # as transformers does
    (tmp_path / "file").touch()
    for fails in (tmp_path / "file" / "out", tmp_path / "other"):
        with pytest.raises(WorldsizeError, match="failed to write"), publish_output(fails) as draft:
            (draft / "absent" / "model").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(WorldsizeError, match="exists"), publish_output(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == "precious"


def test_foreign_files_are_read_as_their_library_reads_them(tmp_path: Path) -> None:
    safetensors.torch.save_file({name: MODEL[name] for name in list(MODEL)[:3]}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({name: MODEL[name] for name in list(MODEL)[3:]}, tmp_path / "b.safetensors")
    torch.save(MODEL, tmp_path / "model.pt")
    torch.save(MODEL, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    run = saved(tmp_path / "run", MODEL)
    for place in (tmp_path, tmp_path / "model.pt", tmp_path / "old.pt", resolve_source(run)):
        weights = open_weights(place)
        assert_same({name: weights.read_tensor(name) for name in weights.entries}, MODEL)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:5],
        lambda data: (1 << 60).to_bytes(8, "little") + data[8:],
        lambda data: data.replace(b'"F32"', b'"F99"'),
        lambda data: data.replace(b"[6,4]", b"[6,5]"),
        lambda data: data.replace(b"[6,4]", b"[-6]"),
        lambda data: b"PK\x03\x04" + data,
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"net.weight": MODEL["net.weight"]}, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match="is damaged or not a safetensors file"):
        read_entries(file)


def described(file: Path, shape: list[int], dtype: str = "F32") -> Path:
    """Write a safetensors file whose header declares this shape and dtype for its one tensor."""
    text = json.dumps({"net.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return file


@pytest.mark.parametrize("shape", [[1] * 65, [(1 << 63) - 1] * 5000, [1 << 32, 1 << 31]])
def test_a_shape_that_no_tensor_has_is_refused_before_it_is_multiplied(tmp_path: Path, shape: list[int]) -> None:
    with pytest.raises(CheckpointError, match=r"has \d+ dimensions, more than the limit of 64|elements .* too large"):
        read_entries(described(tmp_path / "model.safetensors", shape))


@pytest.mark.parametrize("dtype", ["U16", "U32", "U64"])
def test_a_dtype_that_is_not_read_is_named(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(CheckpointError, match=f"dtype {dtype} of net.weight is not supported"):
        read_entries(described(tmp_path / "model.safetensors", [0], dtype))


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no JSON", '{"a": 1}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ".."}}']
)
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(INDEX)):
        open_weights(tmp_path)


def test_a_damaged_state_dict_is_refused_in_our_words(tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "model.pt")
    torch.save(MODEL, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    contents = [(tmp_path / name).read_bytes() for name in ("model.pt", "old.pt")]
    ends = [content[: len(content) * part // 8] for content in contents for part in range(8)]
    for data in (*ends, b"\x80\x02.", b"\x80\x02J\x01", b"\x80\x02(e.", b"PK\x03\x04" + contents[1]):
        (tmp_path / "damaged.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged.pt is damaged or contains more than tensors") as caught:
            open_weights(tmp_path / "damaged.pt")
        assert "weights_only=False" not in str(caught.value)


def test_a_dtype_that_is_not_exported_is_named_whatever_the_format(tmp_path: Path) -> None:
    torch.save({"wave": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="wave: dtype torch.complex128 is not supported for export"):
        write_torch(open_weights(tmp_path / "model.pt"), tmp_path / "out.pt", nothing)


def test_what_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save({"model": MODEL}, tmp_path / "nested.pt")
    torch.save(Path, tmp_path / "code.pt")
    with pytest.raises(CheckpointError, match="does not contain a state_dict of tensors"):
        open_weights(tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match="weights_only"):
        open_weights(tmp_path / "code.pt")
    for name in ("absent", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(WorldsizeError, match="not found|not contain a run, a checkpoint"):
            open_weights(resolve_source(tmp_path / name))
