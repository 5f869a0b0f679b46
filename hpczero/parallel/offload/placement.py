"""The memory of an engine's states: on its device, in the computer's memory, or in a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.offload.state_file import StateFile
from hpczero.parallel.states import ON_HOST, Sharded, UpdateMemory, in_files
from hpczero.parallel.zero.buffers import Arena
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.spec.schema import Zero


def place_states(
    axis: DataAxis,
    layouts: Sequence[UnitLayout],
    sharded: Sharded,
    sizes: Mapping[str, int],
    update: UpdateMemory,
    zero: Zero,
) -> tuple[Arena, StateFile | None]:
    """Return an arena for states of these `sizes`, and the file that has some of them."""
    sizes = dict(sizes)
    file = None
    in_file = in_files(layouts, sharded, sizes, update) if zero.folder else {}
    if in_file:  # an optimizer of PyTorch may keep nothing
        file = StateFile(Path(zero.folder), in_file)
        sizes |= in_file
    of_file = file.blocks if file else {}
    seen = sharded.read_by_others
    blocks = axis.allocate(once={"weights": sizes["weights"]}, each={seen: sizes[seen]})
    if leaves_device(axis, zero):
        pinned = (kind for kind in ON_HOST if kind in sizes and kind not in of_file)
        blocks |= {kind: axis.device.pinned(sizes[kind]) for kind in pinned}
    return Arena(sizes, blocks, axis.device.torch, of_file), file


def leaves_device(axis: DataAxis, zero: Zero) -> bool:
    """Return True if states that would be on a device are not."""
    return zero.offload != "none" and axis.device.has_queues
