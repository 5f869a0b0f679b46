"""What a calibration found, as plain data: measured seconds, and what they are of (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpczero.calibrate.fits import TimedProduct


@dataclass(frozen=True)
class Timing:
    """Seconds of an action: the quartiles of its turns."""

    low: float
    median: float
    high: float
    turns: int

    @property
    def spread(self) -> float:
        """How far apart the quartiles are, by the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class Moved:
    """Bytes that a rank moves."""

    bytes: int
    timing: Timing

    @property
    def rate(self) -> float:
        return self.bytes / self.timing.median


@dataclass(frozen=True)
class ProductTiming:
    """A product without what its call takes on nearly nothing, and its turns with that."""

    product: TimedProduct
    timing: Timing


@dataclass(frozen=True)
class AttentionTiming:
    """Attention of causal queries on so many keys: `operations` are the products that count."""

    keys: int
    direction: str  # "forward" or "backward"
    operations: float
    timing: Timing

    @property
    def rate(self) -> float:
        return self.operations / self.timing.median


@dataclass(frozen=True)
class KernelTiming:
    kernel: str
    precision: str
    moved: Moved


@dataclass(frozen=True)
class Sending:
    """An operation on so many bytes; `sent` are those that a rank sends, as the ledger counts."""

    operation: str
    bytes: int
    sent: int
    timing: Timing


@dataclass(frozen=True)
class Beside:
    """An operation, computing that takes longer, and both begun together."""

    operation: str
    alone: Timing
    computing: Timing
    both: Timing

    @property
    def shown(self) -> float:
        """Seconds by which computing takes longer with the operation beside it."""
        return self.both.median - self.computing.median

    @property
    def noise(self) -> float:
        """How far apart the quartiles of both lie, by the operation's time."""
        apart = (one.high - one.low for one in (self.computing, self.both))
        return sum(apart) / self.alone.median


@dataclass(frozen=True)
class DiskRates:
    """Bytes a second, and whether the page cache was avoided."""

    write: float
    read: float
    direct: bool
    bytes: int


@dataclass(frozen=True)
class Machine:
    """Where it was measured; `devices` of a node: GPUs, or the cores that its ranks may use."""

    device: str
    kind: str
    device_memory: int
    devices: int
    node_memory: int
    ranks: int
    ranks_on_node: int
    nodes: int
    threads: int
    folder: str
    file_system: str
    simulated: bool = False  # nodes that are parts of one host


@dataclass
class Findings:
    """All that was measured; what is missing or empty was not."""

    machine: Machine
    alone: Moved | None = None  # one rank's streaming pass, on its GPU or one core
    at_once: Moved | None = None  # that of each rank in the computer's memory, at the same time
    bus: Moved | None = None
    launch: Timing | None = None
    products: dict[str, list[ProductTiming]] = field(default_factory=dict)
    attention: dict[str, list[AttentionTiming]] = field(default_factory=dict)
    kernels: Sequence[KernelTiming] = ()
    inside: Sequence[Sending] = ()
    beside_inside: Sequence[Beside] = ()
    pair_alone: Timing | None = None
    pairs_at_once: Timing | None = None
    window: Moved | None = None
    between: Sequence[Sending] = ()  # one rank of each node
    between_at_once: Sequence[Sending] = ()  # all of them
    beside_between: Sequence[Beside] = ()
    disk: DiskRates | None = None
    disks_at_once: list[DiskRates] = field(default_factory=list)  # of each node
    seconds: dict[str, float] = field(default_factory=dict)  # that each part took
    notes: list[str] = field(default_factory=list)  # what was left out, and why
