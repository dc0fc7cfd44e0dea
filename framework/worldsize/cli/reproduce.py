"""``worldsize reproduce MANIFEST [OVERRIDE ...]``: reproduce a run, and report how closely it matches."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from worldsize.cli import exit_process
from worldsize.cli.compare import EXIT_CODES, add_report_options, show_comparison
from worldsize.config.arguments import parse_override_key
from worldsize.config.compose import format_override
from worldsize.config.search_path import get_bundle_folder
from worldsize.core import ContainerImage
from worldsize.errors import WorldsizeError
from worldsize.launch.recorded_run import (
    check_recorded_targets,
    read_recorded_flags,
    read_recorded_overrides,
    target_names,
)
from worldsize.messages import ask_for_consent, report_error
from worldsize.record.code import check_out_code, list_patched_files, read_patch
from worldsize.record.compare import compare_runs
from worldsize.record.container import (
    ENGINES,
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
from worldsize.record.level import read_recorded_level
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
from worldsize.record.run_record import RunView, read_run
from worldsize.strict_json import sanitize_json
from worldsize.world.scratch import temporary_folder

_NO_COMMIT = "only the files in the record"


@dataclass(frozen=True)
class Options:
    """Command-line options of ``worldsize reproduce``."""

    manifest: Path
    overrides: Sequence[str]
    yes: bool
    strict: bool
    approximate: bool
    rebuild: bool
    container: str | None
    base: str | None
    json: bool
    tolerance: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize reproduce", description=__doc__)
    parser.add_argument("manifest", type=Path, help="run_manifest.json, or its run folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="overrides, e.g. cluster.processes=4; some downgrade the reproducibility level",
    )
    parser.add_argument("--yes", action="store_true", help="run another user's manifest without asking")
    parser.add_argument("--strict", action="store_true", help="refuse to run if anything downgrades the level")
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="continue without the recorded uncommitted changes if they are missing",
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="rebuild the environment even if the current one is identical"
    )
    parser.add_argument(
        "--container",
        choices=("auto", *ENGINES),
        nargs="?",
        const="auto",
        help="run in the recorded image by digest, or in an image built from the recorded lock file",
    )
    parser.add_argument("--base", metavar="IMAGE", help="base image to build on (python:VERSION-slim)")
    add_report_options(parser)
    try:
        code = reproduce(Options(**vars(parser.parse_intermixed_args())))
    except WorldsizeError as error:
        code = report_error(error)
    exit_process(code)


def reproduce(options: Options) -> int:
    """Repeat the run; return the verdict's exit code (see ``worldsize compare``), or the run's if it did not complete.

    Raises:
        WorldsizeError: the record is damaged, incomplete or not allowed to run; nothing was started.
    """
    recorded = read_run(options.manifest)
    original, manifest = recorded.directory, recorded.manifest
    code, own = manifest["code"], recorded.is_own
    check_recorded_targets(manifest, options.overrides, own=own)
    has_plugins = check_kept(manifest.get("plugins", ()), original.plugins)
    patch = read_patch(original.patch, code["patch_sha256"], approximate=options.approximate)
    image = read_recorded_image(manifest["environment"]) if options.container else None
    changed = [] if options.container else different_packages(manifest["environment"])
    needs_lock = image is None if options.container else bool(changed or options.rebuild)
    lock = read_lock(manifest["environment"], original.environment) if needs_lock else None
    engine = find_engine(options.container, engines_for(image)) if options.container else None
    if not own:
        _confirm_run(recorded, patch, lock, image.name if image else None, options)
    overrides = _overrides(manifest, options, own=own)
    clones = _list_clones(recorded)
    with temporary_folder() as scratch:
        root, plugins = scratch / "code", scratch / "kept"
        if has_plugins:
            shutil.copytree(original.plugins, plugins)
            check_kept(manifest.get("plugins", ()), plugins)  # check the copies, since the record may have changed
        with check_out_code(code, patch, root, clones) as folder:
            if not own:
                remove_compiled(root)
            link_data(manifest["data"], folder, root, _list_launch_folders(recorded))
            if engine:
                container = Container(engine, image or _build_image(engine, lock, scratch, options.base))
                places = Places(
                    folder,
                    root,
                    [*clones, *_list_launch_folders(recorded), original.path],
                    [_create_runs_folder(original), scratch],
                )
                python = get_container_interpreter(container, places, cuda=manifest["cluster"]["device"] == "cuda")
            else:
                python = _prepare_interpreter(lock, folder, root=root, clones=clones)
            new, exit_code = _train_in_checkout(options, original, python, folder, overrides, plugins)
    return exit_code or _report_comparison(options, original, new)


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


def _confirm_run(recorded: RunView, patch: bytes, lock: Lock | None, image: str | None, options: Options) -> None:
    """Show what another user's record would fetch, install or run here, and ask for agreement."""
    manifest, code = recorded.manifest, recorded.manifest["code"]
    places = ", ".join(map(str, (*_list_clones(recorded), *([code["remote"]] if code["remote"] else []))))
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
        "other packages": [] if options.container else different_packages(manifest["environment"]),
        "to be installed": describe_installs(lock) if lock else [],
        "data": list(manifest["data"]["files"]),
    }
    ask_for_consent(facts, yes=options.yes, deed="Install and run this code?")


