"""Records a run before its first step: configuration, code, environment, data, cluster."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from worldsize import seeds
from worldsize.checkpoint.format import HYPERPARAMETERS, PARTS, complete
from worldsize.checkpoint.weights import open_weights
from worldsize.collectives.cluster_cost import axis_tiers
from worldsize.config.compose import additional_folder, find_env_variables, read_group_choices, task_overrides
from worldsize.config.recorded import compute_config_digest, format_config, format_words
from worldsize.config.schema import RunConfig
from worldsize.config.search_path import Plugin, find_used_plugins, get_bundle_folder
from worldsize.config.settings import Settings
from worldsize.core import ConfigError, ContainerImage, Launcher, LaunchMethod, Plan
from worldsize.data.permutation import ORDER
from worldsize.errors import neighbours
from worldsize.healing.rewind import Rewind, add_rewind
from worldsize.loop.initial_weights import InitialWeights
from worldsize.record.code import Code, capture_code
from worldsize.record.environment import capture_environment, hardware, relevant_variables, write_environment
from worldsize.record.inputs import (
    check_data,
    compute_plugin_digest,
    copy_plugin,
    fingerprint,
    get_plugin_folder,
    recipe_fingerprint,
)
from worldsize.record.level import (
    NOT_TRAINED,
    changes_but,
    downgrade_level,
    downgrades,
    drop_copies,
    find_changes,
    get_promised_level,
    list_keys,
    orders_differ,
    resume_downgrades,
)
from worldsize.record.redaction import Scrubber, scrubber, withheld
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunRecord, create_record, read_run
from worldsize.world.environments import read_image_name
from worldsize.world.world import threads_per_process

_logger = logging.getLogger(__name__)


def create_scrubber(cfg: DictConfig, config: Mapping[str, Any]) -> Scrubber:
    """Return a scrubber for the secrets in ``config``, the resolved form of ``cfg``."""
    return scrubber(config, os.environ, Path.home() / ".netrc", interpolated=find_env_variables(cfg))


def add_secrets(config: Mapping[str, Any], plan: Plan, clean: Scrubber) -> Plan:
    """Return the plan with the configuration's secrets, which are not in the run's files."""
    secrets = withheld(config, clean.scrub_tree(config))
    return replace(plan, secrets={"WORLDSIZE_SECRETS": json.dumps(secrets)}) if secrets else plan


def write_record(settings: Settings, plan: Plan, run: RunDirectory, clean: Scrubber) -> None:
    """Write the run's record, with all facts available before the start, to the run folder.

    Raises:
        ConfigError: a re-created run has different data, or cannot be re-created exactly although --strict is set.
    """
    config = clean.scrub_tree(settings.config)
    code = _describe_code(settings.run, clean)
    if code["patch"]:
        run.patch.write_bytes(code["patch"])
    manifest = {
        "run_id": run.id,
        "parent_run": None,
        "command": clean.scrub_arguments(sys.argv),
        "code": {key: value for key, value in code.items() if key != "patch"},
        "plugins": [
            _record_plugin(plugin, settings.run.include, run, clean)
            for plugin in find_used_plugins(config, read_group_choices())
        ],
        "environment": {
            **capture_environment(),
            **_record_lock(run, clean),
            "image": _describe_image(settings.launcher),
        },
        "hardware": [hardware()],
        **_collect_configuration(settings, plan, config),
        "overrides": clean.scrub_arguments(task_overrides()),
        **({"config_dir": folder} if (folder := additional_folder()) else {}),
        "data": recipe_fingerprint(settings.recipe),
        **({"init_from": fingerprint(open_weights(settings.initial.path).list_files())} if settings.initial else {}),
        "reproducibility": asdict(get_promised_level(settings.determinism)),
    }
    written = clean.scrub_tree({**manifest, **_parentage(settings, manifest)})
    # not scrubbed, since the keys are names of files and packages, such as secrets.py and google-auth
    if "init_from" in manifest:
        written["init_from"] = manifest["init_from"]
    written["data"], written["environment"]["packages"] = manifest["data"], manifest["environment"]["packages"]
    overrides = overrides_text(task_overrides(), clean)
    create_record(run, written, config=format_config(config), overrides=overrides)


def apply_downgrades(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the reproducibility level that remains after resumes."""
    reasons = resume_downgrades(manifest)
    level = {"reproducibility": asdict(downgrade_level(manifest, manifest, reasons))} if reasons else {}
    return {**manifest, **level}


