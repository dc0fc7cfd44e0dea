"""Trains a recorded run again: its code in a temporary checkout, its environment, and only after consent."""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import IO, final

from worldsize.checkpoint.format import COMPLETE, MANIFEST, read_checkpoint
from worldsize.config.arguments import parse_override_key
from worldsize.config.compose import format_override
from worldsize.config.search_path import get_bundle_folder
from worldsize.core import ContainerImage
from worldsize.errors import WorldsizeError
from worldsize.files import open_regular
from worldsize.launch.recorded_run import (
    check_recorded_targets,
    drop_replaced,
    read_recorded_flags,
    read_recorded_overrides,
    target_names,
)
from worldsize.messages import ask_for_consent
from worldsize.record.code import check_out_code, list_patched_files, read_patch
from worldsize.record.container import (
    Container,
    Dockerfile,
    build_image,
    engines_for,
    extend_environment,
    find_engine,
    read_recorded_image,
    version_of_uv,
)
from worldsize.record.inputs import check_kept, link_data, remove_compiled
from worldsize.record.json_lines import wrap_read_errors
from worldsize.record.rebuild import (
    Interpreter,
    Lock,
    Places,
    build_interpreter,
    describe_installs,
    different_packages,
    get_container_interpreter,
    get_current_interpreter,
    read_lock,
)
from worldsize.record.redaction import REDACTED
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunView
from worldsize.world.scratch import temporary_folder

_logger = logging.getLogger(__name__)

_NO_COMMIT = "only the files in the record"


@final
@dataclass(frozen=True)
class Reproduction:
    """How to train a recorded run again.

    Attributes:
        recorded: The run.
        overrides: Options typed now; they replace recorded ones.
        drop: Section of the configuration whose recorded overrides are dropped, such as ``logger``.
        runs: Parent of the new run's folder; None: next to the recorded run, or else in the working directory.
        yes: Whether to run another user's code without asking.
        approximate: Whether to continue if recorded changes of the code are missing.
        rebuild: Whether to rebuild the environment even if the current one is identical.
        container: Container engine, or "auto"; None: no container.
        base: Base image of a built image.
        output: File for the run's output and errors; None: inherit this process's streams.
    """

    recorded: RunView
    overrides: Sequence[str] = ()
    drop: str | None = None
    runs: Path | None = None
    yes: bool = False
    approximate: bool = False
    rebuild: bool = False
    container: str | None = None
    base: str | None = None
    output: IO[str] | None = None

    @contextmanager
    def prepare(self) -> Iterator[Checkout]:
        """Check the record, ask for consent, and yield a temporary checkout of the code.

        Raises:
            WorldsizeError: the record is damaged, incomplete or not allowed to run; nothing was started.
        """
        recorded = self.recorded
        original, manifest, own = recorded.directory, recorded.manifest, recorded.is_own
        code = manifest["code"]
        check_recorded_targets(manifest, self.overrides, own=own)
        has_plugins = check_kept(manifest.get("plugins", ()), original.plugins)
        patch = read_patch(original.patch, code["patch_sha256"], approximate=self.approximate)
        image = read_recorded_image(manifest["environment"]) if self.container else None
        changed = [] if self.container else different_packages(manifest["environment"])
        needs_lock = image is None if self.container else bool(changed or self.rebuild)
        lock = read_lock(manifest["environment"], original.environment) if needs_lock else None
        engine = find_engine(self.container, engines_for(image)) if self.container else None
        if not own:
            self._confirm_run(patch, lock, image.name if image else None)
        overrides = self._collect_overrides()
        clones, runs = _list_clones(recorded), self.runs or _find_runs_folder(original)
        runs.mkdir(parents=True, exist_ok=True)
        with temporary_folder() as scratch:
            root, plugins = scratch / "code", scratch / "kept"
            if has_plugins:
                shutil.copytree(original.plugins, plugins)
                check_kept(manifest.get("plugins", ()), plugins)  # check the copies, since the record may have changed
            with check_out_code(code, patch, root, clones) as folder:
                if not own:
                    remove_compiled(root)
                launched = _list_launch_folders(recorded)
                link_data(manifest["data"], folder, root, launched)
                if engine:
                    container = Container(engine, image or _build_image(engine, lock, scratch, self.base))
                    places = Places(folder, root, [*clones, *launched, original.path], [runs, scratch])
                    python = get_container_interpreter(container, places, cuda=manifest["cluster"]["device"] == "cuda")
                else:
                    python = _prepare_interpreter(lock, folder, root=root, clones=clones)
                yield Checkout(original, python, folder, overrides, plugins, runs, self.output)

    def _confirm_run(self, patch: bytes, lock: Lock | None, image: str | None) -> None:
        """Show what another user's record would fetch, install or run here, and ask for agreement."""
        manifest, code = self.recorded.manifest, self.recorded.manifest["code"]
        places = ", ".join(map(str, (*_list_clones(self.recorded), *([code["remote"]] if code["remote"] else []))))
        facts = {
            "run": [manifest["run_id"]],
            "code": [f"{code['commit']} from the first repository with this commit: {places}"]
            if code["commit"]
            else [_NO_COMMIT],
            "with changes": [f"patch with SHA-256 {code['patch_sha256']}", *list_patched_files(patch)] if patch else [],
            "plugins": [f"{each['name']} with digest {each['sha256']}" for each in manifest.get("plugins", ())],
            "targets": target_names(manifest["config"]),
            "options": manifest["overrides"],
            "image": [image] if image else [],
            "other packages": [] if self.container else different_packages(manifest["environment"]),
            "to be installed": describe_installs(lock) if lock else [],
            "data": list(manifest["data"]["files"]),
        }
        ask_for_consent(facts, yes=self.yes, deed="Install and run this code?")

    def _collect_overrides(self) -> list[str]:
        """Return the recorded overrides, replaced by the user's overrides where both exist."""
        manifest, own = self.recorded.manifest, self.recorded.is_own
        typed = {parse_override_key(word) for word in self.overrides}
        recorded = [
            word
            for word in drop_replaced(read_recorded_overrides(manifest, own=own), self.overrides)
            if self.drop is None or re.split(r"[./@]", parse_override_key(word))[0] != self.drop
        ]
        begun = manifest["config"].get("init_from")  # the checkpoint that was used, even if init_from names a run
        pinned = [format_override("init_from", begun)] if begun and "init_from" not in typed else []
        spike = manifest["config"].get("spike") or {}
        if spike.get("on_spike") == "rewind" and spike.get("factor") is not None and "spike.on_spike" not in typed:
            pinned.append("spike.on_spike=warn")  # the run's rewinds are in skip_samples
        revealed = (_ask_for_secret(word) if REDACTED in word else word for word in recorded)
        return [*read_recorded_flags(manifest, own=own), *revealed, *pinned, *self.overrides]


