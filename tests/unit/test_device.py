"""Which device a rank gets, what carries the collectives; and the order in which a device that
is late is served.
"""

from collections import deque
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from hpczero import device  # noqa: E402  # needs torch
from hpczero.device import Incoming, InPlace, Line, Outgoing  # noqa: E402
from hpczero.errors import InputError  # noqa: E402
from hpczero.train.setup import collective_backend  # noqa: E402
from tests.support.queued import Queued  # noqa: E402


def test_all_ranks_or_none_are_on_gpus() -> None:
    assert device.choose_kind("auto", [0, 0], ["a", "a"]) == "cpu"
    assert device.choose_kind("cpu", [4, 4], ["a", "a"]) == "cpu"
    assert (
        device.choose_kind("auto", [4, 4], ["a", "a"])
        == device.choose_kind("cuda", [1, 1], ["a", "b"])
        == "cuda"
    )
    with pytest.raises(
        InputError,
        match=(
            r'"cuda": 2 of 2 ranks see no GPU: rank 0 on a, rank 1 on b; .* or set train.device '
            r'= "cpu"'
        ),
    ):
        device.choose_kind("cuda", [0, 0], ["a", "b"])
    with pytest.raises(InputError, match='"auto": 1 of 3 ranks see no GPU: rank 2 on b;'):
        device.choose_kind("auto", [1, 1, 0], ["a", "a", "b"])


