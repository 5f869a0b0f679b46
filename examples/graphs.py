"""A network on graphs, whose edges are sparse matrices.

mpirun -n 2 python examples/graphs.py
"""

import torch
from torch import nn

import hpczero

GRAPHS, NODES, EDGES, WIDTH, KINDS = 12, 20, 50, 24, 7
SPEC = {
    "name": "graphs",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "zero": {"stage": 3},
}


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.neighbours = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, edges, x):
        return torch.relu(self.own(x) + self.neighbours(torch.sparse.mm(edges, x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, WIDTH, sparse=True)  # its gradient has rows alone
        self.layers = nn.ModuleList(Convolution() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, kinds, edges):
        x = self.kinds(kinds)
        for layer in self.layers:
            x = layer(edges, x)
        return self.head(x.mean(0))


def build():
    return Network()


def samples(step, rank, size):
    """Yield this rank's graphs: the kinds of the nodes, the edges, what is to be found."""
    for number in range(rank, GRAPHS, size):
        generator = torch.Generator().manual_seed(step * GRAPHS + number)
        kinds = torch.randint(0, KINDS, (NODES,), generator=generator)
        ends = torch.randint(0, NODES, (2, EDGES), generator=generator)
        edges = torch.sparse_coo_tensor(ends, torch.ones(EDGES), (NODES, NODES)) / EDGES
        yield kinds, edges.coalesce(), kinds.float().mean().view(1)


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        loss = torch.zeros((), device=engine.device)
        for kinds, edges, wanted in samples(engine.steps, engine.rank, engine.size):
            found = engine(kinds.to(engine.device), edges.to(engine.device, engine.dtype))
            loss = loss + (found.float() - wanted.to(engine.device)).square().sum() / GRAPHS
        engine.backward(loss, last=True)
        engine.step()
        yield loss.item()


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
