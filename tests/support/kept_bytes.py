"""The bytes of tensors that were made inside a context and are still there."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Born(TorchDispatchMode):
    """Every storage that operations make; a view shows one that was there."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given:
                reference = StorageWeakRef(storage)
                self._seen[reference.cdata] = reference, storage.nbytes()
        return result

    def alive(self) -> int:
        """Return the bytes of those that are still there."""
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