# overrides are sent on standard input, since they may contain secrets and every user can read command lines
_CHILD = "import json, sys; sys.argv[1:] = json.load(sys.stdin); from worldsize.cli import main; main()"


@final
@dataclass(frozen=True)
class Checkout:
    """A temporary checkout of a recorded run's code, with an interpreter for it.

    Attributes:
        original: The recorded run.
        python: The interpreter.
        folder: The working directory.
        overrides: Options of the run.
        plugins: Folder with the only plugin copies to use, if it exists.
        runs: Parent of new runs' folders.
        output: File for the output and errors of commands; None: inherit this process's streams.
    """

    original: RunDirectory
    python: Interpreter
    folder: Path
    overrides: Sequence[str]
    plugins: Path
    runs: Path
    output: IO[str] | None

    def train(self, *options: str) -> tuple[RunDirectory, int]:
        """Train with further ``options``; return the new run's folder and its exit code.

        Raises:
            WorldsizeError: the run was refused; the reason has been shown.
        """
        name = f"{self.original.id}_reproduced_{secrets.token_hex(3)}"
        own = [
            format_override("run.root", self.runs),
            format_override("run.name", name),
            format_override("run.reproduces", self.original.manifest),
        ]
        code = self.run_command("train", *self.overrides, *own, *options)
        folder = next(self.runs.glob(f"*/{escape(name)}"), None)
        if folder is None:
            raise WorldsizeError("the run was rejected; see the message above.")
        return RunDirectory(folder), code

    def write(self, *options: str) -> RunDirectory:
        """Write a new run with further ``options``, to be resumed; return its folder.

        Raises:
            WorldsizeError: the run was refused; the reason has been shown.
        """
        run, code = self.train(*options, "launch=write")
        if code:
            raise WorldsizeError("the run was rejected; see the message above.")
        return run

    def resume(self, run: RunDirectory, checkpoint: Path | None, *options: str) -> int:
        """Resume ``run`` from a checkpoint of the recorded run, with its logged values; return the exit code.

        Checkpoints of ``run`` are removed. Only the files that a manifest lists are copied, without links out of the
        recorded run; loading verifies the copies. None: train from the start.

        Raises:
            WorldsizeError: the checkpoint cannot be copied.
        """
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        with wrap_read_errors(self.original.path):
            if checkpoint is not None:
                copied = run.checkpoints / checkpoint.name
                copied.mkdir(parents=True)
                for name in (*read_checkpoint(checkpoint).files, MANIFEST, COMPLETE):
                    _copy_file(checkpoint / name, copied / name)
                _copy_file(self.original.metrics, run.metrics)  # decisions such as early stopping depend on them
        return self.run_command("resume", str(run.path), *options)

    def run_command(self, *words: str) -> int:
        """Run a worldsize command in the checkout; return its exit code."""
        path = os.pathsep.join(map(str, (*self.python.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep))))
        environment = {
            **os.environ,
            "WORLDSIZE_PLUGINS": str(self.plugins) if self.plugins.is_dir() else "",
            "PYTHONPATH": path.strip(os.pathsep),
            **self.python.variables,
        }
        done = subprocess.run(
            [*self.python.command, "-c", _CHILD],
            cwd=self.folder,
            env=extend_environment(self.python.command, environment),
            input=json.dumps(words),
            stdout=self.output,
            stderr=self.output,
            text=True,
        )
        return done.returncode


