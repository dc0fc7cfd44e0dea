"""A run goes back before a spike, and has the bits of one that never read its samples."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.faults.test_healing import faults
from tests.support.own_recipe import write_recipe
from tests.support.runs import Command, Run, environment
from worldsize.data.order import Order
from worldsize.healing.rewind import RewindRequest, apply_request, read_request
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunRecord
from worldsize.seeds import derive_seed

pytestmark = pytest.mark.heavy

RECIPE = """
import torch
from torch.utils.data import TensorDataset
from worldsize.core import Recipe


class Mine(Recipe):
    def __init__(self, bad: list = [], value: float = 0.0) -> None:
        self.bad, self.value = bad, value

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)

    def data(self, split):
        draws = torch.Generator().manual_seed(5)
        x = torch.randn(700, 3, generator=draws)
        y = x.sum(1, keepdim=True) + torch.randn(700, 1, generator=draws)
        y[self.bad] = self.value
        return TensorDataset(x, y)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model, batch):
        return {"error": (model(batch[0]).double().sum(), torch.tensor(len(batch[0])))}
"""
BATCH, STEPS = 12, 40
CONF = f"""# @package _global_
steps: {STEPS}
batch_size: {BATCH}
lr: null
recipe: {{_target_: recipes.mine.recipe.Mine, bad: [], value: 0.0}}
"""
COMMON = ("recipe=mine", "log_every=1", "checkpoint.every=4", "checkpoint.keep.last=2", "cluster.threads=1")
ELASTIC = (*COMMON, "reproducibility=elastic", "logical_ranks=4")
DETECTION = ("spike.factor=20", "spike.window=10", "spike.on_spike=rewind")

Project = Callable[..., Run]


def find_sample(step: int) -> int:
    """Return the index of one of the samples of ``step`` in a run that skips nothing."""
    return int(Order(0, BATCH, 1, (0,)).compute_indices(step, 0, 700)[5])


def plant(*steps: int, value: float = 1e4) -> tuple[str, str]:
    """Return the overrides that corrupt a sample in each of these steps."""
    return f"recipe.bad={[*map(find_sample, steps)]}".replace(" ", ""), f"recipe.value={value}"


@pytest.fixture
def project(tmp_path: Path, train: Project) -> Project:
    write_recipe(tmp_path, "mine", RECIPE, mine=CONF)
    return train


def resume(command: Command, run: Run, *words: str) -> Any:
    assert run.folder is not None
    return command("resume", str(run.folder), *words, cwd=run.folder.parents[2], environment=environment())


def digest(run: Run) -> str:
    return str(run.json("result.json")["state_digest"])


def attempts(run: Run) -> list[tuple[str, list[int]]]:
    return [(each["exit_reason"], each["steps"]) for each in run.json("run_manifest.json")["attempts"]]


def rewinds(run: Run) -> list[Any]:
    keys = ("from", "to", "skipped", "cause", "attempt", "folder")
    return [[each[key] for key in keys] for each in run.json("run_manifest.json").get("rewinds", [])]


def train_by_hand(folder: Path, bad: str, value: float, positions: list[int]) -> dict[str, Tensor]:
    """Train with plain PyTorch on the samples at ``positions`` of the run's sequence; return the weights."""
    recipe = runpy.run_path(str(folder / "recipes" / "mine" / "recipe.py"))["Mine"](json.loads(bad), value)
    torch.manual_seed(derive_seed(0, "init"))
    model, (x, y) = recipe.model(), recipe.data("train").tensors
    optimizer, order = recipe.optimizer(model), Order(0, 1, 1, (0,))
    for begin in range(0, len(positions), BATCH):
        rows = torch.cat([order.compute_indices(place + 1, 0, 700) for place in positions[begin : begin + BATCH]])
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def load_weights(run: Run) -> dict[str, Tensor]:
    assert run.folder is not None
    (file,) = (run.folder / "checkpoints" / f"step_{STEPS:07d}").glob("*.safetensors")
    tensors = load_file(file)
    return {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}


