"""Seconds of collectives and messages: formulas, and what makes them no slower."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster, Operation, find
from hpczero.planner.links import Links
from hpczero.planner.sent import Sent
from hpczero.planner.spread import Spread
from tests.support.fitting import changed

DGX = find("dgx-a100-80").cluster
NODES = Allocation(64, 8)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
MUCH = 10**10


def links(cluster: Cluster = DGX, nodes: Allocation = NODES) -> Links:
    return Links.of(cluster, nodes)


def test_inside_a_node_bytes_go_over_a_device_s_link() -> None:
    spread = Spread(8, (8,))
    seconds = links().collective("all_gather", Sent(MUCH, 0), spread, rings=True)
    assert seconds == pytest.approx(MUCH / (300e9 * DGX.node.link_reached), rel=1e-3)


def test_a_ring_crosses_between_nodes_once_and_uses_all_adapters() -> None:
    spread = Spread(64, (8,) * 8)
    sent = Sent(MUCH * 7 // 63, MUCH * 56 // 63)
    seconds = links().collective("all_gather", sent, spread, rings=True)
    assert seconds == pytest.approx(MUCH / (8 * 25e9 * DGX.network.reached), rel=1e-2)


def test_ranks_that_send_directly_share_the_adapters() -> None:
    spread = Spread(64, (8,) * 8)
    direct = links().collective("reduce_scatter", Sent(0, MUCH), spread, rings=False)
    assert direct == pytest.approx(MUCH / (25e9 * DGX.network.reached), rel=1e-2)


def test_groups_beside_share_the_adapters() -> None:
    alone = links().collective("all_gather", Sent(0, MUCH), Spread(8, (1,) * 8), rings=True)
    beside = links().collective("all_gather", Sent(0, MUCH), Spread(8, (1,) * 8, 16), rings=True)
    assert beside == pytest.approx(2 * alone, rel=1e-2)  # 16 groups, 8 adapters


def test_one_rank_sends_nothing() -> None:
    assert links().collective("all_reduce", Sent(), Spread(1, (1,)), rings=False) == 0


def test_small_operations_take_latency_that_grows_with_ranks() -> None:
    for operation in OPERATIONS:
        for rings in (True, False):
            times = [
                links().collective(operation, Sent(), Spread(8 * count, (8,) * count), rings)
                for count in (1, 2, 16, 128)
            ]
            assert 0 < times[0] < times[1] < times[2] < times[3]


def test_cpu_ranks_copy_through_the_memory_of_the_node() -> None:
    cluster = find("epyc-7763").cluster
    few, many = (links(cluster, Allocation(count, count)).link for count in (2, 128))
    assert few == pytest.approx(cluster.node.link_gb_s * cluster.node.link_reached * 1e9)
    assert many == pytest.approx(409.6e9 / 3 / 128)


@given(
    st.sampled_from(OPERATIONS),
    st.booleans(),
    st.integers(1, 16),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, MUCH),
    st.sampled_from(
        [
            ("node.link_gb_s", 2.0),
            ("node.link_us", 0.5),
            ("network.adapter_gb_s", 2.0),
            ("network.latency_us", 0.5),
            ("network.adapters", 2),
            ("network.reached", 1.5),
        ]
    ),
)
def test_better_links_are_never_slower(
    operation: str, rings: bool, nodes: int, on_one: int, size: int, better: tuple[str, float]
) -> None:
    path, factor = better
    table, key = path.split(".")
    value = getattr(getattr(DGX, table), key) * factor
    faster = links(changed(DGX, {path: value}))
    spread = Spread(nodes * on_one, (on_one,) * nodes, 8 // on_one)
    between = size * (nodes - 1) // nodes
    sent = Sent(size - between, between)
    before = links().collective(operation, sent, spread, rings)
    assert faster.collective(operation, sent, spread, rings) <= before
    assert faster.message(size, spread, nodes > 1) <= links().message(size, spread, nodes > 1)
    more = Sent(sent.inside * 2, sent.between * 2)
    assert links().collective(operation, more, spread, rings) >= before


def measured(where: str, **operations: Operation) -> Links:
    """Return the links of a cluster of which operations were measured in a node or between."""
    table = getattr(DGX, where).model_copy(update={"operations": operations})
    return links(DGX.model_copy(update={where: table}))


MEASURED = Operation(us=30.0, gb_s=50.0)
IN_A_NODE, ONE_OF_EACH = Spread(8, (8,)), Spread(8, (1,) * 8)
OTHERS = {"four of each": Spread(8, (4, 4)), "beside others": Spread(8, (1,) * 8, 4)}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("rings", [True, False])
@pytest.mark.parametrize(("where", "spread"), [("node", IN_A_NODE), ("network", ONE_OF_EACH)])
def test_a_measured_operation_takes_what_was_measured(
    operation: str, rings: bool, where: str, spread: Spread
) -> None:
    sent = Sent(MUCH, 0) if where == "node" else Sent(0, MUCH)
    of = measured(where, **{operation: MEASURED})
    seconds = of.collective(operation, sent, spread, rings, count=3)
    assert seconds == pytest.approx(3 * 30e-6 + MUCH / 50e9)
    (other, *_) = set(OPERATIONS) - {operation}
    plain = links().collective(other, sent, spread, rings, count=3)
    assert of.collective(other, sent, spread, rings, count=3) == plain


@pytest.mark.parametrize("spread", OTHERS.values(), ids=list(OTHERS))
def test_ranks_that_lie_otherwise_take_what_links_give(spread: Spread) -> None:
    operations = dict.fromkeys(OPERATIONS, MEASURED)
    sent = Sent(MUCH // 2, MUCH // 2)
    for where in ("node", "network"):
        for operation in OPERATIONS:
            plain = links().collective(operation, sent, spread, rings=True)
            assert measured(where, **operations).collective(operation, sent, spread, True) == plain


def test_what_was_measured_in_a_node_says_nothing_of_the_network() -> None:
    operations = dict.fromkeys(OPERATIONS, MEASURED)
    for where, spread in (("network", IN_A_NODE), ("node", ONE_OF_EACH)):
        plain = links().collective("all_gather", Sent(MUCH, 0), spread, rings=True)
        of = measured(where, **operations)
        assert of.collective("all_gather", Sent(MUCH, 0), spread, rings=True) == plain


def test_a_measured_message_takes_what_was_measured() -> None:
    expected = pytest.approx(30e-6 + MUCH / 50e9)
    inside, between = measured("node", send=MEASURED), measured("network", send=MEASURED)
    for spread in (ONE_OF_EACH, OTHERS["beside others"]):
        assert inside.message(MUCH, spread, between=False) == expected
        assert inside.message(MUCH, spread, between=True) == links().message(MUCH, spread, True)
        assert between.message(MUCH, spread, between=False) == links().message(MUCH, spread, False)
    assert between.message(MUCH, ONE_OF_EACH, between=True) == expected
    beside = OTHERS["beside others"]
    assert between.message(MUCH, beside, between=True) == links().message(MUCH, beside, True)


def test_one_rank_sends_nothing_whatever_was_measured() -> None:
    of = measured("node", all_reduce=MEASURED)
    assert of.collective("all_reduce", Sent(), Spread(1, (1,)), rings=False) == 0
