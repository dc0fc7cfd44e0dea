"""``worldsize export RUN [checkpoint=best|last|STEP] [output=PATH]``: export weights."""

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

from worldsize.cli import RUN, run_and_overrides
from worldsize.errors import ConfigError, WorldsizeError, neighbours
from worldsize.messages import report_error
from worldsize.record.run_record import RunView, read_run

if TYPE_CHECKING:
    from worldsize.checkpoint.export import Written

_OWN = ("checkpoint", "output")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_LARGE = 256 << 20  # minimum bytes for a progress bar


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize export", description=__doc__)
    parser.add_argument(
        "--format",
        choices=("safetensors", "hf", "torch"),
        default="safetensors",
        help="safetensors: files with the tensors; hf: a folder for transformers' from_pretrained; torch: a "
        "state_dict file",
    )
    help = (
        f"{RUN}; checkpoint=best, last (default) or a step; output=PATH (default: export_STEP_FORMAT in the run folder)"
    )
    parser.add_argument("words", nargs="*", metavar="RUN | NAME=VALUE", help=help)
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="data type of the weights (default: as saved)"
    )
    parser.add_argument(
        "--shard-size", type=parse_size, default="5GB", metavar="SIZE", help="maximum file size, e.g. 500MB"
    )
    parser.add_argument("--ema", action="store_true", help="export the averaged weights (ema.decay)")
    options = parser.parse_intermixed_args()
    try:
        run, words = run_and_overrides(options.words)
        output = export(read_run(run), _parse_choices(words), options)
    except WorldsizeError as error:
        sys.exit(report_error(error))
    print(output)


def parse_size(text: str) -> int:
    """Parse a number of bytes, such as 5GB or 500MiB."""
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size. Write e.g. 500MB or 5GB.")
    return int(match[1]) * _UNITS.get(match[2], 1)


def _parse_choices(words: Sequence[str]) -> dict[str, str]:
    """Parse this command's own arguments, such as output=PATH, into a mapping."""
    choices = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _OWN or not value:
            raise ConfigError(f"{word!r} is not an option of export{neighbours(name, _OWN)} Write NAME=VALUE.")
        choices[name] = value
    return choices


def export(run: RunView, choices: Mapping[str, str], options: argparse.Namespace) -> Path:
    """Write the weights of the checkpoint in ``choices``; return the output path.

    Raises:
        WorldsizeError: the checkpoint does not exist, is damaged, or cannot be written in this format.
    """
    import torch

    from worldsize.checkpoint.export import SelectedWeights, publish_output, write_safetensors, write_torch
    from worldsize.checkpoint.format import read_checkpoint, verify_checkpoint
    from worldsize.checkpoint.weights import model_weights
    from worldsize.launch.evaluate import choose_checkpoint
    from worldsize.launch.transformers_model import transformers_model

    checkpoint = read_checkpoint(choose_checkpoint(run, choices.get("checkpoint", "last")))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    source = model_weights(checkpoint, averaged=options.ema)
    transformers = transformers_model(run, source) if options.format == "hf" else None
    without = transformers.list_tied_names() if transformers else ()
    weights = SelectedWeights(source, dtype=dtypes[options.dtype], without=without)
    name = f"export_{checkpoint.step:07d}_{options.format}"
    default = run.directory.path / (f"{name}.pt" if options.format == "torch" else name)
    output = Path(choices.get("output", default)).absolute()
    with publish_output(output) as draft, _progress(sum(entry.nbytes for entry in weights.entries.values())) as written:
        verify_checkpoint(checkpoint)
        if options.format == "torch":
            write_torch(weights, draft, written)
        else:
            draft.mkdir()
            write_safetensors(weights, draft, shard_bytes=options.shard_size, written=written)
            if transformers:
                transformers.save(draft, weights)
    return output


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
