"""``worldsize export RUN [checkpoint=best|last|STEP] [output=PATH]``: a checkpoint's weights for other programs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from worldsize.errors import ConfigError, WorldsizeError, neighbours
from worldsize.messages import refuse
from worldsize.record.run_record import RunView, view

if TYPE_CHECKING:
    from worldsize.checkpoint.export import Written
    from worldsize.checkpoint.format import Checkpoint
    from worldsize.checkpoint.weights import Weights

_OWN = ("checkpoint", "output")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_LARGE = 256 << 20  # bytes; larger exports show a progress bar


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or its run_manifest.json")
    parser.add_argument(
        "--format",
        choices=("safetensors", "hf", "torch"),
        default="safetensors",
        help="safetensors: files with the tensors; hf: a folder that transformers' from_pretrained loads; torch: a "
        "state_dict file",
    )
    help = "checkpoint=best, last (default) or a step; output=PATH (default: export_STEP_FORMAT in the run folder)"
    parser.add_argument("words", nargs="*", help=help)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the numbers; default: as saved")
    parser.add_argument("--shard-size", type=size, default="5GB", metavar="SIZE", help="largest file, e.g. 500MB")
    parser.add_argument("--ema", action="store_true", help="the averaged weights (ema.decay) instead of the last ones")
    options = parser.parse_intermixed_args()
    try:
        output = export(view(options.run), _choices(options.words), options)
    except WorldsizeError as error:
        sys.exit(refuse(error))
    print(output)


def size(text: str) -> int:
    """Read a number of bytes, such as 5GB or 500MiB."""
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size. Write e.g. 500MB or 5GB.")
    return int(match[1]) * _UNITS.get(match[2], 1)


def _choices(words: Sequence[str]) -> dict[str, str]:
    """Parse this command's own words, such as output=PATH, to their values by name."""
    choices = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _OWN or not value:
            raise ConfigError(f"{word!r} is not an option of export{neighbours(name, _OWN)} Write NAME=VALUE.")
        choices[name] = value
    return choices


def export(run: RunView, choices: Mapping[str, str], options: argparse.Namespace) -> Path:
    """Write the weights of the checkpoint that ``choices`` names; return the path of the output.

    Raises:
        WorldsizeError: there is no such checkpoint, it is damaged, or it cannot be written in this format.
    """
    import torch

    from worldsize.checkpoint.export import SelectedWeights, published, write_safetensors, write_torch
    from worldsize.checkpoint.format import read, verify
    from worldsize.launch.evaluate import chosen_checkpoint
    from worldsize.launch.transformers_model import transformers_model

    checkpoint = read(chosen_checkpoint(run, choices.get("checkpoint", "last")))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    source = _weights(checkpoint, averaged=options.ema)
    transformers = transformers_model(run, source) if options.format == "hf" else None
    without = transformers.without() if transformers else ()
    weights = SelectedWeights(source, dtype=dtypes[options.dtype], without=without)
    name = f"export_{checkpoint.step:07d}_{options.format}"
    default = run.directory.path / (f"{name}.pt" if options.format == "torch" else name)
    output = Path(choices.get("output", default)).absolute()
    with published(output) as draft, _progress(sum(entry.nbytes for entry in weights.entries.values())) as written:
        verify(checkpoint)
        if options.format == "torch":
            write_torch(weights, draft, written)
        else:
            draft.mkdir()
            write_safetensors(weights, draft, shard_bytes=options.shard_size, written=written)
            if transformers:
                transformers.save(draft, weights)
    return output


def _weights(checkpoint: Checkpoint, *, averaged: bool) -> Weights:
    from worldsize.checkpoint.weights import CheckpointWeights

    if averaged and not any(name.startswith("ema/weights/") for name in checkpoint.tensors):
        raise WorldsizeError("the checkpoint has no averaged weights: the run was trained without ema.decay.")
    tables = {name.split("/")[1] for name in checkpoint.tensors if name.startswith("tables/")}
    weights = CheckpointWeights(checkpoint, averaged=averaged)
    if rows_only := sorted(tables - weights.entries.keys()):
        raise WorldsizeError(
            f"the table {rows_only[0]} is larger than 1 GiB, so only its touched rows were saved. "
            "Read them from the checkpoint: read_tensors(checkpoint, 'tables')."
        )
    return weights


@contextmanager
def _progress(total: int) -> Iterator[Written]:
    """Show a progress bar on standard error if the export is large; yield the function that advances it."""
    if total < _LARGE:
        yield lambda count: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)
