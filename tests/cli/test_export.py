"""``worldsize export`` writes files that other libraries load, without running code from an untrusted run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from omegaconf import OmegaConf

from tests.support.runs import Command, Run, environment
from worldsize.cli import export
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.record.run_record import RunView, read_run

pytestmark = pytest.mark.heavy

Captured = pytest.CaptureFixture[str]
TRAINED = ("steps=2", "checkpoint.every=1", "checkpoint.keep.best=loss", "checkpoint.keep.direction=min", "log_every=1")
SMALL = ("recipe.config.hidden_size=32", "recipe.config.intermediate_size=32", "recipe.config.num_hidden_layers=1")


@pytest.fixture
def trained(reference_run: Callable[..., Run]) -> Path:
    """The folder of a run with a checkpoint of each of its two steps."""
    folder = reference_run(*TRAINED, "evaluate_every=1").folder
    assert folder is not None
    return folder


def exported(run: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["worldsize export", str(run), *words])
    try:
        export.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_last_checkpoint_is_the_result_of_the_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    digest = json.loads((trained / "result.json").read_text())["state_digest"]
    for format in ("safetensors", "torch"):
        output = tmp_path / format
        assert exported(trained, "--format", format, f"output={output}", monkeypatch=monkeypatch) == 0
        assert capsys.readouterr().out == f"{output}\n"
    state = safetensors.torch.load_file(tmp_path / "safetensors" / "model.safetensors")
    for tensors in (state, torch.load(tmp_path / "torch", weights_only=True)):
        assert state_digest(tensor_digests(tensors)) == digest
    assert exported(trained, "checkpoint=1", f"output={tmp_path / 'first'}", monkeypatch=monkeypatch) == 0
    first = safetensors.torch.load_file(tmp_path / "first" / "model.safetensors")
    assert state_digest(tensor_digests(first)) != digest
    assert exported(trained, "checkpoint=best", f"output={tmp_path / 'best'}", monkeypatch=monkeypatch) == 0


def test_what_cannot_be_exported_is_refused_in_a_sentence(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    refusals = {
        ("checkpoint=7",): "checkpoint=7 not found",
        ("--ema",): "trained without ema.decay",
        ("--format", "hf"): "--format hf requires a transformers model",
    }
    for words, why in refusals.items():
        assert exported(trained, *words, f"output={tmp_path / 'out'}", monkeypatch=monkeypatch) == 2
        assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_code_of_a_strangers_run_is_not_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(RunView, "is_own", property(lambda _: False))
    assert not read_run(trained).is_own
    assert exported(trained, f"output={tmp_path / 'out'}", monkeypatch=monkeypatch) == 0
    assert exported(trained, "--format", "hf", f"output={tmp_path / 'hf'}", monkeypatch=monkeypatch) == 2
    assert "this record was not written by you" in capsys.readouterr().err


def test_code_that_only_an_unsigned_file_names_is_not_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    folder, marker = tmp_path / "run", tmp_path / "was_run"
    shutil.copytree(trained, folder)
    (tmp_path / "planted.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = OmegaConf.load(folder / "config.yaml")
    config.recipe = {"_target_": "planted.Recipe"}
    config.run.import_path, config.allow_targets = [str(tmp_path)], ["planted"]
    OmegaConf.save(config, folder / "config.yaml")
    assert read_run(folder).is_own
    assert exported(folder, "--format", "hf", f"output={tmp_path / 'hf'}", monkeypatch=monkeypatch) == 2
    assert "--format hf requires a transformers model" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("tied", ["true", "false"])
def test_transformers_loads_what_is_exported(
    tied: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    words = ("recipe=hf_causal_lm", "recipe.text=text.txt", "recipe.context=16", "steps=1", "cluster.processes=1")
    options = (*SMALL, f"recipe.config.tie_word_embeddings={tied}", "logger=none", "run.name=a", "clip_norm=null")
    done = command("train", *words, *options, cwd=tmp_path, environment=environment())
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "hf_causal_lm" / "a"
    monkeypatch.chdir(tmp_path)
    assert exported(run, "--format", "hf", "--shard-size", "20KB", "output=hf", monkeypatch=monkeypatch) == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained("hf")
    digests = json.loads((run / "result.json").read_text())["tensors"]
    assert tensor_digests(model.state_dict()) == digests
    assert exported(run, "--format", "hf", "--dtype", "bf16", "output=half", monkeypatch=monkeypatch) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained("half").dtype == torch.bfloat16