def test_gpus_are_dealt_out_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`visible` of them, to the ranks of a computer; those that share one are neighbours."""
    monkeypatch.setattr(device, "Cuda", lambda number: number)

    def numbers(gpus: int, ranks: int) -> list[object]:
        monkeypatch.setattr(device, "visible", lambda: gpus)
        return [device.device_of_rank("cuda", place, ranks) for place in range(ranks)]

    assert numbers(4, 4) == [0, 1, 2, 3]
    assert numbers(4, 2) == [0, 1]
    assert numbers(2, 4) == [0, 0, 1, 1]
    assert numbers(2, 3) == [0, 0, 1]
    assert numbers(1, 2) == [0, 0]
    assert device.device_of_rank("cpu", 0, 1) is device.CPU


def test_a_gpu_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(number: int) -> object:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(device, "Cuda", broken)
    monkeypatch.setattr(device, "visible", lambda: 2)
    with pytest.raises(InputError, match=r"GPU 1 of 2 cannot be used: CUDA error: all .* busy"):
        device.device_of_rank("cuda", 1, 2)


@pytest.mark.parametrize(
    ("wanted", "kind", "ranks", "shared", "available", "expected"),
    [
        ("auto", "cpu", 4, False, ("gloo",), "mpi"),
        ("auto", "cuda", 4, False, ("gloo", "nccl"), "nccl"),
        ("auto", "cuda", 4, True, ("gloo", "nccl"), "mpi"),
        ("auto", "cuda", 4, False, ("gloo",), "mpi"),
        ("auto", "cuda", 1, False, ("nccl",), "mpi"),
        ("mpi", "cuda", 4, False, (), "mpi"),
        ("nccl", "cuda", 4, False, ("nccl",), "nccl"),
        ("gloo", "cpu", 4, False, ("gloo",), "gloo"),
    ],
)
def test_what_carries_collectives(
    wanted: str, kind: str, ranks: int, shared: bool, available: tuple[str, ...], expected: str
) -> None:
    assert collective_backend(wanted, kind, ranks, shared, available) == expected


@pytest.mark.parametrize(
    ("wanted", "kind", "shared", "available", "said"),
    [
        ("nccl", "cpu", False, ("nccl",), "carries tensors on cuda, and these are on cpu"),
        ("gloo", "cuda", False, ("gloo",), "carries tensors on cpu, and these are on cuda"),
        ("nccl", "cuda", False, ("gloo",), "this PyTorch was built without it"),
        (
            "nccl",
            "cuda",
            True,
            ("nccl",),
            "several ranks have one GPU together, which NCCL refuses",
        ),
    ],
)
def test_what_cannot_carry_them_is_refused(
    wanted: str, kind: str, shared: bool, available: tuple[str, ...], said: str
) -> None:
    with pytest.raises(
        InputError, match=f'comm.backend = "{wanted}": .*{said}.*comm.backend = "mpi"'
    ):
        collective_backend(wanted, kind, 2, shared, available)


class Wire:
    """Messages of one rank to another, in order; a message leaves as it is when it is posted,
    and is there after it was asked for twice.
    """

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self._receiving: deque[object] = deque()

    def send(self, memory: "torch.Tensor") -> "Request":
        self.messages.append(bytes(memory.tolist()))
        return Request(lambda: True)

    def receive(self, memory: "torch.Tensor") -> "Request":
        self._receiving.append(memory)

        def arrived() -> bool:
            if not self.messages or self._receiving[0] is not memory:
                return False
            self._receiving.popleft()
            text = self.messages.popleft()
            assert len(text) == memory.numel()
            memory.copy_(torch.tensor(list(text), dtype=torch.uint8))
            return True

        return Request(arrived)


class Request:
    def __init__(self, happens: object) -> None:
        self._happens, self._asked, self._done = happens, 0, False

    def Test(self) -> bool:
        self._asked += 1
        if not self._done and self._asked > 2:
            self._done = self._happens()  # type: ignore[operator]
        return self._done


@pytest.mark.parametrize("size", [1, 5, 64, 65, 1000])
def test_staged_messages_arrive_whole_from_a_device_that_is_late(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.device.PIECE", 64)
    late, wire = Queued(), Wire()
    here, there = late.queue(), late.queue()
    sent, received = (
        torch.arange(size, dtype=torch.int64).to(torch.uint8),
        torch.zeros(size, dtype=torch.uint8),
    )
    outgoing, incoming = (
        Outgoing(Line(), late, here, sent, wire.send),
        Incoming(Line(), late, there, received, wire.receive),
    )
    assert not wire.messages  # the queue is not there yet
    for _ in range(1000):
        if all([outgoing.Test(), incoming.Test()]):
            break
    there.mark().order()
    assert torch.equal(received, sent)
    assert not wire.messages


@pytest.mark.parametrize("sizes", [(64, 3), (3, 64), (300, 10, 200), (0, 5, 0, 70)])
def test_messages_that_the_device_comes_to_at_once_leave_and_arrive_in_their_order(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event may be done just before the second of two is asked for, and not the first."""
    monkeypatch.setattr("hpczero.device.PIECE", 64)
    late, wire, leaving, arriving = Queued(), Wire(), Line(), Line()
    here, there = late.queue(), late.queue()
    sent = [torch.full((size,), 1 + place, dtype=torch.uint8) for place, size in enumerate(sizes)]
    received = [torch.zeros_like(each) for each in sent]
    messages: list[Outgoing | Incoming] = [
        Outgoing(leaving, late, here, each, wire.send) for each in sent
    ]
    messages += [Incoming(arriving, late, there, each, wire.receive) for each in received]
    for _ in range(1000):
        if sum(message.Test() for message in messages) == len(messages):
            break
    there.mark().order()
    for mine, theirs in zip(received, sent, strict=True):
        assert torch.equal(mine, theirs)
    assert not leaving
    assert not arriving


def test_messages_in_place_are_posted_in_their_order() -> None:
    queue, line, posted = Queued().queue(), Line(), list[int]()

    def post(number: int) -> list[int]:
        posted.append(number)
        return []

    messages = []
    for number in range(4):
        queue.copy(torch.zeros(1), torch.ones(1))
        messages.append(InPlace(line, queue, partial(post, number)))
    while sum(message.Test() for message in messages) < len(messages):
        pass
    assert posted == [0, 1, 2, 3]


def test_memory_that_mpi_reads_in_place_is_not_given_to_it_before_the_queue_has_come_there() -> (
    None
):
    queue, posted = Queued().queue(), list[bool]()
    target = torch.zeros(3)
    queue.copy(target, torch.ones(3))
    message = InPlace(Line(), queue, lambda: posted.append(bool(target.all())) or [])  # type: ignore[func-returns-value]
    assert not posted
    while not message.Test():
        pass
    assert posted == [True]
