"""`hpczero cluster list` and `show`: the clusters that jobs can be planned for."""

import json
import sys
from argparse import Namespace

from hpczero.errors import InputError, for_terminal
from hpczero.planner.cluster import Cluster, Named, find, folders, names
from hpczero.text import printable


def list_(options: Namespace) -> int:
    found, problems = [], []
    for name in names():
        try:
            found.append(find(name))
        except InputError as error:
            problems.append(str(error))
    for problem in problems:
        print(for_terminal(f"hpczero: WARN {problem}"), file=sys.stderr)
    if options.json:
        rows = [{"cluster": one.name, "file": one.file, **_in_short(one.cluster)} for one in found]
        print(json.dumps(rows, indent=2))
        return 0
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        print(for_terminal(f"{one.name:<{width}}  {one.cluster.description}"))
    print(f"\nlooked for in {', '.join(printable(str(folder)) for folder in folders())}")
    return 0


def _in_short(cluster: Cluster) -> dict[str, object]:
    return {
        "description": cluster.description,
        "device": cluster.device.name,
        "devices": cluster.node.devices,
    }


def show(options: Namespace) -> int:
    named = find(options.name)
    if options.json:
        data = {"cluster": named.name, "file": named.file} | named.cluster.model_dump()
        print(json.dumps(data, indent=2))
        return 0
    print("\n".join(map(for_terminal, in_lines(named))))
    return 0


def in_lines(named: Named) -> list[str]:
    """Return a cluster for people to read."""
    cluster = named.cluster
    device, node, network = cluster.device, cluster.node, cluster.network
    memory = f"{device.memory_gb:g} GB at " if device.memory_gb else ""
    nodes = f", {cluster.nodes:,} of them" if cluster.nodes else ""
    lines = [
        f"{named.name}: {cluster.description}",
        f"  file      {printable(named.file)}",
        f"  device    {device.name}: {memory}{_share(device.bandwidth_gb_s, 'GB/s')}"
        f" ({device.bandwidth_reached:.0%} of it reached), {device.launch_us:g} us to start"
        " an operation",
    ]
    if device.bus_gb_s:
        lines.append(f"            {_share(device.bus_gb_s, 'GB/s')} to the node's memory each way")
    for precision, products in sorted(device.products.items()):
        lines.append(
            f"  {precision:<9} {_share(products.peak_tflops, 'TFLOP/s')} at most,"
            f" {products.reached:.0%} of it by the largest products, half of that from"
            f" {products.half_outer:g} rows or columns, and {products.half_inner:g} in between"
        )
    memory = f"{node.memory_gb:,.0f} GB at " if node.memory_gb else ""
    lines += [
        f"  a node    {node.devices} devices, {memory}{_share(node.bandwidth_gb_s, 'GB/s')}{nodes};"
        + (
            f" {_share(node.link_gb_s, 'GB/s')} from a device to the others"
            f" ({node.link_reached:.0%} reached), {node.link_us:g} us"
            if "link_gb_s" in node.model_fields_set
            else " its links are not in the file"
        ),
        f"  network   {network.adapters} x {_share(network.adapter_gb_s, 'GB/s')} a node"
        f" ({network.reached:.0%} reached), {network.latency_us:g} us"
        + (f", switches 1 : {network.oversubscription:g}" if network.oversubscription > 1 else "")
        if "network" in cluster.model_fields_set
        else "  network   not in the file: for jobs on one node",
    ]
    if node.nvme_gb and node.nvme_gb_s:
        lines.append(f"  NVMe      {node.nvme_gb:,.0f} GB at {_share(node.nvme_gb_s, 'GB/s')}")
    if cluster.files:
        lines.append(f"  files     {_share(cluster.files.node_gb_s, 'GB/s')} from a node")
    return [*lines, *(f"  source    {source}" for source in cluster.sources)]


def _share(rate: float, unit: str) -> str:
    return f"{rate:,.4g} {unit}"
