"""Operations of models, by the spec's word: hpczero's kernels where chosen ("auto"), or PyTorch's.

"torch" has PyTorch's operations alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hpczero_kernels.attention import attention, attention_reference
from hpczero_kernels.block_sparse import (
    block_sparse_attention,
    block_sparse_attention_reference,
)
from hpczero_kernels.cross_entropy import cross_entropy, cross_entropy_reference
from hpczero_kernels.dispatch import TORCH
from hpczero_kernels.dropout import dropout
from hpczero_kernels.elementwise import (
    gelu,
    gelu_reference,
)
from hpczero_kernels.glu import glu, glu_reference
from hpczero_kernels.norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from hpczero_kernels.relative_attention import (
    relative_attention,
    relative_attention_reference,
)
from hpczero_kernels.rotary import rotary, rotary_reference
from hpczero_kernels.soft_cap import soft_cap, soft_cap_reference


@dataclass(frozen=True)
class Operations:
    attention: Callable[..., Tensor]
    block_sparse_attention: Callable[..., Tensor]
    relative_attention: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    gelu: Callable[..., Tensor]
    glu: Callable[..., Tensor]
    dropout: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    rotary: Callable[..., Tensor]
    soft_cap: Callable[..., Tensor]


AUTO = Operations(
    attention,
    block_sparse_attention,
    relative_attention,
    layer_norm,
    rms_norm,
    add_layer_norm,
    gelu,
    glu,
    dropout,
    cross_entropy,
    rotary,
    soft_cap,
)
PYTORCH = Operations(
    attention_reference,
    block_sparse_attention_reference,
    relative_attention_reference,
    layer_norm_reference,
    rms_norm_reference,
    add_layer_norm_reference,
    gelu_reference,
    glu_reference,
    partial(dropout, implementation=TORCH),
    cross_entropy_reference,
    rotary_reference,
    soft_cap_reference,
)
OPERATIONS = {"auto": AUTO, "torch": PYTORCH}
