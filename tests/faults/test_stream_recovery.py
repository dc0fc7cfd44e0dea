"""Runs on foreign iterables are killed and resumed with other numbers of processes, without losing a sample.

The weights count how often each sample was seen: a step adds one to the weight of each of its samples.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.own_recipe import write_recipe
from worldsize.checkpoint.format import STREAMS, Retention, read_checkpoint
from worldsize.checkpoint.load import read_tensors
from worldsize.checkpoint.manifest_tree import join_tensors
from worldsize.checkpoint.save import Saver
from worldsize.core import World

pytestmark = pytest.mark.heavy

RECIPE = """
import torch
from torch import nn
from torch.utils.data import IterableDataset

from worldsize.core import Recipe
from worldsize.testing.recipes import Chain

SAMPLES, BATCH = 96, 24


class Plain(IterableDataset):
    def __iter__(self):
        yield from range(SAMPLES)


def table(shards):
    import datasets

    rows = datasets.Dataset.from_dict({"row": list(range(SAMPLES)), "text": ["x" * 50] * SAMPLES})
    return rows.to_iterable_dataset(num_shards=shards)


def loader(**options):
    import warnings

    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings(action="ignore"):
        return StatefulDataLoader(range(SAMPLES), batch_size=None, shuffle=True, **options)


STREAMS = {
    "datasets": lambda: table(24),
    "torchdata_workers": lambda: loader(num_workers=2, snapshot_every_n_steps=5),
    "plain": Plain,
}


class Rows:
    def __init__(self, samples):
        self.samples, self.done = samples, 0

    num_shards = 8

    def shard(self, num_shards, index):
        return Rows(self.samples[index::num_shards])

    def __iter__(self):
        while self.done < len(self.samples):
            self.done += 1
            yield self.samples[self.done - 1]

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Layered(Chain):
    def data(self, split):
        samples = super().data(split)
        return Rows([samples[index] for index in range(96)]) if split == "train" else samples


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, rows):
        return self.seen[rows]


class Counting(Recipe):
    def __init__(self, stream):
        self.stream = stream

    def data(self, split):
        return STREAMS[self.stream]() if split == "train" else list(range(4))

    def collate(self, samples):
        return torch.tensor([each["row"] if isinstance(each, dict) else each for each in samples])

    def model(self):
        return Counts()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=float(BATCH))

    def loss(self, model, batch):
        return -model(batch).mean()

    def evaluate(self, model, batch):
        return {"seen": (model(torch.as_tensor(batch)).sum(), torch.tensor(len(batch)))}
"""
YAML = """
# @package _global_
steps: 10
batch_size: 24
recipe: {_target_: recipes.counting.recipe.Counting, stream: datasets}
"""
OPTIONS = ("recipe=counting", "reproducibility=elastic", "logical_ranks=12", "log_every=1", "checkpoint.every=2")
ALL = (*OPTIONS, "cluster.threads=1", "checkpoint.keep.last=9")
LAYERED = """
# @package _global_
steps: 6
batch_size: 24
recipe: {_target_: recipes.counting.recipe.Layered}
"""
Resume = Callable[..., Any]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counting")
    write_recipe(folder, "counting", RECIPE, counting=YAML, layered=LAYERED)
    return folder


@pytest.fixture
def train(project: Path, train_in: Any) -> Any:
    return train_in(project)


@pytest.fixture
def resume(project: Path, command: Any, environment_without_wandb: dict[str, str]) -> Resume:
    def run(folder: Path, *words: str) -> Any:
        return command("resume", str(folder), *words, cwd=project, environment=environment_without_wandb)

    return run


def killed(step: int, rank: int, attempt: int, point: str = "") -> str:
    where = f', point: "{point}"' if point else ""
    return f"faults=[{{action: kill, step: {step}, rank: {rank}, attempt: {attempt}{where}}}]"


def digests(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    return {key: result[key] for key in ("state_digest", "metrics_digest", "samples")}


def counts(folder: Path, step: int) -> list[float]:
    """Return how often each sample was seen."""
    checkpoint = read_checkpoint(folder / "checkpoints" / f"step_{step:07d}")
    return [round(float(value), 3) for value in read_tensors(checkpoint, "model")["seen"]]


def said(folder: Path, line: str) -> int:
    """Count a line in the logs of a run's processes, over all attempts."""
    return sum(log.read_text().count(line) for log in (folder / "logs").rglob("*.log"))


