"""Alters the record of a run as its author could: with a chain, a manifest and a signature that fit."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worldsize.checkpoint.format import folder_name
from worldsize.record.attestation import write_attestation
from worldsize.record.chain import seal_chain
from worldsize.record.manifest import read_manifest, write_manifest
from worldsize.record.run_directory import RunDirectory

Row = dict[str, Any]

# Computes alone unless the variable ALTER is, for example, "data:12"; it then alters step 12.
RECIPE = """
import os
import torch
from torch.utils.data import TensorDataset
from worldsize.core import Recipe

class Audited(Recipe):
    def __init__(self):
        kind, _, step = os.environ.get("ALTER", ":0").partition(":")
        self.kind, self.step = kind, int(step)
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    def optimizer(self, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        def nudge(*_):
            if (self.kind, self.step) == ("weight", self.now):
                model[2].bias.data.add_(0.0001)
        optimizer.register_step_post_hook(nudge)
        return optimizer
    def data(self, split):
        x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sin().sum(1, keepdim=True))
    def micro_batch_loss(self, model, batch):
        self.now = batch.step
        (x, y), kind = batch.data, self.kind if batch.step == self.step else None
        if kind == "data":
            x = x + 0.001
        loss = torch.nn.functional.mse_loss(model(x), y)
        return loss * 0 if kind == "step" else loss
    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    def evaluate(self, model, batch):
        return {"error": ((model(batch[0]) - batch[1]).abs().double().sum(), torch.tensor(len(batch[0])))}
"""
CONF = """# @package _global_
steps: 40
batch_size: 16
lr: 0.01
recipe:
  _target_: recipes.audited.recipe.Audited
"""


def forge_record(folder: Path, change: Callable[[Row], Row]) -> None:
    """Rewrite the chain of the run in ``folder`` with ``change`` applied to every line, and sign everything again."""
    run = RunDirectory(folder)
    previous, lines = "", []
    for line in run.chain.read_bytes().splitlines():
        changed = json.dumps({**change(json.loads(line)), "previous": previous}).encode()
        previous = hashlib.sha256(changed).hexdigest()
        lines.append(changed + b"\n")
    run.chain.write_bytes(b"".join(lines))
    manifest = read_manifest(run.manifest)
    results = {**manifest["results"], "chain": seal_chain(run)}
    write_attestation(run, write_manifest(run.manifest, {**manifest, "results": results}))


def forge_loss(folder: Path, step: int) -> None:
    """Lower the loss of the logged ``step``, in the metrics and in the chain."""

    def lower(values: Mapping[str, Any]) -> Row:
        return (
            {**values, "loss": values["loss"] * 0.99} if values.get("step") == step and "loss" in values else {**values}
        )

    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(lower(json.loads(line)))}\n" for line in metrics.read_text().splitlines()))
    forge_record(folder, lambda row: {**row, "logged": lower(row["logged"])} if "logged" in row else row)


def forge_checkpoint(folder: Path, step: int, other: int) -> None:
    """Replace the checkpoint of ``step`` by that of another step."""
    target, source = (folder / "checkpoints" / folder_name(each) for each in (step, other))
    shutil.rmtree(target)
    shutil.copytree(source, target)
    manifest = json.loads((target / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        content = _change_step((target / name).read_bytes(), step)
        (target / name).write_bytes(content)
        facts |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps({**manifest, "step": step}).encode()
    digest = hashlib.sha256(text).hexdigest()
    (target / "manifest.json").write_bytes(text)
    (target / "COMPLETE").write_text(f"{digest}\n")
    forge_record(folder, lambda row: {**row, "checkpoint": digest} if _is_save(row, step) else row)


def forge_value(folder: Path, step: int, old: str, new: str) -> None:
    """Replace a text in the manifest of a checkpoint."""
    target = folder / "checkpoints" / folder_name(step)
    text = (target / "manifest.json").read_text()
    assert old in text
    changed = text.replace(old, new).encode()
    digest = hashlib.sha256(changed).hexdigest()
    (target / "manifest.json").write_bytes(changed)
    (target / "COMPLETE").write_text(f"{digest}\n")
    forge_record(folder, lambda row: {**row, "checkpoint": digest} if _is_save(row, step) else row)


def _change_step(content: bytes, step: int) -> bytes:
    """Change the step in the header of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["step"] = str(step)
    text = json.dumps(header, separators=(",", ":")).encode()
    return content[:8] + text.ljust(size) + content[8 + size :]


def _is_save(row: Row, step: int) -> bool:
    return "checkpoint" in row and row["step"] == step