def _copy_file(source: Path, target: Path) -> None:
    with open_regular(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def _list_clones(recorded: RunView) -> list[Path]:
    """List the folders whose git repositories may contain the commit.

    Repositories mentioned or contained in another user's record are skipped, because a repository's settings can make
    git run any program.
    """
    here = [Path.cwd(), get_bundle_folder()]
    if recorded.is_own:
        checkout = recorded.manifest["code"]["checkout"]
        return [*([Path(checkout)] if checkout else []), recorded.directory.path, *here]
    return here


def _list_launch_folders(recorded: RunView) -> list[Path]:
    """List the folders for resolving the run's relative paths: where it was launched, and the working directory."""
    code = recorded.manifest["code"]
    then = [Path(code["checkout"]) / code["folder"]] if recorded.is_own and code["checkout"] else []
    return [*then, Path.cwd()]


def _ask_for_secret(word: str) -> str:
    key = word.partition("=")[0]
    if not sys.stdin.isatty():
        raise WorldsizeError(f"the secret {key} is not in the record. Pass {key}='${{oc.env:NAME_OF_A_VARIABLE}}'.")
    return f"{key}={getpass.getpass(f'{key}: ')}"


def _prepare_interpreter(lock: Lock | None, folder: Path, *, root: Path, clones: Sequence[Path]) -> Interpreter:
    if lock is None:
        return get_current_interpreter(root, clones=clones)
    _logger.info("building the recorded environment with uv")
    return build_interpreter(lock, folder, root.parent)


def _build_image(engine: str, lock: Lock | None, scratch: Path, base: str | None) -> ContainerImage:
    """Build the image of the recorded environment, into which the code is mounted later."""
    assert lock is not None
    folder = scratch / "image"
    folder.mkdir()
    lock.write_lock_files(folder)
    base = base or f"python:{lock.python}-slim"
    image = Dockerfile(folder, base, lock.python, version_of_uv(), extras=None, has_project=False)
    _logger.info("building the recorded environment with %s", engine)
    return build_image(engine, image.write_files(), f"worldsize-{hashlib.sha256(lock.content).hexdigest()[:12]}")


def _find_runs_folder(original: RunDirectory) -> Path:
    """Return the folder for the new run, next to the original or else in the working directory."""
    beside = original.path.parents[1]
    return beside if original.config.exists() and os.access(beside, os.W_OK) else Path.cwd() / "runs"