def test_skipped_samples_are_those_that_a_plain_loop_leaves_out(project: Project, tmp_path: Path) -> None:
    ranges = [(5, 9), (100, 124), (250, 251)]
    run = project(
        *COMMON, "strategy=single", "cluster.processes=1", f"skip_samples=[{','.join(f'{a}:{b}' for a, b in ranges)}]"
    )
    assert run.code == 0, run.error
    kept = [place for place in range(STEPS * BATCH + 29) if not any(a <= place < b for a, b in ranges)]
    assert len(kept) == STEPS * BATCH
    expected = train_by_hand(tmp_path, "[]", 0.0, kept)
    weights = load_weights(run)
    assert weights.keys() == expected.keys()
    assert all(torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-7) for name, tensor in expected.items())
    assert run.steps()[-1]["epoch"] == (STEPS * BATCH + 29) / 700


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_back_before_a_spike(project: Project, tmp_path: Path, processes: int) -> None:
    bad = plant(22, 31)
    run = project(*ELASTIC, *DETECTION, *bad, f"cluster.processes={processes}")
    assert run.code == 0, run.error
    assert attempts(run)[-1] == ("completed", [28, 40])
    assert [reason for reason, _ in attempts(run)] == ["rewound", "rewound", "completed"]
    (one, two) = rewinds(run)
    assert one == [22, 20, ["240:264"], "spike", 2, "rewound/001"]
    assert two == [29, 28, ["360:372"], "spike", 3, "rewound/002"]  # step 29 reads the samples of the former step 31
    assert "going back from step 22 to step 20 without the samples 240:264" in run.error
    assert run.json("run_manifest.json")["config"]["skip_samples"] == ["240:264", "360:372"]
    fresh = project(*ELASTIC, *bad, "skip_samples=[240:264,360:372]", f"cluster.processes={3 - processes}")
    assert digest(run) == digest(fresh)
    assert run.json("result.json")["metrics_digest"] == fresh.json("result.json")["metrics_digest"]
    positions = [place for place in range(STEPS * BATCH + 36) if not (240 <= place < 264 or 360 <= place < 372)]
    expected = train_by_hand(tmp_path, bad[0].partition("=")[2], 1e4, positions)
    weights = load_weights(run if processes == 1 else fresh)
    assert all(torch.allclose(weights[name], tensor, rtol=1e-4, atol=1e-6) for name, tensor in expected.items())
    assert run.folder is not None
    kept = [json.loads(line) for line in (run.folder / "rewound/001/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept] == [*range(1, 23)]
    assert kept[-1]["loss"] > 1e5
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"], row["name"]) for row in events] == [
        ("spike", 22, "loss"),
        ("spike", 29, "loss"),
    ]


@pytest.fixture
def clean(project: Project) -> Callable[..., str]:
    """Return the digest of a run that skips the samples from the start."""

    def train(skipped: str, *options: str) -> str:
        run = project(*ELASTIC, *options, f"skip_samples=[{skipped}]", "cluster.processes=1")
        assert run.code == 0, run.error
        return digest(run)

    return train


def test_a_rewound_run_is_reproduced_bit_by_bit(project: Project, command: Command, tmp_path: Path) -> None:
    run = project(*ELASTIC, *DETECTION, *plant(22), "cluster.processes=2")
    assert run.code == 0, run.error
    assert rewinds(run)
    done = command("reproduce", str(run.folder), cwd=tmp_path, environment=environment())
    assert done.returncode == 0, done.stderr
    assert "bitwise identical" in done.stdout + done.stderr
    audit = command("audit", str(run.folder), cwd=tmp_path, environment=environment())
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_a_spike_between_logged_steps_is_skipped_with_them(project: Project, clean: Callable[..., str]) -> None:
    logged = ("log_every=2", "checkpoint.every=1", "checkpoint.keep.last=3")
    bad = plant(29)
    run = project(*ELASTIC, *DETECTION, *bad, *logged, "cluster.processes=2")
    assert run.code == 0, run.error
    assert rewinds(run) == [[30, 28, [f"{28 * BATCH}:{30 * BATCH}"], "spike", 2, "rewound/001"]]
    assert (run.folder or Path()).joinpath("rewound/001/checkpoints/step_0000029").is_dir()
    assert digest(run) == clean("336:360", *bad)


def test_a_nonfinite_loss_is_a_spike(project: Project, clean: Callable[..., str]) -> None:
    bad = plant(22, value=float("inf"))
    run = project(*ELASTIC, *DETECTION, *bad, "cluster.processes=2")
    assert run.code == 0, run.error
    assert digest(run) == clean("240:264", *bad)


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_start(project: Project, clean: Any) -> None:
    bad = plant(3, value=float("inf"))
    run = project(*ELASTIC, *DETECTION, *bad, "cluster.processes=2")
    assert run.code == 0, run.error
    assert rewinds(run) == [[3, 0, ["0:36"], "spike", 2, "rewound/001"]]
    assert digest(run) == clean("0:36", *bad)


def test_a_spike_in_the_last_step_is_found_before_its_save(project: Project, clean: Any) -> None:
    bad = plant(40)
    run = project(*ELASTIC, *DETECTION, *bad, "cluster.processes=2")
    assert run.code == 0, run.error
    assert [reason for reason, _ in attempts(run)] == ["rewound", "completed"]
    assert not (run.folder or Path()).joinpath("rewound", "001", "checkpoints", "step_0000040").exists()
    assert digest(run) == clean(f"{36 * BATCH}:{40 * BATCH}", *bad)


def test_restarts_keep_the_history_and_are_counted_apart(project: Project, clean: Any) -> None:
    bad = plant(22)
    kill = faults({"action": "kill", "rank": 1, "step": 19})
    run = project(*ELASTIC, *DETECTION, *bad, "cluster.processes=2", "launcher.max_restarts=1", kill)
    assert run.code == 0, run.error
    assert [reason for reason, _ in attempts(run)] == ["failed", "rewound", "completed"]
    assert rewinds(run) == [[22, 20, ["240:264"], "spike", 3, "rewound/001"]]
    assert digest(run) == clean("240:264", *bad)


def test_a_healing_gang_goes_back_too(project: Project, clean: Any) -> None:
    bad = plant(22)
    kills = faults({"action": "kill", "rank": 1, "step": 19}, {"action": "kill", "rank": 2, "step": 22})
    heal = ("strategy.on_failure=heal", "launcher.max_restarts=0", kills)
    run = project(*ELASTIC, *DETECTION, *bad, "cluster.processes=4", *heal)
    assert run.code == 0, run.error
    ((undone, step, skipped, cause, *_),) = rewinds(run)  # a save in flight may be lost with a process
    assert (undone, skipped, cause) == (22, [f"{step * BATCH}:264"], "spike")
    assert digest(run) == clean(skipped[0], *bad)


def test_a_run_ends_after_its_rewinds_and_resumes_with_more(project: Project, command: Command, clean: Any) -> None:
    bad = plant(22)
    run = project(*ELASTIC, *DETECTION, *bad, "cluster.processes=2", "spike.rewinds=0", "launcher.max_restarts=3")
    assert run.code == 1
    assert len(attempts(run)) == 1
    failure = run.json("run_manifest.json")["attempts"][0]["failure"]
    assert failure["step"] == 22
    assert "has gone back 0 times, the maximum (spike.rewinds=0)" in run.error
    again = resume(command, run)
    assert again.returncode == 2
    assert "resume with spike.rewinds=3" in again.stderr
    assert not rewinds(run)
    assert resume(command, run, "spike.rewinds=1").returncode == 0
    assert rewinds(run) == [[22, 20, ["240:264"], "spike", 2, "rewound/001"]]
    assert digest(run) == clean("240:264", *bad)


def test_a_resumed_run_may_continue_after_the_spike(project: Project, command: Command) -> None:
    bad = plant(22, value=100.0)
    run = project(*ELASTIC, *DETECTION, *bad, "cluster.processes=2", "spike.rewinds=0")
    assert run.code == 1, run.error
    done = resume(command, run, "spike.on_spike=warn")
    assert done.returncode == 0, done.stderr
    assert "step 22: the loss is" in done.stdout + done.stderr
    assert not rewinds(run)
    plain = project(*ELASTIC, *bad, "cluster.processes=1")
    assert digest(run) == digest(plain)


def test_a_user_goes_back_by_hand(project: Project, command: Command, clean: Any) -> None:
    run = project(*ELASTIC, "cluster.processes=2", "checkpoint.keep.last=20")
    assert run.code == 0, run.error
    for words, fact in {
        ("--from", "7"): "no checkpoint of this step",
        ("--from", "24", "--skip-samples", "287:300"): "at positions below 288. Skip samples from position 288 on",
        ("--from", "24", "--skip-samples", "300"): "--skip-samples='300' must have the form FIRST:END",
        ("steps=50", "--skip-samples", "479:500"): "the checkpoint of step 40 has already trained",
        ("--from", "24", "skip_samples=[0:5]"): "already trained",
    }.items():
        done = resume(command, run, *words)
        assert (done.returncode, fact in done.stderr) == (2, True), done.stderr
    folder = run.folder or Path()
    assert not (folder / "rewound").exists()
    done = resume(command, run, "--from", "24", "--skip-samples", "288:300", "--skip-samples", "310:311")
    assert done.returncode == 0, done.stderr
    assert "going back from step 40 to step 24 without the samples 288:300, 310:311" in done.stderr
    saved = sorted(int(path.name[5:]) for path in folder.glob("rewound/001/checkpoints/*"))
    assert saved == [28, 32, 36, 40]
    assert rewinds(run) == [[40, 24, ["288:300", "310:311"], "by hand", 2, "rewound/001"]]
    assert digest(run) == clean("288:300,310:311")
    assert run.json("run_manifest.json")["reproducibility"]["level"] == "bitwise"
    assert resume(command, run, "--from", "0").returncode == 0
    assert (rewinds(run)[1][:3], digest(run)) == ([40, 0, []], clean("288:300,310:311"))
    assert run.json("run_manifest.json")["config"]["skip_samples"] == ["288:300", "310:311"]


def test_a_warning_changes_no_bits(project: Project) -> None:
    bad = plant(22, value=100.0)
    run = project(*ELASTIC, *bad, "spike.factor=5", "cluster.processes=2", "spike.window=10")
    plain = project(*ELASTIC, *bad, "cluster.processes=1")
    assert digest(run) == digest(plain)
    assert "warning: step 22: the loss is" in run.output + run.error
    assert attempts(run) == [("completed", [0, 40])]


def test_a_run_asked_to_stop_at_a_spike_goes_back_when_resumed(project: Project, command: Command, clean: Any) -> None:
    bad = plant(22)
    ask = faults({"action": "terminate", "rank": 0, "step": 22})
    run = project(*ELASTIC, *DETECTION, *bad, ask, "cluster.processes=2")
    assert (run.code, attempts(run)) == (75, [("rewound", [0, 23])])
    folder = run.folder or Path()
    request = (folder / "rewind.json").read_bytes()
    (folder / "rewind.json").write_text('{"step": 1, "since": 5}')
    done = resume(command, run)
    assert (done.returncode, "is not a valid request" in done.stderr) == (2, True)
    (folder / "rewind.json").write_bytes(request)
    assert resume(command, run).returncode == 0
    assert rewinds(run) == [[22, 20, ["240:264"], "spike", 2, "rewound/001"]]
    assert not (folder / "rewind.json").exists()
    assert digest(run) == clean("240:264", *bad)
    assert len(attempts(run)) == 2


def test_a_request_is_applied_once(tmp_path: Path) -> None:
    run, row = RunDirectory(tmp_path / "run"), {"cause": "spike", "attempt": 2}
    run.path.mkdir()
    RewindRequest(22, 21, "step 22", stops=False).write(run)
    manifest = {"attempts": [{}], "rewinds": [row]}
    record = cast("RunRecord", SimpleNamespace(directory=run, manifest=manifest))
    apply_request(record)  # the launching process died after it had written the manifest
    assert read_request(run) is None
    apply_request(record)


def test_torchrun_continues_from_where_the_run_went_back(
    project: Project, tmp_path: Path, warm_python: Path, clean: Any
) -> None:
    bad = plant(22)
    written = project(*ELASTIC, *DETECTION, *bad, "+cluster=torchrun", "cluster.processes=2")
    assert written.code == 0, written.error
    (printed,) = re.findall(r"# on node \d\n(.+)", written.output)
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    started = [
        subprocess.run(
            ["bash", "-c", printed],
            cwd=tmp_path,
            env=environment(PATH=path, PYTHON_EXEC=str(warm_python)),
            capture_output=True,
            text=True,
            timeout=240,
        )
        for _ in range(2)
    ]
    assert started[0].returncode != 0
    assert "going back from step 22 to step 20 without the samples 240:264" in started[0].stderr
    assert started[1].returncode == 0, started[1].stderr
    assert [reason for reason, _ in attempts(written)] == ["rewound", "completed"]
    assert digest(written) == clean("240:264", *bad)
