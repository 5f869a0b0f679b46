"""A cluster as the planner needs it: what ranks compute on, and what lies between them (pure).

A cluster is a TOML file `<name>.toml` in one of `folders()`. Its numbers come from three places.
Peaks and sizes are those of data sheets, which `sources` names. What is `reached` of them are
shares, and the sizes at which half of that is reached: measured (`hpczero calibrate`) or fitted to
published runs. 0 stands for an unknown number where it says so. A file may leave out the links in a
node and the network: slow ones stand in, and `need_links` refuses a job that would use them.

Rates are in 10^9 bytes a second (GB/s) and 10^12 operations a second (TFLOP/s), of one direction;
memory is in 10^9 bytes, as sites count it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hpczero import env
from hpczero.errors import InputError
from hpczero.planner.needs import Hardware
from hpczero.spec.table import Line, Table
from hpczero.spec.toml import Layer, read_file
from hpczero.text import join_words, printable, toml_repr

_LOCAL = Path("clusters")  # in the current folder

Precision = Literal["fp32", "bf16", "fp16"]
Kernel = Literal["norm", "rms_norm", "gelu", "glu", "cross_entropy", "sum", "adamw"]
OperationName = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]
Share = Annotated[float, Field(gt=0, le=1)]
Hidden = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[float, Field(ge=0, le=100_000)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Microseconds = Annotated[float, Field(ge=0, le=1e6)]
Gigabytes = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class Products(Table):
    """Products of matrices in one precision.

    One of m x k and k x n reaches peak * reached * r(m) * r(n) * r(k), where r(x) = x / (x + half).
    Attention in one kernel reaches peak * attention * r(keys), with `attention_half`; its backward
    peak * attention_backward * r(keys).
    """

    peak_tflops: Rate  # of the data sheet, without sparsity
    reached: Share = 0.8  # by the largest products
    half_outer: Size = 0.0  # m and n with which half of that is reached
    half_inner: Size = 0.0  # k with which half of that is reached
    tile: Annotated[int, Field(ge=1, le=4096)] = 1  # m and n count in whole tiles
    units: Annotated[int, Field(ge=0, le=4096)] = 0  # that make a tile each; 0: one, or unknown
    unaligned: Share = 0.5  # of the rate, where a row is no multiple of 16 bytes
    attention: Share = 0.5  # of the peak, with very many keys
    attention_backward: Share = 0.4
    attention_half: Size = 0.0  # keys with which half of that is reached


class Device(Table):
    """One rank's device: a GPU, or a core of a node that has none."""

    name: Line
    kind: Literal["cuda", "cpu"]  # cuda: GPUs of AMD, too
    memory_gb: Gigabytes = 0.0  # of a GPU
    bandwidth_gb_s: Rate  # of its memory; of one core alone
    bandwidth_reached: Share = 0.85
    launch_us: Microseconds  # the host takes to start an operation
    step_us: Microseconds = 1000.0  # the host takes for a step, besides: batch, loss, log
    bus_gb_s: Rate | None = None  # between a GPU and the node's memory
    products: dict[Precision, Products] = Field(min_length=1)
    # measured of single kernels: of AdamW in place of `bandwidth_reached`, others for its median
    passes: dict[Precision, dict[Kernel, Share]] = Field(default_factory=dict)

    def reached_by(self, kernel: str, precision: str) -> float:
        """Return the share of the bandwidth that a kernel reaches; unknown ones reach the usual."""
        measured = {str(each): kernels for each, kernels in self.passes.items()}
        of_kernel = {str(name): share for name, share in measured.get(precision, {}).items()}
        return of_kernel.get(kernel, self.bandwidth_reached)


class Operation(Table):
    """A collective or message, measured: us + bytes that a rank sends / gb_s."""

    us: Microseconds
    gb_s: Rate


class Node(Table):
    """The devices of a node, and all that they share."""

    devices: Count  # GPUs, or cores
    memory_gb: Gigabytes = 0.0  # 0: unknown
    bandwidth_gb_s: Rate  # of the node's memory, all cores at once
    link_gb_s: Rate = 1.0  # a device to the others of its node, together
    link_reached: Share = 0.8
    link_us: Microseconds = 10.0  # latency of a message
    # between all ranks of a node
    operations: dict[OperationName, Operation] = Field(default_factory=dict)
    hidden: Hidden | None = None  # of data's exchanges, by computing beside them
    window_gb_s: Rate | None = None  # a rank reads in memory that the node shares, as all do
    nvme_gb: Gigabytes = 0.0  # 0: none
    nvme_gb_s: Rate | None = None

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> "Node":
        links = {name: name in self.model_fields_set for name in ("link_gb_s", "link_us")}
        files = {"nvme_gb": bool(self.nvme_gb), "nvme_gb_s": bool(self.nvme_gb_s)}
        for pair in (links, files):
            given, lacking = sorted(pair, key=pair.__getitem__, reverse=True)
            if pair[given] != pair[lacking]:
                raise ValueError(f"{lacking} is missing beside {given}")
        return self


