"""Draws command lines of ``train`` with something wrong in them, the same ones from the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from omegaconf import OmegaConf

from worldsize.config.compose import compose_only

USUAL = (
    *("recipe=digits", "strategy=single", "logger=none", "steps=2", "batch_size=8", "recipe.width=2"),
    *("cluster.processes=1", "cluster.threads=1", "cluster.timeout=300"),
)
"""A run of a second, in which one thing is wrong then."""

_GROUPS = (
    "cluster",
    "strategy",
    "reproducibility",
    "optimizer",
    "schedule",
    "checkpoint",
    "autoscale",
    "logger",
    "data",
)
_VALUES: Sequence[str] = (
    *("zzword", "true", "1.5", "-1", "0", "-0.0", "1e400", "nan", "inf", "-inf", f"{10**30}", f"-{10**30}", "9" * 4400),
    *("", "null", "[]", "[1,2]", "[[]]", "[null]", "{}", "{a:1}", "{a:{b:[1]}}", "???", "1,2", "1e1", "0x10", "1_0"),
    *(
        "é",
        "数",
        "a b",
        " ",
        "a\tb",
        "a\nb",
        "\x07",
        "\x1b[31m",
        "\u202e",
        "\udcff",
        "x" * 5000,
        "-",
        "a/../b",
        "$",
        "#",
    ),
    *(
        "${nowhere}",
        "${nowhere.at.all}",
        "${oc.env:NOT_SET}",
        "${oc.env:}",
        "${",
        "${oc.decode:'['}",
        "${zz:1}",
        "${.}",
    ),
    *("'open", '"open', "[1,2", "{a:", "a:b", "a=b", "(", "]", "range(1,3)", "choice(1,2)", "int(zz)", "glob(*)", "\\"),
)
_FORMS = ("{key}={value}",) * 5 + ("+{key}={value}", "++{key}={value}", "~{key}={value}", "~{key}", "{key}")
_KEYS = ("{key}z", "z{key}", "{key}.zz", "{key}.", ".{key}", "{key}..zz", "{key}[0]", " {key}", "{key}@zz", "é{key}")
_OPTIONS = ("zzoption", "null", "", "[a,b]", "{a:1}", "../ddp", "ddp/x", "é", "a b", "1", "ddp.yaml", "none", "${seed}")
_RELATED: Sequence[Sequence[str]] = (  # each value is taken by itself, with some of the others
    ("strategy=single", "strategy=ddp", "strategy=zero", "strategy=fsdp", "strategy=mesh", "strategy=parameter_server"),
    ("cluster.processes=1", "cluster.processes=2", "cluster.processes=3", "cluster.processes_per_node=2"),
    ("cluster.nodes=1", "cluster.nodes=2", "cluster.nodes=3"),
    ("batch_size=1", "batch_size=7", "batch_size=8", "batch_size=null"),
    ("logical_ranks=null", "logical_ranks=2", "logical_ranks=5"),
    ("precision=fp32", "precision=fp16", "precision=bf16", "precision=fp8", "precision=fp64"),
    ("reproducibility=elastic", "reproducibility=deterministic", "reproducibility=fast"),
    ("cluster.device=cpu", "cluster.device=cuda", "cluster.device=mps", "cluster.device=null"),
    ("cluster.backend=gloo", "cluster.backend=nccl", "cluster.backend=zz"),
    ("steps=2 epochs=1", "steps=null", "steps=null epochs=0.01", "epochs=0"),
    ("evaluate_every=0", "early_stopping.metric=loss", "schedule_metric=loss", "checkpoint.keep.best=accuracy"),
    ("schedule=plateau", "schedule=chained", "schedule.warmup=1", "optimizer=muon", "optimizer=adamw_schedule_free"),
    ("+strategy.on_failure=heal", "cluster.spares=1", "cluster.min_processes=3", "cluster.spare_nodes=1"),
    ("autoscale=schedule", "autoscale=file", "+strategy.tensor=2", "+strategy.pipeline=2", "+strategy.servers=2"),
    ("activation_offload=true", "activation_checkpointing=full", "compile_mode=reduce-overhead", "ema.decay=0.9"),
    ("data=tokens", "data=images", "length_balanced=true", "evaluation.splits=[]", "evaluation.splits=[zz]"),
    ("cluster.links.device.bandwidth=1", "cluster.tiers.rack=2", "cluster.topology=zz", "cluster.hosts=[a,b]"),
    ("cluster=torchrun", "cluster=ssh", "cluster=node", "cluster=kubernetes"),
    ("run.evaluates=zz", "run.reproduces=zz", "run.strict=true", "init_from=zz", "init_from=~zz/x"),
)


def drawn(count: int, *, seed: int) -> list[list[str]]:
    """Draw ``count`` different command lines, without the words of :data:`USUAL`."""
    draw, keys, found = Random(seed), _keys(), dict[tuple[str, ...], None]()
    while len(found) < count:
        found[tuple(_one(draw, keys))] = None
    return [list(words) for words in found]


def _one(draw: Random, keys: Sequence[str]) -> list[str]:
    kind = draw.random()
    if kind < 0.25:
        return _related(draw)
    if kind < 0.33:
        sign = draw.choice(("", "", "+", "++", "~"))
        return [f"{sign}{draw.choice(_GROUPS)}={draw.choice(_OPTIONS)}"]
    key, value = draw.choice(keys), draw.choice(_VALUES)
    if kind < 0.43:
        return [f"{_misspelt(draw, key)}={draw.choice(('1', value))}"]
    if kind < 0.48:
        return [f"{key}={value}", f"{draw.choice(('', '+', '++', '~'))}{key}={draw.choice(_VALUES)}"]
    return [draw.choice(_FORMS).format(key=key, value=value)]


def _related(draw: Random) -> list[str]:
    rows = draw.sample(_RELATED, draw.choice((1, 2, 2, 3)))
    return [word for row in rows for word in draw.choice(row).split()]


def _misspelt(draw: Random, key: str) -> str:
    if draw.random() < 0.4:
        return draw.choice(_KEYS).format(key=key)
    place = draw.randrange(len(key))
    return key[:place] + draw.choice(("", "z", key[place] * 2)) + key[place + 1 :]


def _keys() -> list[str]:
    """Return every key of the composed configuration, including nested keys."""
    plain: Any = OmegaConf.to_container(compose_only(list(USUAL)))
    return sorted(_below(plain, ""))


def _below(node: dict[str, Any], above: str) -> list[str]:
    return [
        key
        for name, child in node.items()
        for key in (f"{above}{name}", *(_below(child, f"{above}{name}.") if isinstance(child, dict) else []))
    ]