def amend_record(
    settings: Settings,
    plan: Plan,
    record: RunRecord,
    clean: Scrubber,
    words: Sequence[str],
    *,
    rewind: tuple[Rewind, Path | None] | None = None,
) -> None:
    """Update the record of a resumed run with its new configuration and the changes.

    ``words`` are all overrides of the resumed run. ``rewind``: how it goes back, and the folder with the undone steps.
    """
    manifest, config = record.manifest, clean.scrub_tree(settings.config)
    amended = {
        **manifest,
        **clean.scrub_tree(_collect_configuration(settings, plan, config)),
        "overrides": clean.scrub_arguments(words),
    }
    changed = find_changes(manifest["config"], config, but=NOT_TRAINED)
    if ignored := [part for part in config["checkpoint"]["ignore"] if part in PARTS]:
        changed.append(("checkpoint.ignore", [], ignored))
    if changed:
        resumed = {"attempt": len(manifest["attempts"]) + 1, "changes": [list(each) for each in changed]}
        amended["resumed"] = [*manifest.get("resumed", ()), clean.scrub_tree(resumed)]
        amended = apply_downgrades(amended)
    if rewind is not None:
        amended = {**add_rewind(amended, *rewind)}
    overrides = overrides_text(words, clean)
    record.record_resume(amended, config=format_config(config), overrides=overrides, secrets=plan.secrets)


def overrides_text(words: Sequence[str], clean: Scrubber) -> str:
    """Render ``overrides.yaml``: the typed overrides, without secrets."""
    return format_words(clean.scrub_arguments(words))


