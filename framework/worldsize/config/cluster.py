"""Builds the typed cluster of a run from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worldsize.core import Cluster, Link, Spot
from worldsize.devices import default_backend
from worldsize.errors import ConfigError


def cluster_of(node: Mapping[str, Any], threads: int | None, data_workers: int | str = 0) -> Cluster:
    """Return the cluster that ``node`` describes.

    Args:
        node: The section ``cluster`` of the configuration.
        threads: Threads of each process if ``node`` does not give them.
        data_workers: Processes that load the data of each process; "auto" counts as one.

    Raises:
        ConfigError: values that contradict each other.
    """
    links = {tier: Link(**link) for tier, link in (node.get("links") or {}).items()}
    tiers, around = _tiers(node.get("tiers") or {}, node["nodes"])
    if around in links:
        links["network"] = links[around]
    threads = node.get("threads") or threads
    loading = 1 if data_workers == "auto" else int(data_workers)
    return Cluster(
        name=node["name"],
        nodes=node["nodes"],
        processes=node["processes"],
        device=node["device"],
        backend=node.get("backend") or default_backend(node["device"]),
        threads=threads,
        cpus_per_process=(threads or 1) + loading,
        timeout=node.get("timeout", 600.0),
        interface=node.get("interface"),
        hca=node.get("hca"),
        links=links,
        tiers=tiers,
        device_memory=node.get("device_memory"),
        price_per_hour=node.get("price_per_hour"),
        mtbf_hours=node.get("mtbf_hours"),
        spot_market=_spot(node.get("spot_market") or {}),
        min_processes=node.get("min_processes"),
        spares=node.get("spares", 0),
        spare_nodes=node.get("spare_nodes", 0),
        peak_flops=node.get("peak_flops"),
        debug=node.get("debug", False),
        pin=node.get("pin", "none"),
    )


def tier_around(node: Mapping[str, Any]) -> str:
    """Return the innermost tier of which one unit has all nodes of ``node``: its link is their network; "": none."""
    return _tiers(node.get("tiers") or {}, node["nodes"])[1]


def _tiers(nodes_of_unit: Mapping[str, int], nodes: int) -> tuple[dict[str, int], str]:
    """Return the tiers, the innermost first; a unit of each has several units of the one below.

    A tier of which one unit has room for all nodes is left out.

    Returns:
        The tiers that are crossed, and the innermost one that is left out, whose link is the network of these nodes;
        "": none is.

    Raises:
        ConfigError: a tier has the name of another link, or units do not divide.
    """
    tiers: dict[str, int] = {}
    below, told, around = 1, "a node", ""
    for name, count in sorted(nodes_of_unit.items(), key=lambda item: item[1]):
        if name in ("device", "node", "network"):
            raise ConfigError(f"cluster.tiers.{name} has the name of another tier. Call it rack or pod, say.")
        if count % below or count == below or (count < nodes and nodes % count):
            raise ConfigError(
                f"cluster.tiers.{name}={count}: a unit must have several of {told} ({below} nodes) and divide the "
                f"{nodes} nodes, or have them all. Set it to the nodes of one {name}, or leave it out."
            )
        below, told = count, f"a {name}"
        if count < nodes:
            tiers[name] = count
        else:
            around = around or name
    return tiers, around


def _spot(node: Mapping[str, Any]) -> Spot | None:
    if node.get("mtbf_hours") is not None:
        return Spot(node["mtbf_hours"], node.get("price_per_hour"))
    if node.get("price_per_hour") is not None:
        raise ConfigError(
            "cluster.spot_market.price_per_hour says nothing without cluster.spot_market.mtbf_hours. Set that, too."
        )
    return None
