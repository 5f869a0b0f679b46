"""Model states that a rank holds at each stage of ZeRO (Rajbhandari et al. 2020), in bytes (pure).

A stage is data: what is cut into shards over the data ranks. The engine allocates exactly these
sizes and the planner predicts them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpczero.parallel.layout import UnitLayout
from hpczero.spec.schema import Optimizer, Zero

SLOTS = 2  # unit-sized buffers in flight where gradients, or parameters, are sharded

# The kinds that zero.offload takes from a device to the computer's memory: the CPU steps them.
ON_HOST = ("master", "moments", "average", "gradient of a unit")
_HOST = " on the host"
KINDS_ON_HOST = ("offload", *(kind + _HOST for kind in (*ON_HOST, "gradients", "weights")))
# States in files: what is read and written at a time, and in how many sets of buffers: one is read,
# one is worked on, one is written.
PAGE = 4096  # bytes: direct I/O is of whole ones
PIECE = 1 << 20  # elements
SETS = 3


@dataclass(frozen=True)
class Sharded:
    """States that are cut into shards over the data ranks."""

    optimizer: bool
    gradients: bool
    parameters: bool

    @classmethod
    def at_stage(cls, stage: int, node_shared: bool) -> "Sharded":
        """Return what a stage cuts; parameters of which a node keeps one copy are not cut."""
        return cls(stage >= 1, stage >= 2, stage >= 3 and not node_shared)

    @property
    def read_by_others(self) -> str:
        """Kind of states that the ranks of a node read from each other, besides the weights."""
        return "gradient slots" if self.gradients else "gradients"


@dataclass(frozen=True)
class Precision:
    weight: int  # bytes of a parameter in the model
    accumulates: bool  # several micro-batches are summed, in fp32

    @property
    def gradient(self) -> int:
        """Bytes of a parameter's gradient."""
        return 4 if self.accumulates else self.weight


@dataclass(frozen=True)
class UpdateMemory:
    """The fp32 states that an update keeps.

    `moments`: values of each owned element, besides the master weight; `average`: one more, the
    average of the weights. `by_torch`: PyTorch's optimizer gets the gradient of one unit at a time.
    """

    moments: int = 2
    average: bool = False
    by_torch: bool = False

    @property
    def of_element(self) -> int:
        """Bytes of an owned element in a checkpoint."""
        return 4 * (1 + self.moments + self.average)

    def streamed(self, separate_master: bool) -> int:
        """Return the number of states that a step moves through memory, where they are in files."""
        return 0 if self.by_torch else self.moments + separate_master

    def temporary(self, units: Sequence[UnitLayout], sharded: Sharded) -> int:
        """Return the most bytes of PyTorch's tensors in a step, which makes its states at first."""
        return (2 + self.moments) * 4 * _largest_owned(units, sharded) if self.by_torch else 0


ADAMW = UpdateMemory()
_MOMENTS = {"lion": 1}


def memory_of(optimizer: Optimizer) -> UpdateMemory:
    """Return what hpczero's own update of this name keeps."""
    return UpdateMemory(_MOMENTS.get(optimizer.name, ADAMW.moments))


@dataclass(frozen=True)
class Offload:
    """The ways of zero.offload: from a device to the computer's memory, and from memory to files.

    Where both are, states go from the device to files.
    """

    from_device: bool = False
    to_files: bool = False


def shares_nodes(zero: Zero, ranks_on_nodes: Collection[int], alike: bool = True) -> bool:
    """Return True if the data ranks of a node share one copy of the weights.

    They do if asked to; by default wherever a node has several. At stage 3 sharing means a whole
    copy of the parameters per node, so there the default needs all ranks to be on one node.
    Ranks never share unless nodes divide the data ranks `alike` for all tensor ranks
    (`Grid.nodes_cut_data_alike`): what tensor ranks hold in common would no longer be equal.
    """
    several = alike and max(ranks_on_nodes) > 1
    if zero.node_shared == "auto":
        return several and (zero.stage < 3 or len(ranks_on_nodes) == 1)
    return zero.node_shared and several