class Network(Table):
    """The links between nodes."""

    adapters: Count = 1  # of a node
    adapter_gb_s: Rate
    reached: Share = 0.8
    latency_us: Microseconds
    oversubscription: Annotated[float, Field(ge=1, le=100)] = 1.0  # of the links between switches
    hidden: Hidden | None = None  # of data's exchanges, by computing beside them
    # between one rank of each node
    operations: dict[OperationName, Operation] = Field(default_factory=dict)


class Files(Table):
    """The file system of runs and checkpoints."""

    node_gb_s: Rate  # of one node
    all_gb_s: Rate | None = None  # of all nodes together
    read_gb_s: Rate | None = None  # by one node


class Cluster(Table):
    """Equal nodes and what is between them."""

    description: Line
    sources: tuple[Line, ...] = Field(min_length=1, strict=False)
    nodes: Annotated[int, Field(ge=0, le=10_000_000)] = 0  # that there are; 0: unknown
    device: Device
    node: Node
    network: Network = Network(adapter_gb_s=1.25, latency_us=50.0)
    files: Files | None = None

    def with_devices(self, count: int) -> "Cluster":
        """Return the cluster with so many devices on a node: those that a job has of them."""
        node = self.node.model_copy(update={"devices": count})
        return self.model_copy(update={"node": node})

    def need_links(self, ranks_on_node: int, nodes: int) -> None:
        """Refuse a job whose ranks talk over links that the file leaves out (InputError)."""
        lacking = ""
        if nodes > 1 and "network" not in self.model_fields_set:
            lacking = f"the network, which {nodes:,} nodes use (adapter_gb_s, latency_us)"
            where = "two nodes"
        elif ranks_on_node > 1 and "link_gb_s" not in self.node.model_fields_set:
            lacking = f"links in a node, which {ranks_on_node} ranks use (link_gb_s, link_us)"
            where = "several ranks"
        if lacking:
            raise InputError(
                f"the cluster's file does not have {lacking}: hpczero calibrate under mpirun on "
                f"{where} measures them, and a data sheet names them"
            )

    def need_files(self, folder: str) -> None:
        """Refuse states in a folder if the file has no storage (InputError); "" is no folder."""
        if folder and not self.node.nvme_gb_s:
            raise InputError(
                "the cluster's file has no storage in a node for zero.offload: nvme_gb and "
                "nvme_gb_s name it"
            )

    @property
    def hardware(self) -> Hardware:
        """A node as the planner of memory sees it."""
        node, device = self.node, self.device
        gpus = node.devices if device.kind == "cuda" else 0
        return Hardware(node.memory_gb, gpus, device.memory_gb if gpus else 0, node.nvme_gb)

    def products(self, precision: str) -> Products:
        """Return the rates of products; fp32 stands in for half precision that a device lacks."""
        by_precision = {str(name): rate for name, rate in self.device.products.items()}
        for name in (precision, {"bf16": "fp16", "fp16": "bf16"}.get(precision, ""), "fp32"):
            if name in by_precision:
                return by_precision[name]
        raise InputError(
            f"{self.device.name} has no rate of products in {precision}: it has those of "
            f"{join_words(sorted(by_precision))} ([device.products.{precision}])"
        )


@dataclass(frozen=True)
class Named:
    """A cluster, its name, and the file that says what it is."""

    name: str
    file: str
    cluster: Cluster


def folders() -> list[Path]:
    """Return the folders of clusters; the first that has a cluster's file wins."""
    return [_LOCAL, env.config_folder() / "clusters", env.shared_folder("clusters")]


def names() -> list[str]:
    return sorted({path.stem for path in _files()})


def _files() -> Iterator[Path]:
    for folder in folders():
        try:
            yield from sorted(path for path in folder.iterdir() if path.suffix == ".toml")
        except OSError:  # a folder that is not there, or cannot be read, has none
            continue


def find(name: str) -> Named:
    """Return the cluster of this name, or that of a file *.toml."""
    if name.endswith(".toml"):
        return _read(Path(name))
    for path in _files():
        if path.stem == name:
            return _read(path)
    raise InputError(
        f"there is no cluster {toml_repr(name)}; there are {join_words(names())}; "
        "hpczero calibrate writes one of this machine, and a path *.toml names any file"
    )


def _read(path: Path) -> Named:
    layer = read_file(str(path))
    try:
        cluster = Cluster.model_validate(layer.tree)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        wrong = "; ".join(_problem(layer, problem) for problem in problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise InputError(f"{printable(str(path))} is no cluster: {wrong}{more}") from None
    return Named(path.stem, str(path), cluster)


def _problem(layer: Layer, problem: Any) -> str:
    path = tuple(str(part) for part in problem["loc"])
    known = [path[:length] for length in range(len(path), 0, -1) if path[:length] in layer.lines]
    where = f" (line {layer.lines[known[0]]})" if known else ""
    return printable(f"{'.'.join(path)}{where}: {problem['msg']}", 200)