def _overrides(manifest: Mapping[str, Any], options: Options, *, own: bool) -> list[str]:
    """Return the recorded overrides, replaced by the user's overrides where both exist."""
    typed = {parse_override_key(word) for word in options.overrides}
    recorded = [word for word in read_recorded_overrides(manifest, own=own) if parse_override_key(word) not in typed]
    begun = manifest["config"].get("init_from")  # the checkpoint that was used, even if init_from names a run
    pinned = [format_override("init_from", begun)] if begun and "init_from" not in typed else []
    revealed = (_ask_for_secret(word) if REDACTED in word else word for word in recorded)
    return [*read_recorded_flags(manifest, own=own), *revealed, *pinned, *options.overrides]


def _ask_for_secret(word: str) -> str:
    key = word.partition("=")[0]
    if not sys.stdin.isatty():
        raise WorldsizeError(f"the secret {key} is not in the record. Pass {key}='${{oc.env:NAME_OF_A_VARIABLE}}'.")
    return f"{key}={getpass.getpass(f'{key}: ')}"


def _prepare_interpreter(lock: Lock | None, folder: Path, *, root: Path, clones: Sequence[Path]) -> Interpreter:
    if lock is None:
        return get_current_interpreter(root, clones=clones)
    print("building the recorded environment with uv", file=sys.stderr, flush=True)
    return build_interpreter(lock, folder, root.parent)


def _build_image(engine: str, lock: Lock | None, scratch: Path, base: str | None) -> ContainerImage:
    """Build the image of the recorded environment, into which the code is mounted later."""
    assert lock is not None
    folder = scratch / "image"
    folder.mkdir()
    lock.write_lock_files(folder)
    base = base or f"python:{lock.python}-slim"
    image = Dockerfile(folder, base, lock.python, version_of_uv(), extras=None, has_project=False)
    print(f"building the recorded environment with {engine}", file=sys.stderr, flush=True)
    return build_image(engine, image.write_files(), f"worldsize-{hashlib.sha256(lock.content).hexdigest()[:12]}")


# overrides are sent on standard input, since they may contain secrets and every user can read command lines
_CHILD = "import json, sys; sys.argv[1:] = json.load(sys.stdin); from worldsize.cli import main; main()"


def _train_in_checkout(
    options: Options,
    original: RunDirectory,
    python: Interpreter,
    folder: Path,
    overrides: Sequence[str],
    plugins: Path,
) -> tuple[RunDirectory, int]:
    """Train in the checkout, with only the plugin copies in the folder ``plugins``, if it exists.

    Returns the new run's folder and its exit code.

    Raises:
        WorldsizeError: the run was refused; the reason has been shown.
    """
    runs, name = _create_runs_folder(original), f"{original.id}_reproduced_{secrets.token_hex(3)}"
    own = [
        format_override("run.root", runs),
        format_override("run.name", name),
        format_override("run.reproduces", original.manifest),
        f"run.strict={options.strict}",
    ]
    path = os.pathsep.join(map(str, (*python.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    environment = {
        **os.environ,
        "WORLDSIZE_PLUGINS": str(plugins) if plugins.is_dir() else "",
        "PYTHONPATH": path.strip(os.pathsep),
        **python.variables,
    }
    done = subprocess.run(
        [*python.command, "-c", _CHILD],
        cwd=folder,
        env=extend_environment(python.command, environment),
        input=json.dumps(["train", *overrides, *own]),
        stdout=sys.stderr if options.json else None,
        text=True,
    )
    folder_of_new = next(runs.glob(f"*/{escape(name)}"), None)
    if folder_of_new is None:
        raise WorldsizeError("the run was rejected; see the message above.")
    return RunDirectory(folder_of_new), done.returncode


def _create_runs_folder(original: RunDirectory) -> Path:
    """Return the folder for the new run, next to the original or else in the working directory."""
    beside = original.path.parents[1]
    runs = beside if original.config.exists() and os.access(beside, os.W_OK) else Path.cwd() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    return runs


def _report_comparison(options: Options, original: RunDirectory, new: RunDirectory) -> int:
    comparison = compare_runs(original.path, new.path, tolerance=options.tolerance)
    level = read_recorded_level(read_run(new.path).manifest)
    runs = {"original": str(original.path), "run": str(new.path), "reproducibility": asdict(level)}
    report = sanitize_json({**comparison.describe(), **runs})
    (new.path / "reproduction.json").write_text(json.dumps(report, indent=2) + "\n")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show_comparison(comparison, as_json=False)
        text = f"reproducibility level: {level.level}: {level.why}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return EXIT_CODES[comparison.verdict]