def state_bytes(
    units: Sequence[UnitLayout],
    sharded: Sharded,
    precision: Precision,
    shared: bool,
    around: int = 0,
    update: UpdateMemory = ADAMW,
    from_device: bool = False,
) -> dict[str, int]:
    """Return the bytes of one rank's states, by kind.

    `shared`: the ranks of a node keep one copy of the weights. `around`: elements of the units that
    are in use while others are. `from_device`: those of `ON_HOST` are not on the device.
    fp32 weights of the model serve as master weights only if this rank owns all of them, they lie
    where it steps them, and no other rank uses them.
    """
    whole = sum(unit.size for unit in units)
    shards = sum(unit.shard_size for unit in units)
    owned = shards if sharded.optimizer else whole
    largest = max(unit.size for unit in units)
    used_elsewhere = from_device or (shared and not sharded.optimizer)
    separate_master = precision.weight < 4 or used_elsewhere
    of_update = {
        "average": owned * 4 if update.average else 0,
        "gradient of a unit": 4 * _largest_owned(units, sharded) if update.by_torch else 0,
    }
    return {
        "weights": (shards if sharded.parameters else whole) * precision.weight,
        "master": owned * 4 if separate_master else 0,
        "moments": owned * 4 * update.moments,
        "gradients": (shards if sharded.gradients else whole) * precision.gradient,
        "gradient slots": SLOTS * largest * precision.weight if sharded.gradients else 0,
        "gather slots": (SLOTS * largest + around) * precision.weight if sharded.parameters else 0,
    } | {kind: size for kind, size in of_update.items() if size}


def bytes_in_places(
    units: Sequence[UnitLayout],
    sharded: Sharded,
    precision: Precision,
    shared: bool,
    around: int,
    update: UpdateMemory,
    offload: "Offload",
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of one rank's states in memory, and in its file, by kind."""
    moved = offload.from_device
    sizes = state_bytes(units, sharded, precision, shared, around, update, moved)
    files = in_files(units, sharded, sizes, update) if offload.to_files else {}
    stream = {"offload": stream_bytes(units, sharded, sizes, update)} if files else {}
    copies = copies_on_host(units, sharded, precision) if moved and not update.by_torch else {}
    return named_by_place(sizes | dict.fromkeys(files, 0), moved) | stream | copies, files


def in_files(
    units: Sequence[UnitLayout],
    sharded: Sharded,
    sizes: Mapping[str, int],
    update: UpdateMemory = ADAMW,
) -> dict[str, int]:
    """Return the bytes of one rank's file, by kind, where `state_bytes` has these sizes."""
    owned = (unit.shard_size if sharded.optimizer else unit.size for unit in units)
    pages = sum(whole_pages(4 * count) for count in owned)
    found = {"master": pages if sizes["master"] else 0, "moments": pages * update.moments}
    return {kind: size for kind, size in found.items() if size}


def stream_bytes(
    units: Sequence[UnitLayout],
    sharded: Sharded,
    sizes: Mapping[str, int],
    update: UpdateMemory = ADAMW,
) -> int:
    """Return the memory through which states in a file pass in a step."""
    piece = whole_pages(4 * min(PIECE, _largest_owned(units, sharded)))
    return SETS * update.streamed(sizes["master"] > 0) * piece


def copies_on_host(
    units: Sequence[UnitLayout], sharded: Sharded, precision: Precision
) -> dict[str, int]:
    """Return the pinned memory through which a device's gradients and weights come and go."""
    owned = sum(unit.shard_size if sharded.optimizer else unit.size for unit in units)
    piece = min(PIECE, _largest_owned(units, sharded))
    return {
        "gradients" + _HOST: owned * _stepped(sharded, precision),
        "weights" + _HOST: SETS * piece * precision.weight,
    }


def bytes_over_bus(units: Sequence[UnitLayout], sharded: Sharded, precision: Precision) -> int:
    """Return the bytes of gradients and new weights that a step copies, if states are elsewhere."""
    owned = sum(unit.shard_size if sharded.optimizer else unit.size for unit in units)
    return owned * (_stepped(sharded, precision) + precision.weight)


def _stepped(sharded: Sharded, precision: Precision) -> int:
    """Return the bytes of a parameter's summed gradient."""
    return precision.gradient if sharded.gradients else precision.weight


def named_by_place(sizes: Mapping[str, int], from_device: bool) -> dict[str, int]:
    """Return the bytes in memory; kinds of a device's states that the computer has say so."""
    return {
        kind + _HOST if from_device and kind in ON_HOST else kind: size
        for kind, size in sizes.items()
    }


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _largest_owned(units: Sequence[UnitLayout], sharded: Sharded) -> int:
    return max(unit.shard_size if sharded.optimizer else unit.size for unit in units)
