"""The work of a layer for a micro-batch, as plain data that the planner can time (pure).

Legend: a product of an m x k and a k x n matrix takes 2 m n k operations; `times` of them are made
together, as attention's for each head. Bytes are those that operations between the products read
and write; launches are the operations that a host has to start.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Product:
    """Products of m x k with k x n matrices; `weight`: the second one is a parameter."""

    m: float
    n: float
    k: float
    times: float = 1
    weight: bool = True

    @property
    def operations(self) -> float:
        return 2 * self.m * self.n * self.k * self.times

    @property
    def backward(self) -> tuple["Product", "Product"]:
        """The gradients of the first and of the second matrix."""
        return (
            Product(self.m, self.k, self.n, self.times, self.weight),
            Product(self.k, self.n, self.m, self.times, self.weight),
        )


@dataclass(frozen=True)
class Core:
    """Attention between its maps: every query with its keys, then with their values.

    `keys`: the most that a query of the sequence sees. `visible`: how many it sees on average, of
    those before it. In blocks both are shares of what they are in dense attention.
    """

    heads: float  # of all samples together
    queries: float
    keys: float
    visible: float
    head_dim: int
    backward: bool = False  # the gradients of all three, in place of the result

    @property
    def operations(self) -> float:
        """Operations of forward's products with all keys, masked ones included."""
        return 4 * self.heads * self.queries * self.keys * self.head_dim

    @property
    def scores(self) -> float:
        """Numbers in the matrices of queries by keys."""
        return self.heads * self.queries * self.keys

    @property
    def products(self) -> tuple[Product, Product]:
        """The two products, where they are made one after the other with all keys."""
        return (
            Product(self.queries, self.keys, self.head_dim, self.heads, weight=False),
            Product(self.queries, self.head_dim, self.keys, self.heads, weight=False),
        )


@dataclass(frozen=True)
class Pass:
    """One direction of a layer; `launches` are those besides its products."""

    products: tuple[Product, ...] = ()
    cores: tuple[Core, ...] = ()
    bytes: float = 0.0
    launches: int = 0

    @property
    def launches_with_products(self) -> int:
        return self.launches + len(self.products) + 2 * len(self.cores)

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            self.products + other.products,
            self.cores + other.cores,
            self.bytes + other.bytes,
            self.launches + other.launches,
        )


NOTHING = Pass()


@dataclass(frozen=True)
class LayerWork:
    """A layer's work: `again` is what selective recomputation repeats of forward in backward."""

    forward: Pass
    backward: Pass  # without the products, which follow from forward's
    again: Pass = NOTHING

    @property
    def gradients(self) -> Pass:
        """All of backward: the gradients of forward's products and cores, and its own work."""
        products = tuple(part for product in self.forward.products for part in product.backward)
        cores = tuple(replace(core, backward=True) for core in self.forward.cores)
        return self.backward + Pass(products, cores)


@dataclass(frozen=True)
class WorkLayout:
    """A micro-batch, and how a layer is shared and carried out; of tensor ranks the busiest."""

    samples: float
    seq_len: int
    element: int  # bytes of a number
    tensor: int = 1  # ranks
    sequence: bool = False  # rows between the products are shared, too
    kernels: frozenset[str] = frozenset()  # `Platform.kernels`
    by_pieces: bool = False  # logits are made in backward, a few rows at a time

    @property
    def tokens(self) -> float:
        return self.samples * self.seq_len

    @property
    def rows(self) -> float:
        """Tokens of the rank between the products."""
        return self.tokens / self.tensor if self.sequence else self.tokens

    def share(self, count: int) -> int:
        """Return how many of these the busiest tensor rank has."""
        return -(-count // self.tensor)


def visible_keys(seq_len: int, window: int) -> float:
    """Return how many keys a query sees on average: those before it, its own, `window` at most."""
    reach = min(window or seq_len, seq_len)
    return reach * (seq_len - (reach - 1) / 2) / seq_len
