"""Builds the typed cluster of a run from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worldsize.core import Cluster, Link, Spot
from worldsize.devices import default_backend
from worldsize.errors import ConfigError


def cluster_of(node: Mapping[str, Any], threads: int | None) -> Cluster:
    """Return the cluster that ``node`` describes; ``threads``: those of a process if it does not say.

    Raises:
        ConfigError: values that contradict each other.
    """
    links = {tier: Link(**link) for tier, link in (node.get("links") or {}).items()}
    return Cluster(
        name=node["name"],
        nodes=node["nodes"],
        processes=node["processes"],
        device=node["device"],
        backend=node.get("backend") or default_backend(node["device"]),
        threads=node.get("threads") or threads,
        timeout=node.get("timeout", 600.0),
        interface=node.get("interface"),
        hca=node.get("hca"),
        links=links,
        tiers=_tiers(node.get("tiers") or {}, node["nodes"]),
        device_memory=node.get("device_memory"),
        price_per_hour=node.get("price_per_hour"),
        mtbf_hours=node.get("mtbf_hours"),
        spot_market=_spot(node.get("spot_market") or {}),
        min_processes=node.get("min_processes"),
        spares=node.get("spares", 0),
        peak_flops=node.get("peak_flops"),
        debug=node.get("debug", False),
        pin=node.get("pin", "none"),
    )


def _tiers(nodes_of_unit: Mapping[str, int], nodes: int) -> dict[str, int]:
    """Return the tiers, the innermost first; a unit of each has several units of the one below.

    Raises:
        ConfigError: a tier has the name of another link, or units do not divide.
    """
    tiers = dict(sorted(nodes_of_unit.items(), key=lambda item: item[1]))
    below, told = 1, "a node"
    for name, count in tiers.items():
        if name in ("device", "node", "network"):
            raise ConfigError(f"cluster.tiers.{name} has the name of another tier. Call it rack or pod, say.")
        if count % below or count in (below, nodes) or nodes % count:
            raise ConfigError(
                f"cluster.tiers.{name}={count}: a unit must have several of {told} ({below} nodes) and divide the "
                f"{nodes} nodes into several. Set it to the nodes of one {name}, or leave it out."
            )
        below, told = count, f"a {name}"
    return tiers


def _spot(node: Mapping[str, Any]) -> Spot | None:
    if node.get("mtbf_hours") is not None:
        return Spot(node["mtbf_hours"], node.get("price_per_hour"))
    if node.get("price_per_hour") is not None:
        raise ConfigError(
            "cluster.spot_market.price_per_hour says nothing without cluster.spot_market.mtbf_hours. Set that, too."
        )
    return None