def _collect_configuration(settings: Settings, plan: Plan, config: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the configuration-dependent part of the manifest, which a resume replaces."""
    groups, options = settings.strategy.groups(plan.cluster), read_group_choices()
    return {
        "options": {group: options[group] for group in ("recipe", "strategy", "cluster") if group in options},
        "config": config,
        "config_sha256": compute_config_digest(config),
        "cluster": {**_describe_cluster(plan), "groups": groups, "axis_tiers": axis_tiers(plan.cluster, groups)},
        "determinism": _determinism(settings),
    }


def check_same(settings: Settings, record: RunRecord, clean: Scrubber, ignore: Sequence[str]) -> None:
    """Raise WorldsizeError if a key other than ``steps``, ``skip_samples`` and those in ``ignore`` has changed."""
    manifest = record.manifest
    _check_known(ignore, manifest["config"], settings.config)
    changed = find_changes(manifest["config"], clean.scrub_tree(settings.config))
    left = drop_copies(changes_but(changed, ("steps", "skip_samples", *ignore)))
    if differences := [f"{key}: {then} -> {now}" for key, then, now in left]:
        raise ConfigError(
            f"the configuration has changed since the run started: {'; '.join(differences)}. "
            "Revert the change, or accept it with --ignore KEY; nothing was started."
        )
    if "data" not in ignore:
        remedy = "Restore the file, or accept the change with --ignore data"
        check_data(manifest["data"], recipe_fingerprint(settings.recipe), remedy=remedy)
    if orders_differ(order := manifest["determinism"].get("order", 1), ORDER, manifest):
        _logger.warning(
            "the sample order has changed from version %d to version %d since the run started; the current epoch may "
            "repeat some samples and skip others",
            order,
            ORDER,
        )
    if settings.initial and not complete(record.directory.checkpoints):  # otherwise it resumes from a checkpoint
        check_initial(settings.initial, manifest.get("init_from"))


def _check_known(ignore: Sequence[str], *configs: Mapping[str, Any]) -> None:
    """Raise ConfigError if an ignored key is in neither a configuration nor a checkpoint."""
    known = {*PARTS, HYPERPARAMETERS, "data"}.union(*map(list_keys, configs))
    for key in ignore:
        if key not in known:
            raise ConfigError(f"--ignore {key}: unknown key{neighbours(key, known)} Nothing was started.")


def check_initial(initial: InitialWeights, recorded: Mapping[str, Any] | None) -> None:
    """Raise WorldsizeError if the initial weights are damaged, or differ from the run's record."""
    weights = open_weights(initial.path)
    weights.verify()
    if fingerprint(weights.list_files()) != recorded:
        raise ConfigError(_other_weights(initial.path))


def _other_weights(path: object) -> str:
    return (
        f"the initial weights in {path} have changed since the run started: their digest differs. Restore the weights; "
        "nothing was started."
    )


def _describe_code(run: RunConfig, clean: Scrubber) -> dict[str, Any]:
    """Describe the project's code; ``framework`` is worldsize's commit in a separate clone."""
    code = capture_code(Path.cwd(), exclude=run.root.resolve(), include=run.include)
    patch = clean.scrub_text(code.patch.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    scrubbed = patch != code.patch
    if code.checkout is not None and get_bundle_folder().resolve().is_relative_to(Path(code.checkout).resolve()):
        own = Code()
    else:  # only digests are recorded, so private files are harmless
        own = capture_code(get_bundle_folder(), exclude=get_bundle_folder() / "runs", include=["*"])
    framework = {key: own.describe()[key] for key in ("commit", "patch_sha256")} if own.commit else None
    code = replace(code, patch=patch)
    return {**code.describe(), "scrubbed": scrubbed, "framework": framework, "patch": patch}


def _record_plugin(plugin: Plugin, include: Sequence[str], run: RunDirectory, clean: Scrubber) -> dict[str, Any]:
    """Describe a plugin, and copy it into the run folder if other hosts could not find it."""
    if plugin.foreign:
        copy = get_plugin_folder(run.plugins, plugin.name)
        copy_plugin(plugin.folder, copy, clean.scrub_text, include=include)
    return {
        "name": plugin.name,
        "source": plugin.source,
        "version": plugin.version,
        "sha256": compute_plugin_digest(plugin.folder),
        "kept": plugin.foreign,
    }


def _record_lock(run: RunDirectory, clean: Scrubber) -> dict[str, Any]:
    """Record the lock file in the working directory, or in worldsize's clone if there is none."""
    project = next(
        (folder for folder in (Path.cwd(), get_bundle_folder()) if (folder / "uv.lock").exists()), Path.cwd()
    )
    return {"lock_sha256": write_environment(run.environment, project, clean.scrub_text)}


def _describe_image(launcher: LaunchMethod) -> dict[str, Any] | None:
    """Describe the run's container image; local processes run in this process's image."""
    name = launcher.image
    if name is None and isinstance(launcher, Launcher):
        name = read_image_name(os.environ)
    return asdict(ContainerImage.from_name(name)) if name else None


def _parentage(settings: Settings, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parent and the reproducibility level of a re-created run; empty for other runs."""
    if settings.run.reproduces is None:
        return {}
    original = read_run(settings.run.reproduces).manifest
    check_data(original["data"], manifest["data"])
    if original.get("init_from") != manifest.get("init_from"):
        raise ConfigError(_other_weights(settings.config["init_from"]))
    reasons = downgrades(original, manifest)
    for each in reasons:
        _logger.info("reproducibility level downgraded to %s: %s", each.level, each.reason)
    if reasons and settings.run.strict:
        raise ConfigError("the run cannot be re-created exactly, as required by --strict; nothing was started.")
    return {"parent_run": original["run_id"], "reproducibility": asdict(downgrade_level(original, manifest, reasons))}


def _describe_cluster(plan: Plan) -> dict[str, Any]:
    """Describe the cluster, without an entry per rank; see the record's schema."""
    cluster = plan.cluster
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "spare_nodes": cluster.spare_nodes,
        "processes": plan.world_size,
        "processes_per_node": cluster.processes_per_node,
        "backend": cluster.backend,
        "device": cluster.device,
        "roles": [{"role": name, "processes": role.processes} for name, role in plan.roles.items()],
        "links": {tier: asdict(link) for tier, link in cluster.links.items()},
    }


def _determinism(settings: Settings) -> dict[str, Any]:
    cluster = settings.cluster
    return {
        "seed": settings.training.seed,
        "streams": seeds.STREAMS,
        "logical_ranks": settings.logical_ranks,
        "order": ORDER,
        "threads_per_process": cluster.threads or threads_per_process(cluster.processes_per_node),
        "environment": relevant_variables(os.environ),
        **settings.determinism.describe(),
    }
