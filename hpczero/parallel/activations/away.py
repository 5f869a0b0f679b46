"""Kept tensors that are somewhere else from forward to backward: cut over ranks, or on the host.

What a layer keeps in a forward makes a *bundle*. Backward goes through the bundles in reverse:
whoever asks for a tensor has the bundle before fetched as well, so that it is here when its turn
comes.

`Shards`: tensor ranks hold the same inputs of blocks, so each keeps a part, and gathers the whole
(the partitioned activations of Rajbhandari et al. 2020). `HostCopies`: a device's tensors go to
pinned memory of the computer, in a queue beside the computation; two bundles are on the device.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpczero.comm.group import Group, Work, shard
from hpczero.device import Device, Mark
from hpczero.parallel.activations.recompute import Call, Keeper

_SMALL = 1 << 16  # bytes: less is not worth a copy


class Parcel(ABC):
    """Memory that is away; it lives as long as autograd keeps a tensor of it."""

    def settle(self) -> None:  # noqa: B027
        """Return once its place here is free."""

    @abstractmethod
    def fetch(self) -> None:
        """Begin to bring it back."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return it, flat, when it is here."""


class Way(ABC):
    """A way in which tensors are sent away."""

    @abstractmethod
    def send(self, tensor: Tensor, bundle: "Bundle") -> "Sent | None":
        """Send the memory under a tensor, if it has not been sent in this bundle.

        None: it stays.
        """


@dataclass(frozen=True)
class Sent:
    """A tensor in a parcel."""

    parcel: Parcel
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Bundle:
    """A layer's forward, and what it has sent away."""

    def __init__(self, before: "Bundle | None") -> None:
        self.before = before
        self.parcels = weakref.WeakValueDictionary[int, Parcel]()  # by address, or by number
        self._is_fetched = False

    def settle(self) -> None:
        for parcel in list(self.parcels.values()):
            parcel.settle()

    def fetch(self) -> None:
        if not self._is_fetched:
            self._is_fetched = True
            for parcel in list(self.parcels.values()):
                parcel.fetch()


class Bundles:
    """The bundles of a chunk's layers, which run one after the other."""

    def __init__(self) -> None:
        self.newest = Bundle(None)

    def begun_by(self, call: Call, is_first: bool) -> Call:
        """Return a layer whose forward begins a bundle; `is_first`: of the chunk."""

        def run(x: Tensor, batch: Any) -> Tensor:
            if torch.is_grad_enabled():
                before = None if is_first else self.newest
                if before and before.before:
                    before.before.settle()
                self.newest = Bundle(before)
            return call(x, batch)

        return run


class Away:
    """A keeper that sends away what layers keep."""

    def __init__(self, bundles: Bundles, way: Way, inner: Keeper) -> None:
        """`inner` has what stays."""
        self._bundles = bundles
        self._way = way
        self._inner = inner

    def pack(self, tensor: Tensor) -> Any:
        kept = self._inner.pack(tensor)
        bundle = self._bundles.newest
        sent = self._way.send(kept, bundle) if isinstance(kept, Tensor) else None
        return (None, kept) if sent is None else (bundle, sent)

    def unpack(self, kept: Any) -> Tensor:
        bundle, what = kept
        if bundle is None:
            return self._inner.unpack(what)
        bundle.fetch()
        if bundle.before:
            bundle.before.fetch()
        values: Tensor = what.parcel.values().view(what.dtype)
        return values.as_strided(what.shape, what.stride, what.offset)


def kept_by(keeper: Keeper, call: Call) -> Call:
    """Return a layer all of whose kept tensors the keeper has."""

    def run(x: Tensor, batch: Any) -> Tensor:
        with saved_tensors_hooks(keeper.pack, keeper.unpack):
            return call(x, batch)

    return run


# -- cut over the tensor ranks


