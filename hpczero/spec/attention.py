"""The table [model.attention] of the spec: the keys that a query sees, in blocks."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import Field, create_model

from hpczero.spec.table import Table, key

Kind = Literal["dense", "local", "longformer", "bigbird", "fixed", "strided", "variable"]
Count = Annotated[int, Field(ge=0, le=10_000_000)]
Width = Annotated[int, Field(ge=1, le=10_000_000)]
Size = Annotated[int, Field(ge=8, le=4096)]
_T = TypeVar("_T")
_List = Annotated[tuple[_T, ...], Field(strict=False, min_length=1, max_length=10_000)]

_GLOBAL = (
    "longformer, bigbird, variable: the first so many blocks, which all see; fixed: the last so "
    "many of each group"
)


class _Attention(Table):
    """The keys that a query sees, in blocks; lists, but `groups`, are over layers, in turn."""

    kind: Kind | _List[Kind] = key(
        "dense",
        "identity",
        "layout of blocks; dense: all keys, or those of model.window",
    )
    block: Size | _List[Size] = key(
        64, "identity", "positions in a block (a GPU computes tiles of 128)"
    )
    window: Width | _List[Width] = key(
        4,
        "identity",
        "local, longformer, bigbird: neighbouring blocks that a block sees, its own among them; "
        "fixed: blocks in a group; strided: neighbours, and the distance of those further off",
    )
    groups: _List[Width] = key(
        (4,),
        "identity",
        "variable: blocks in each group, from the beginning; the last number repeats",
    )
    random: Count | _List[Count] = key(
        1, "identity", "bigbird, variable: random blocks that each block sees"
    )
    heads: Literal["alike", "different"] = key(
        "alike",
        "identity",
        "different: heads see other random blocks (bigbird, variable), other global blocks of a "
        "group (fixed), neighbours or strides in turn (strided)",
    )


# the contract's word for the key is one of Python's
if TYPE_CHECKING:
    Attention = _Attention
else:
    Attention = create_model(
        "Attention",
        __base__=_Attention,
        __doc__=_Attention.__doc__,
        __module__=__name__,
        **{
            "global": (
                Count | _List[Count],
                key(1, "identity", _GLOBAL),
            )
        },
    )