def sizes(folder: Path, step: int) -> dict[str, int]:
    """Return the bytes of each state in a checkpoint."""
    checkpoint = read_checkpoint(folder / "checkpoints" / f"step_{step:07d}")
    return {name: len(state) for name, state in read_tensors(checkpoint, STREAMS).items()}


@pytest.mark.parametrize("stream", ["datasets", "torchdata_workers"])
def test_every_sample_is_seen_once_an_epoch_over_kills_and_other_numbers_of_processes(
    train: Any, resume: Resume, stream: str
) -> None:
    """P = 1, 4, 2, 3: the second begins in the middle of an epoch, the third at its end, the last in the next one."""
    options = (*ALL, f"recipe.stream={stream}")
    undisturbed = train(*options, "cluster.processes=3")
    assert undisturbed.code == 0, undisturbed.error
    run = train(*options, "cluster.processes=1", "strategy=single", killed(4, 0, 1, "checkpoint:begin"))
    assert run.code == 1
    for words in (
        ("cluster.processes=4", "strategy=ddp", killed(6, 3, 2, "checkpoint:begin")),
        ("cluster.processes=2", killed(8, 1, 3, "checkpoint:after-shard")),
    ):
        assert resume(run.folder, *words).returncode == 1
    done = resume(run.folder, "cluster.processes=3", "faults=[]")
    assert done.returncode == 0, done.stderr
    attempts = run.json("run_manifest.json")["attempts"]
    assert [attempt["world_size"] for attempt in attempts] == [1, 4, 2, 3]
    assert digests(run.folder) == digests(undisturbed.folder)
    for epoch in (1, 2):
        assert counts(run.folder, 4 * epoch) == [float(epoch)] * 96
    names = {str(rank) for rank in range(12)} if stream == "datasets" else {"whole"}
    assert sizes(run.folder, 10).keys() == names
    assert said(run.folder, "every process reads the whole training stream") == (0 if stream == "datasets" else 3)


def test_a_process_that_reads_ahead_saves_the_states_of_the_steps_taken(train: Any, resume: Resume) -> None:
    """By the time the run is terminated or killed, it has also read the steps after the last saved one."""
    options = (*ALL, "recipe.stream=datasets", "data_workers=1")
    asked = "faults=[{action: terminate, step: 3, rank: 0}, {action: sleep, seconds: 0.3, attempt: null}]"
    run = train(*options, "cluster.processes=2", asked)
    assert run.code == 75, run.error
    assert resume(run.folder, "cluster.processes=3", killed(7, 2, 2)).returncode == 1
    done = resume(run.folder, "cluster.processes=1", "data_workers=0", "--ignore", "data_workers", "faults=[]")
    assert done.returncode == 0, done.stderr
    assert [counts(run.folder, step) for step in (4, 8)] == [[1.0] * 96, [2.0] * 96]


def test_of_ranks_that_read_the_same_the_first_writes_their_states(train: Any, resume: Resume) -> None:
    """Two stages of a pipeline read the same samples, twice over."""
    shape = ("strategy=mesh", "strategy.pipeline=2", "cluster.processes=4", "logical_ranks=8")
    options = ("recipe=layered", *shape, "cluster.threads=1", "checkpoint.every=2", "log_every=1")
    undisturbed = train(*options)
    assert undisturbed.code == 0, undisturbed.error
    run = train(*options, killed(6, 3, 1, "checkpoint:begin"))
    assert run.code == 1
    done = resume(run.folder, "faults=[]")
    assert done.returncode == 0, done.stderr
    assert digests(run.folder) == digests(undisturbed.folder)
    tensors = read_checkpoint(run.folder / "checkpoints" / "step_0000006").tensors
    states = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{STREAMS}/")}
    assert states.keys() == {f"{STREAMS}/{rank}" for rank in range(8)}
    writers = {chunk["file"] for tensor in states.values() for chunk in tensor["chunks"]}
    assert len(writers) == 2


@pytest.fixture(scope="module")
def of_two(train_in: Any, project: Path) -> Path:
    """A run of six steps by two processes; each of its twelve logical ranks reads a part."""
    run = train_in(project)(*ALL, "recipe.stream=datasets", "cluster.processes=2", "steps=6")
    assert run.code == 0, run.error
    assert isinstance(run.folder, Path)
    return run.folder