class Shards(Way):
    """Each rank keeps its part of a tensor that all ranks of a group have."""

    def __init__(self, group: Group, host: "HostCopies | None" = None) -> None:
        """`host` has the parts, in place of the device."""
        self._group = group
        self._host = host

    def send(self, tensor: Tensor, bundle: Bundle) -> Sent | None:
        if not tensor.is_floating_point():
            return None
        tensor = tensor.contiguous()
        parcel = _Shard(tensor.view(-1), self._group, self._host)
        bundle.parcels[len(bundle.parcels)] = parcel
        return Sent(parcel, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


class _Shard(Parcel):
    def __init__(self, whole: Tensor, group: Group, host: "HostCopies | None") -> None:
        self._group = group
        self._count = whole.numel()
        self._dtype = whole.dtype
        own = whole[shard(self._count, group.size, group.rank)].clone()
        self._own = host.copy_of(own) if host else _Here(own)
        self._whole: Tensor | None = None
        self._work: Work | None = None

    def settle(self) -> None:
        self._own.settle()

    def fetch(self) -> None:
        self._own.fetch()
        own = self._own.values().view(self._dtype)
        self._whole = own.new_empty(self._count)
        self._work = self._group.start_all_gather(self._whole, own, "activations")

    def values(self) -> Tensor:
        if self._work:
            self._work.wait()
            self._work = None
        assert self._whole is not None
        return self._whole


class _Here(Parcel):
    """Memory that stays."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def fetch(self) -> None:
        """There is nothing to do."""

    def values(self) -> Tensor:
        return self._values


# -- on the host


class HostCopies(Way):
    """A device's tensors go to the computer's memory, storage by storage."""

    def __init__(self, device: Device, stay: Iterable[Tensor]) -> None:
        """`stay`: tensors whose storages live longer anyway (weights, a module's buffers)."""
        self.device = device
        self._queue = device.queue()
        self._stay = {tensor.untyped_storage().data_ptr() for tensor in stay}
        self._free: dict[int, list[tuple[Mark, Tensor]]] = {}  # pinned memory, by its size

    def send(self, tensor: Tensor, bundle: Bundle) -> Sent | None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # a tensor of a few elements in a larger storage would take the rest along
        fits = _SMALL <= storage.nbytes() <= 4 * tensor.nbytes
        if address in self._stay or not fits or not self.device.holds(tensor):
            return None
        parcel = bundle.parcels.get(address)
        if parcel is None:
            parcel = self.copy_of(tensor.new_empty(0, dtype=torch.uint8).set_(storage))
            bundle.parcels[address] = parcel
        place = int(tensor.storage_offset())
        return Sent(parcel, tensor.dtype, tuple(tensor.shape), tensor.stride(), place)

    def copy_of(self, tensor: Tensor) -> "_HostCopy":
        return _HostCopy(self, tensor.view(torch.uint8))

    def copy(self, output: Tensor, tensor: Tensor) -> Mark:
        self._queue.begins()
        self._queue.copy(output, tensor)
        return self._queue.mark()

    def lend(self, size: int) -> Tensor:
        """Return pinned memory of this size that is free."""
        free = self._free.setdefault(size, [])
        for place, (mark, memory) in enumerate(free):
            if mark.Test():
                del free[place]
                return memory
        return self.device.pinned(size)

    def give_back(self, mark: Mark, memory: Tensor) -> None:
        """Take memory back; it is free at this mark."""
        self._free[memory.numel()].append((mark, memory))


class _HostCopy(Parcel):
    """Bytes of a device on the host, and from `fetch` on there again."""

    def __init__(self, host: HostCopies, source: Tensor) -> None:
        self._host = host
        self._there = host.lend(source.numel())
        self._mark = host.copy(self._there, source)
        self._here: Tensor | None = source  # until it is copied; and again from `fetch` on
        self._is_back = False

    def settle(self) -> None:
        if not self._is_back:
            self._mark.wait_on_host()
            self._here = None

    def fetch(self) -> None:
        if self._here is None:
            size, device = self._there.numel(), self._host.device.torch
            self._here = torch.empty(size, dtype=torch.uint8, device=device)
            self._mark = self._host.copy(self._here, self._there)
            self._is_back = True

    def values(self) -> Tensor:
        if self._is_back:
            self._mark.order()
        assert self._here is not None
        return self._here

    def __del__(self) -> None:
        self._host.give_back(self._mark, self._there)
