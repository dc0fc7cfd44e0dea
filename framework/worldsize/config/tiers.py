"""Determines the tiers between nodes and the network from the configuration and a file of switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from worldsize.config.schema import LinkSchema
from worldsize.core import LaunchMethod, Range
from worldsize.core.limits import check_limits
from worldsize.errors import ConfigError, neighbours
from worldsize.world.topology import Topology, tier_names


@dataclass
class _TierSchema(LinkSchema):
    """A tier with its link."""

    nodes: Annotated[int, Range(least=1, most=1_000_000)] = 1


def with_tiers(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster with each tier as its number of nodes, and with the links that its tiers have.

    Raises:
        ConfigError: a tier is neither a number nor a mapping with ``nodes`` and the keys of a link.
    """
    tiers, links = dict(cluster.get("tiers") or {}), dict(cluster.get("links") or {})
    for name, given in tiers.items():
        key = f"cluster.tiers.{name}"
        values = _link(key, given) if isinstance(given, Mapping) else {"nodes": given}
        if not isinstance(values["nodes"], int) or isinstance(values["nodes"], bool):
            raise ConfigError(f"{key}={given!r} is no number of nodes. Set {key}=8, say.")
        check_limits(_TierSchema, values, key=key)
        tiers[name] = values.pop("nodes")
        links |= {name: values} if values else {}
    return {**cluster, "tiers": tiers, "links": links}


def _link(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[Any, Any] = {"nodes": None, **given}
        merged = OmegaConf.merge(OmegaConf.structured(_TierSchema), values)
        plain: Any = OmegaConf.to_container(merged, throw_on_missing=True)
    except ConfigKeyError as error:
        name = str(error.key)
        raise ConfigError(f"no key '{key}.{name}'{neighbours(name, _TierSchema.__dataclass_fields__)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{key}: {str(error.msg or error).splitlines()[0]}. "
            f"Set {key}={{nodes: NODES, bandwidth: BYTES_A_SECOND, latency: SECONDS}}."
        ) from error
    return dict(plain)


def check_topology(topology: str | None, launcher: LaunchMethod) -> None:
    """Raise ConfigError if a file is to order hosts, and ``launcher`` does not."""
    if topology is not None and not launcher.orders_hosts:
        raise ConfigError(
            f"cluster.topology={topology}: {type(launcher).__name__} does not order its hosts by a file. Leave it out, "
            "or choose cluster=ssh or slurm."
        )


def with_topology(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster with its hosts in the order of ``cluster.topology``, and the tiers that these make.

    A scheduler's hosts are known later: its agents order them. Tiers that are set must be those of the file.

    Raises:
        ConfigError: the file cannot be read, lacks a host, or makes other tiers.
    """
    if cluster.get("topology") is None:
        return dict(cluster)
    is_spread = cluster.get("placement") == "spread"
    if is_spread and cluster.get("tiers"):
        raise ConfigError(
            "cluster.placement=spread takes hosts from the racks in turn, so that no rack of cluster.tiers has "
            "consecutive ranks. Leave out one of them."
        )
    topology = Topology.read(Path(cluster["topology"]), is_spread=is_spread)
    if "hosts" not in cluster:
        return dict(cluster)
    count = len(cluster["hosts"]) - cluster.get("spare_nodes", 0)
    hosts, spare = topology.ordered(cluster["hosts"][:count]), cluster["hosts"][count:]
    if is_spread:
        return {**cluster, "hosts": [*hosts, *spare]}
    tiers = dict(zip(tier_names(), topology.sizes(hosts), strict=False))
    if cluster.get("tiers"):
        topology.check(hosts, cluster["tiers"])
        tiers = cluster["tiers"]
    return {**cluster, "hosts": [*hosts, *spare], "tiers": tiers}
