"""Rewinds of a run: it goes back to an earlier checkpoint, and continues without some samples.

A worker requests a rewind after a spike. The process that holds the run's lock applies it between two attempts. Later
checkpoints and metrics are kept in the run's folders ``rewound/001``, ``rewound/002``, and so on.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, final

from worldsize.checkpoint.format import complete, parse_step, sync_folder
from worldsize.config.arguments import parse_override_key
from worldsize.config.compose import format_keywords
from worldsize.config.recorded import compute_config_digest, format_words, override_recorded
from worldsize.config.settings import Settings
from worldsize.core import ConfigError, Failure, Outcome, Spike
from worldsize.data.skips import SkippedSamples
from worldsize.errors import WorldsizeError
from worldsize.files import read_regular, replace_file
from worldsize.record.chain import BrokenChainError, read_chain
from worldsize.record.metrics import last_step
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import Manifest, RunRecord
from worldsize.strict_json import parse_strict_json

_logger = logging.getLogger(__name__)

REWOUND = "rewound"  # exit reason of an attempt that ended to go back before a spike
_LARGEST = 1 << 16  # maximum bytes of a request


@final
@dataclass(frozen=True)
class RewindRequest:
    """A worker's request to go back before a spike.

    Attributes:
        step: The logged step with the spike.
        since: The previous logged step, without a spike.
        why: Description of the spike.
        stops: Whether the run was also asked to stop, and must not continue by itself.
    """

    step: int
    since: int
    why: str
    stops: bool

    def write(self, run: RunDirectory) -> None:
        replace_file(run.rewind, json.dumps(asdict(self)).encode())


def request_rewind(run: RunDirectory, spike: Spike, *, stops: bool) -> None:
    """Ask the launching process to go back before ``spike``, once all processes have ended."""
    RewindRequest(spike.step, spike.since, spike.describe(), stops).write(run)


def read_request(run: RunDirectory) -> RewindRequest | None:
    """Return the request that has not been applied yet, or None.

    Raises:
        WorldsizeError: the file was not written by worldsize.
    """
    try:
        row = parse_strict_json(read_regular(run.rewind, at_most=_LARGEST))
        step, since, why, stops = row["step"], row["since"], row["why"], row["stops"]
        if not (type(step) is int and type(since) is int and 0 <= since < step) or not isinstance(why, str):
            raise ValueError("invalid values")
        return RewindRequest(step, since, why, stops is True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{run.rewind} is not a valid request ({error}). Remove it; nothing was started."
        raise WorldsizeError(text) from None


@final
@dataclass(frozen=True)
class Rewind:
    """Where a run goes back to, and which samples it skips from there on.

    Attributes:
        undone: The last step that is undone.
        step: Step of the checkpoint to continue from; 0: the start.
        added: Positions that are skipped in addition: half-open ranges.
        skipped: All positions that are skipped.
        why: The reason, in one sentence.
        is_spike: Whether a spike is the reason, and not the user.
    """

    undone: int
    step: int
    added: Sequence[tuple[int, int]]
    skipped: SkippedSamples
    why: str
    is_spike: bool

    @staticmethod
    def from_request(request: RewindRequest, run: RunDirectory, skipped: SkippedSamples, batch_size: int) -> Rewind:
        """Return the rewind to the last checkpoint before the spike, without the samples of the steps since then.

        ``skipped``: positions skipped so far. ``batch_size``: samples per step.
        """
        step = max((saved for saved in map(parse_step, complete(run.checkpoints)) if saved <= request.since), default=0)
        used, trained = step * batch_size, request.step * batch_size
        added = [(skipped.find_position(used), skipped.find_position(trained - 1) + 1)]
        undone = max(request.step, last_step(run.metrics))
        return Rewind(undone, step, added, skipped.add_ranges(added), request.why, is_spike=True)

    def put_aside(self, run: RunDirectory) -> Path | None:
        """Move the checkpoints of later steps to a new folder in ``rewound``, and copy the metrics and the chain there.

        Returns the folder, or None if there is nothing later.
        """
        later = [path for path in complete(run.checkpoints) if parse_step(path) > self.step]
        if not later and last_step(run.metrics) <= self.step:
            return None
        folders = (run.rewound / f"{number:03d}" for number in count(1))
        folder = next(folder for folder in folders if not folder.exists())
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        for file in (run.metrics, run.chain):
            if file.exists():
                shutil.copy2(file, folder / file.name)
        for path in reversed(later):  # newest first, so that the newest remaining one can be resumed at any time
            path.rename(folder / "checkpoints" / path.name)
        for each in (folder / "checkpoints", run.checkpoints) if later else ():
            sync_folder(each)
        return folder

    def describe(self, folder: Path | None) -> str:
        """Describe the rewind in one line; ``folder`` is the result of :meth:`put_aside`."""
        samples = f" without the samples {', '.join(_format_ranges(self.added))}" if self.added else ""
        kept = f"; later checkpoints and metrics are in {folder}" if folder else ""
        if self.undone == self.step:
            return f"continuing from step {self.step}{samples}"
        return f"going back from step {self.undone} to step {self.step}{samples}{kept}"


def add_rewind(manifest: Manifest, rewind: Rewind, folder: Path | None) -> Manifest:
    """Return ``manifest`` with this rewind in the list of rewinds."""
    row = {
        "attempt": len(manifest["attempts"]) + 1,
        "from": rewind.undone,
        "to": rewind.step,
        "skipped": _format_ranges(rewind.added),
        "cause": "spike" if rewind.is_spike else "by hand",
        "why": rewind.why,
        "folder": None if folder is None else f"{folder.parent.name}/{folder.name}",
    }
    return {**manifest, "rewinds": [*manifest.get("rewinds", ()), row]}


def _format_ranges(ranges: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{first}:{end}" for first, end in ranges]


def is_applied(manifest: Manifest) -> bool:
    """Return whether the request of the last attempt is already in the manifest, but its file was not removed."""
    number = len(manifest["attempts"]) + 1
    return any(each["cause"] == "spike" and each["attempt"] == number for each in manifest.get("rewinds", ()))


def describe_refusal(request: RewindRequest, record: RunRecord, *, limit: int | None = None) -> str | None:
    """Return why the run must not go back before the spike; None if it may.

    ``limit``: maximum number of rewinds at a spike; None: as recorded.
    """
    manifest = record.manifest
    limit = manifest["config"]["spike"]["rewinds"] if limit is None else limit
    done = sum(each["cause"] == "spike" for each in manifest.get("rewinds", ()))
    if done >= limit:
        return (
            f"{request.why} The run has gone back {done} times, the maximum (spike.rewinds={limit}). Lower lr or "
            f"set clip_norm in a new run, or resume with spike.rewinds={done + 3} to go back again, or with "
            "spike.on_spike=warn to continue after the spike."
        )
    if _has_deleted(record.directory, until=request.since):
        return (
            f"{request.why} All checkpoints up to step {request.since}, before the spike, have been deleted. Go back "
            "to the start with --from 0, or resume with spike.on_spike=warn to continue after the spike. In new runs, "
            "set checkpoint.keep.last or checkpoint.keep.every to keep more of them."
        )
    return None


def _has_deleted(run: RunDirectory, *, until: int) -> bool:
    """Return whether the run saved checkpoints up to step ``until``, but has not kept any of them."""
    if any(parse_step(path) <= until for path in complete(run.checkpoints)):
        return False
    with suppress(BrokenChainError):
        return any(link.kind == "checkpoint" and link.step <= until for link in read_chain(run.chain))
    return False


def conclude_attempt(record: RunRecord, outcome: Outcome) -> Outcome:
    """Return the outcome of an attempt that may have ended to go back before a spike.

    Its exit reason is then "rewound", or the attempt failed because the run must not go back again.
    """
    if outcome.exit_reason != "preempted" or (request := read_request(record.directory)) is None:
        return outcome
    if (refusal := describe_refusal(request, record)) is not None:
        failure = Failure("worker", 0, refusal, 1, request.step)
        return replace(outcome, exit_reason="failed", exit_code=1, failure=failure)
    return replace(outcome, exit_reason=REWOUND)


def is_stopping(run: RunDirectory) -> bool:
    """Return whether the run was asked to stop in the attempt that ended to go back before a spike."""
    request = read_request(run)
    return request is not None and request.stops


def is_exhausted(record: RunRecord) -> bool:
    """Return whether a worker requests to go back, but the run must not."""
    request = read_request(record.directory)
    return request is not None and describe_refusal(request, record) is not None


def apply_request(record: RunRecord) -> None:
    """Apply a worker's request, if there is one, to the run folder, before the next attempt begins.

    Raises:
        WorldsizeError: the run must not go back again.
    """
    run, manifest = record.directory, record.manifest
    if (request := read_request(run)) is None:
        return
    if is_applied(manifest):
        run.rewind.unlink()
        return
    if (refusal := describe_refusal(request, record)) is not None:
        raise WorldsizeError(refusal)
    recorded = manifest["config"]
    skipped = SkippedSamples.from_words(recorded["skip_samples"])
    rewind = Rewind.from_request(request, run, skipped, recorded["batch_size"])
    folder = rewind.put_aside(run)
    config, text = override_recorded(run, {"skip_samples": rewind.skipped.words})
    words = replace_skipped_samples(manifest["overrides"], rewind.skipped)
    amended = {
        **add_rewind(manifest, rewind, folder),
        "config": config,
        "config_sha256": compute_config_digest(config),
        "overrides": words,
    }
    record.record_rewind(amended, config=text, overrides=format_words(words))
    run.rewind.unlink()
    _logger.warning("%s", rewind.describe(folder))


def replace_skipped_samples(words: Sequence[str], skipped: SkippedSamples) -> list[str]:
    """Return the overrides ``words`` with ``skip_samples`` set to ``skipped``."""
    others = [word for word in words if parse_override_key(word) != "skip_samples"]
    return [*others, *(format_keywords({"skip_samples": skipped.words}) if skipped.ranges else ())]


def plan_rewind(
    record: RunRecord, config: Mapping[str, Any], *, start: int | None, skip: Sequence[str]
) -> Rewind | None:
    """Return the rewind with which a run resumes: by hand, or as a worker requested; None if it does not go back.

    Args:
        record: The record of the run.
        config: The configuration of the resumed run.
        start: Step of the checkpoint to go back to; 0: the start. None: the newest one.
        skip: Further samples to skip, such as "12000:12064".

    Raises:
        WorldsizeError: there is no checkpoint of step ``start``, a range is invalid, or the run must not go back again.
    """
    run, manifest = record.directory, record.manifest
    saved = [parse_step(path) for path in complete(run.checkpoints)]
    skipped = SkippedSamples.from_words(config["skip_samples"])
    if start is not None or skip:
        if start and start not in saved:
            raise WorldsizeError(
                f"--from {start}: the run {run.path} has no checkpoint of this step. Pass a step with a checkpoint "
                f"({', '.join(map(str, saved)) or 'there is none'}), or 0 for the start; nothing was started."
            )
        step, added = saved[-1] if saved else 0, SkippedSamples.from_words(skip, key="--skip-samples").ranges
        step = step if start is None else start
        undone = max([step, last_step(run.metrics), *saved])
        return Rewind(undone, step, added, skipped.add_ranges(added), "requested by hand", is_spike=False)
    request, spike = read_request(run), config["spike"]
    if request is None or is_applied(manifest) or spike["factor"] is None or spike["on_spike"] != "rewind":
        return None
    if (refusal := describe_refusal(request, record, limit=spike["rewinds"])) is not None:
        raise WorldsizeError(f"{refusal.removesuffix('.')}; nothing was started.")
    return Rewind.from_request(request, run, skipped, config["batch_size"])


def check_skipped(settings: Settings, record: RunRecord, step: int) -> None:
    """Raise ConfigError if the samples of steps up to ``step`` would differ from those that the run has trained."""
    training, recorded = settings.training, record.manifest["config"].get("skip_samples", ())  # missing in older runs
    before, now = SkippedSamples.from_words(recorded), SkippedSamples.from_words(training.skip_samples)
    used = step * training.batch_size
    if not before.is_same_before(now, used):
        end = before.find_position(used - 1) + 1
        raise ConfigError(
            f"skip_samples={now.words} changes the samples of steps that the checkpoint of step {step} has already "
            f"trained, at positions below {end}. Skip samples from position {end} on, or go back with --from to a "
            "checkpoint before them; nothing was started."
        )
