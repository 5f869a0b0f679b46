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
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpczero.comm.group import Group, Work, shard
from hpczero.device import Device, Mark
from hpczero.parallel.activations.choice import STAY
from hpczero.parallel.activations.recompute import Call, Keeper
from hpczero.parallel.zero.buffers import Stock

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
        self.parcels = weakref.WeakValueDictionary[int, Parcel]()  # by address
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
        self._unsettled = deque[Bundle]()  # of all micro-batches

    def begun_by(self, call: Call, is_first: bool) -> Call:
        """Return a layer whose forward begins a bundle; `is_first`: of the chunk."""

        def run(x: Tensor, batch: Any) -> Tensor:
            if torch.is_grad_enabled():
                self.newest = Bundle(None if is_first else self.newest)
                self._unsettled.append(self.newest)
                if len(self._unsettled) > STAY:
                    self._unsettled.popleft().settle()
            return call(x, batch)

        return run

    def fetch(self, bundle: Bundle) -> None:
        """Fetch a bundle, and the one that backward comes to next; the others are to be away."""
        wanted = [one for one in (bundle, bundle.before) if one]
        while self._unsettled:
            one = self._unsettled.popleft()
            if one not in wanted:
                one.settle()
        for one in wanted:
            one.fetch()


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
        self._bundles.fetch(bundle)
        values: Tensor = what.parcel.values().view(what.dtype)
        return values.as_strided(what.shape, what.stride, what.offset)


def kept_by(keeper: Keeper, call: Call) -> Call:
    """Return a layer all of whose kept tensors the keeper has."""

    def run(x: Tensor, batch: Any) -> Tensor:
        with saved_tensors_hooks(keeper.pack, keeper.unpack):
            return call(x, batch)

    return run


class Lent(Parcel):
    """Bytes of a stock, which go back there with their last holder."""

    def __init__(self, stock: Stock, size: int) -> None:
        self._size = size
        self._loan = stock.take(size)
        weakref.finalize(self, stock.give_back, self._loan).atexit = False

    def fetch(self) -> None:
        """They are here."""

    def values(self) -> Tensor:
        return self._loan.tensor[: self._size]


# -- cut over the tensor ranks


class Shards(Way):
    """Each rank keeps its part of a tensor that all ranks of a group have."""

    def __init__(self, group: Group, stock: Stock, host: "HostCopies | None" = None) -> None:
        """`stock`: the device's memory for parts and wholes; `host` has the parts in its place."""
        self.group = group
        self.stock = stock
        self.host = host

    def send(self, tensor: Tensor, bundle: Bundle) -> Sent | None:
        if not tensor.is_floating_point():
            return None
        tensor = tensor.contiguous()
        parcel = _Shard(tensor.view(-1), self)
        bundle.parcels[id(parcel)] = parcel
        return Sent(parcel, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


class _Shard(Parcel):
    def __init__(self, whole: Tensor, way: Shards) -> None:
        self._way = way
        self._dtype = whole.dtype
        self._size = whole.nbytes
        part = whole[shard(whole.numel(), way.group.size, way.group.rank)]
        here = Lent(way.stock, part.nbytes)
        here.values().view(self._dtype).copy_(part)
        self._own: Parcel = way.host.copy_of(here.values()) if way.host else here
        self._whole: Lent | None = None
        self._work: Work | None = None

    def settle(self) -> None:
        self._own.settle()

    def fetch(self) -> None:
        self._own.fetch()
        own = self._own.values().view(self._dtype)
        self._whole = Lent(self._way.stock, self._size)
        whole = self._whole.values().view(self._dtype)
        self._work = self._way.group.start_all_gather(whole, own, "activations")

    def values(self) -> Tensor:
        if self._work:
            self._work.wait()
            self._work = None
        assert self._whole is not None
        return self._whole.values()


# -- on the host


class HostCopies(Way):
    """A device's tensors go to the computer's memory, storage by storage.

    What is copied in the queue is in order: pinned memory that goes back to its stock may be used
    at once.
    """

    def __init__(self, device: Device, stay: Iterable[Tensor]) -> None:
        """`stay`: tensors whose storages live longer anyway (weights, a module's buffers)."""
        self.device = device
        self.pinned = Stock(device.pinned)
        self._queue = device.queue()
        self._stay = {tensor.untyped_storage().data_ptr() for tensor in stay}

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

    def copy_of(self, source: Tensor) -> "_HostCopy":
        """Return a copy of these bytes."""
        return _HostCopy(self, source)

    def copy(self, output: Tensor, tensor: Tensor) -> Mark:
        self._queue.begins()
        self._queue.copy(output, tensor)
        return self._queue.mark()


class _HostCopy(Parcel):
    """Bytes of a device on the host, and from `fetch` on there again."""

    def __init__(self, host: HostCopies, source: Tensor) -> None:
        self._host = host
        self._there = Lent(host.pinned, source.numel())
        self._mark = host.copy(self._there.values(), source)
        self._here: Tensor | None = source  # until it is copied; and again from `fetch` on
        self._is_back = False

    def settle(self) -> None:
        if not self._is_back:
            self._mark.wait_on_host()
            self._here = None

    def fetch(self) -> None:
        if self._here is None:
            there = self._there.values()
            self._here = torch.empty_like(there, device=self._host.device.torch)
            self._mark = self._host.copy(self._here, there)
            self._is_back = True

    def values(self) -> Tensor:
        if self._is_back:
            self._mark.order()
        assert self._here is not None
        return self._here
