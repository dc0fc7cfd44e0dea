"""``worldsize prepare INPUT ... --output FOLDER``: tokenize text once, into shards that runs read."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from worldsize.data.preparation import Preparation
from worldsize.data.texts import BYTES, TextFormat, Tokenizer
from worldsize.data.token_shards import MANIFEST
from worldsize.errors import WorldsizeError
from worldsize.messages import printable, report_error


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize prepare", description=__doc__)
    help = "text files, JSON lines (.jsonl), Parquet files (.parquet), or folders of these"
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help=help)
    help = "a new folder, or the folder of an interrupted run to continue"
    parser.add_argument("--output", "-o", type=Path, required=True, metavar="FOLDER", help=help)
    help = "bytes (default), a tokenizer.json, a folder of a transformers tokenizer, or its name on the hub"
    parser.add_argument("--tokenizer", default=BYTES, help=help)
    parser.add_argument("--end", metavar="TOKEN", help="token to append to each document, e.g. '<|endoftext|>'")
    parser.add_argument("--field", default="text", help="field of a JSON line, or column of a Parquet file (text)")
    help = "what to treat as one document of a text file: the whole file (default), or each line"
    parser.add_argument("--documents", choices=("file", "line"), default="file", help=help)
    parser.add_argument(
        "--processes",
        type=_parse_count,
        default=len(os.sched_getaffinity(0)),
        help="number of processes (default: all cores)",
    )
    parser.add_argument("--shard-mib", type=_parse_count, default=64, help="MiB of text per shard (64)")
    help = "if a document is unreadable: stop (default), or skip and count it"
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help=help)
    options = parser.parse_args()
    preparation = Preparation(
        inputs=options.inputs,
        tokenizer=Tokenizer(options.tokenizer, options.end),
        form=TextFormat(options.field, options.documents),
        shard_bytes=options.shard_mib << 20,
        on_error=options.on_error,
    )
    try:
        prepare(preparation, options.output, options.processes)
    except WorldsizeError as error:
        sys.exit(report_error(error))
    except KeyboardInterrupt:
        sys.exit("interrupted. Run the same command again to continue.")


def prepare(preparation: Preparation, folder: Path, processes: int) -> None:
    """Write the shards with a progress bar, and print a summary."""
    bar = Progress("tokenising", BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    task = bar.add_task("", total=None)

    def show_progress(done: int, total: int) -> None:
        bar.start()  # only after the forks, since the bar has a thread
        bar.update(task, completed=done, total=total)

    try:
        manifest = preparation.write_shards(folder, processes=processes, progress=show_progress)
    finally:
        if bar.live.is_started:  # otherwise stop() would print an empty line
            bar.stop()
    for text in manifest["bad"]:
        print(f"skipped: {printable(text)}", file=sys.stderr)
    counts = f"{manifest['tokens']:,} tokens ({manifest['dtype']}) from {manifest['documents']:,} documents"
    left_out = f", {manifest['skipped']:,} skipped" if manifest["skipped"] else ""
    print(f"{folder / MANIFEST}: {counts}{left_out}, in {len(manifest['shards'])} shards, {manifest['sha256'][:16]}")


def _parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer.")
    return int(text)