@pytest.fixture
def complete(of_two: Path, project: Path) -> Iterator[Path]:
    """A copy of that run."""
    folder = of_two.with_name(f"{of_two.name}_copy")
    shutil.copytree(of_two, folder)
    yield folder
    shutil.rmtree(folder)


def test_other_logical_ranks_are_refused_until_the_states_are_left_out(complete: Path, resume: Resume) -> None:
    words = ("steps=8", "logical_ranks=6", "--ignore", "logical_ranks")
    refused = resume(complete, *words)
    assert refused.returncode == 2
    assert "has the states of 12 reader(s) of the training stream, but the run has 6 readers" in refused.stderr
    done = resume(complete, *words, "--ignore", "streams")
    assert done.returncode == 0, done.stderr
    assert said(complete, "re-reading the training stream: 144 samples up to step 6") == 1


def test_a_checkpoint_without_states_resumes_by_reading_again(complete: Path, resume: Resume) -> None:
    """It was saved before checkpoints had states."""
    folder = complete / "checkpoints" / "step_0000006"
    shutil.rmtree(folder)
    assert STREAMS in read_checkpoint(complete / "checkpoints" / "step_0000004").values
    without_states(complete / "checkpoints" / "step_0000004")
    done = resume(complete, "steps=8", "cluster.processes=3")
    assert done.returncode == 0, done.stderr
    assert said(complete, "re-reading the training stream: 96 samples up to step 4") == 1
    assert counts(complete, 8) == [2.0] * 96


def without_states(folder: Path) -> None:
    """Rewrite a checkpoint as if the stream had no state."""
    checkpoint = read_checkpoint(folder)
    model = {name: tensor for name, tensor in read_tensors(checkpoint, "model").items()}
    values = {part: child for part, child in checkpoint.values.items() if part != STREAMS}
    state = join_tensors(values, {f"model/{name}": tensor for name, tensor in model.items()})
    root = folder.with_name("again")
    saver = Saver(root, World("worker", 0, 1, 0, 1, 0, 0, torch.device("cpu")), None, keep=Retention())
    saver.save(state, step=checkpoint.step, facts=checkpoint.facts)
    saver.finish()
    saver.close()
    shutil.rmtree(folder)
    (root / folder.name).rename(folder)
    root.rmdir()


def test_commands_that_read_checkpoints_have_no_use_for_the_states(
    complete: Path, command: Any, environment_without_wandb: dict[str, str], project: Path
) -> None:
    def run(*words: str) -> str:
        done = command(*words, cwd=project, environment=environment_without_wandb)
        assert done.returncode == 0, done.stderr
        assert isinstance(done.stdout, str)
        return done.stdout

    exported = run("export", str(complete)).strip()
    assert [entry for entry in safetensors.torch.load_file(Path(exported) / "model.safetensors")] == ["seen"]
    run("evaluate", str(complete))
    run("train", f"init_from={complete}", *ALL, "logger=none", "steps=1", "cluster.processes=1")


def test_what_has_no_state_is_accepted_with_one_warning(train: Any, resume: Resume) -> None:
    run = train(*ALL, "recipe.stream=plain", "cluster.processes=2", "steps=8", killed(6, 1, 1, "checkpoint:begin"))
    assert run.code == 1
    assert said(run.folder, "does not define state_dict and load_state_dict") == 1
    done = resume(run.folder, "cluster.processes=3", "faults=[]")
    assert done.returncode == 0, done.stderr
    assert said(run.folder, "re-reading the training stream: 96 samples up to step 4") == 1
    assert counts(run.folder, 8) == [2.0] * 96
    assert (
        STREAMS not in json.loads((run.folder / "checkpoints" / "step_0000008" / "manifest.json").read_text())["values"]
    )


def test_a_strategy_that_draws_by_index_refuses_a_stream_with_a_remedy(train: Any) -> None:
    run = train(*OPTIONS[:1], "strategy=parameter_server", "cluster.processes=2", "cluster.threads=1")
    assert run.code != 0
    assert (
        "requires a map-style dataset; the recipe's training data are a stream. Return a map-style dataset" in run.error
    )
