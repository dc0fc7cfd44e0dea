"""Builds the typed cluster of a run: its shape, the tiers above its nodes, and its network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from worldsize.config.section import build_dataclass, build_section_schema
from worldsize.core import Cluster, LaunchMethod, Link, Range, Spot
from worldsize.core.limits import check_limits
from worldsize.devices import default_backend
from worldsize.errors import ConfigError, neighbours
from worldsize.world.topology import Topology, tier_names


def build_cluster(node: Mapping[str, Any], threads: int | None, data_workers: int | str = 0) -> Cluster:
    """Build the cluster from its configuration section.

    Args:
        node: The section ``cluster`` of the configuration.
        threads: Threads per process, if ``node`` does not specify them.
        data_workers: Data workers per process; "auto" counts as one.

    Raises:
        ConfigError: values contradict each other.
    """
    tiers, around = _select_tiers(node.get("tiers") or {}, node["nodes"])
    links = dict(node.get("links") or {})
    if around in links:
        links["network"] = links[around]
    threads = node.get("threads") or threads
    return build_dataclass(
        Cluster,
        {**node, "links": links, "tiers": tiers},
        backend=node.get("backend") or default_backend(node["device"]),
        threads=threads,
        cpus_per_process=(threads or 1) + (1 if data_workers == "auto" else int(data_workers)),
        spot_market=_build_spot(node.get("spot_market") or {}),
    )


def tier_around(node: Mapping[str, Any]) -> str:
    """Return the innermost tier with all nodes in one unit, whose link is their network; "" if there is none."""
    return _select_tiers(node.get("tiers") or {}, node["nodes"])[1]


def _select_tiers(nodes_of_unit: Mapping[str, int], nodes: int) -> tuple[dict[str, int], str]:
    """Return the tiers that split the nodes into several units, innermost first.

    A unit of a tier consists of several units of the tier below.

    Returns:
        These tiers, and the innermost omitted tier, whose link is the network of all nodes ("" if none).

    Raises:
        ConfigError: a tier has a reserved name, or the nodes or units of tiers do not divide evenly.
    """
    tiers: dict[str, int] = {}
    below, told, around = 1, "a node", ""
    for name, count in sorted(nodes_of_unit.items(), key=lambda item: item[1]):
        if name in ("device", "node", "network"):
            raise ConfigError(
                f"cluster.tiers.{name}: the name is reserved for a built-in tier. "
                "Use a different name, e.g. rack or pod."
            )
        if count % below or count == below or (count < nodes and nodes % count):
            raise ConfigError(
                f"cluster.tiers.{name}={count} must be a multiple of {below} ({told}), greater than {below}, and "
                f"either a divisor of the {nodes} nodes or larger than {nodes}. Set it to the number of nodes per "
                f"{name}, or remove the tier."
            )
        below, told = count, f"a {name}"
        if count < nodes:
            tiers[name] = count
        else:
            around = around or name
    return tiers, around


def _build_spot(node: Mapping[str, Any]) -> Spot | None:
    if node.get("mtbf_hours") is not None:
        return build_dataclass(Spot, node)
    if node.get("price_per_hour") is not None:
        raise ConfigError(
            "cluster.spot_market.price_per_hour has no effect without cluster.spot_market.mtbf_hours. Set both."
        )
    return None


@dataclass(frozen=True)
class _LinkedTier(Link):
    """Configuration of a tier: number of nodes per unit, and the keys of its link."""

    nodes: Annotated[int, Range(least=1, most=1_000_000)] = 1


def normalize_tiers(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster with each tier reduced to its number of nodes, and the tiers' links moved to ``links``.

    Raises:
        ConfigError: a tier is neither a number nor a mapping with ``nodes`` and the keys of a link.
    """
    tiers, links = dict(cluster.get("tiers") or {}), dict(cluster.get("links") or {})
    for name, given in tiers.items():
        key = f"cluster.tiers.{name}"
        values = _parse_tier_link(key, given) if isinstance(given, Mapping) else {"nodes": given}
        if not isinstance(values["nodes"], int) or isinstance(values["nodes"], bool):
            raise ConfigError(f"{key}={given!r} is not a number of nodes. Set e.g. {key}=8.")
        check_limits(_LinkedTier, values, key=key)
        tiers[name] = values.pop("nodes")
        links |= {name: values} if values else {}
    return {**cluster, "tiers": tiers, "links": links}


def _parse_tier_link(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[Any, Any] = {"nodes": None, **given}
        merged = OmegaConf.merge(OmegaConf.structured(build_section_schema(_LinkedTier)), values)
        plain: Any = OmegaConf.to_container(merged, throw_on_missing=True)
    except ConfigKeyError as error:
        name = str(error.key)
        raise ConfigError(f"unknown key '{key}.{name}'{neighbours(name, _LinkedTier.__dataclass_fields__)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{key}: {str(error.msg or error).splitlines()[0]}. "
            f"Set {key}={{nodes: NODES, bandwidth: BYTES_PER_SECOND, latency: SECONDS}}."
        ) from error
    return dict(plain)


def check_topology(topology: str | None, launcher: LaunchMethod) -> None:
    """Raise ConfigError if a topology file is set, but ``launcher`` does not order hosts."""
    if topology is not None and not launcher.orders_hosts:
        raise ConfigError(
            f"cluster.topology={topology} is not supported with {type(launcher).__name__}. Remove cluster.topology, or "
            "use cluster=ssh or slurm."
        )


def apply_topology(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster with its hosts in the order of ``cluster.topology``, and the resulting tiers.

    Hosts chosen by a scheduler are not known yet; its agents order them later. Configured tiers must match the file.

    Raises:
        ConfigError: the file cannot be read, does not list a host, or defines different tiers.
    """
    if cluster.get("topology") is None:
        return dict(cluster)
    is_spread = cluster.get("placement") == "spread"
    if is_spread and cluster.get("tiers"):
        raise ConfigError(
            "cluster.placement=spread is not supported with cluster.tiers, because the ranks of a rack would not be "
            "consecutive. Set only one of them."
        )
    topology = Topology.read(Path(cluster["topology"]), is_spread=is_spread)
    if "hosts" not in cluster:
        return dict(cluster)
    count = len(cluster["hosts"]) - cluster.get("spare_nodes", 0)
    hosts, spare = topology.order_hosts(cluster["hosts"][:count]), cluster["hosts"][count:]
    if is_spread:
        return {**cluster, "hosts": [*hosts, *spare]}
    tiers = dict(zip(tier_names(), topology.count_hosts_per_switch(hosts), strict=False))
    if cluster.get("tiers"):
        topology.check_tiers(hosts, cluster["tiers"])
        tiers = cluster["tiers"]
    return {**cluster, "hosts": [*hosts, *spare], "tiers": tiers}
