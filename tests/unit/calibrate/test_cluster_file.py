"""What was measured becomes a file that the planner reads, with the numbers that it was made of."""

import tomllib

import pytest

from hpczero.calibrate.cluster_file import Origin, text
from hpczero.calibrate.findings import (
    AttentionTiming,
    Beside,
    DiskRates,
    Findings,
    KernelTiming,
    Machine,
    Moved,
    ProductTiming,
    Sending,
    Timing,
)
from hpczero.calibrate.fits import TimedProduct
from hpczero.calibrate.turns import of_turns
from hpczero.errors import InputError
from hpczero.planner.cluster import Cluster, Device, Products

RATE, OUTER, INNER = 2e11, 60, 30  # of a rank, of two cores
ORIGIN = Origin('a "quoted" host', ["measured on a made-up host, \x1b[2J and again"])


def timing(seconds: float) -> Timing:
    return Timing(0.9 * seconds, seconds, 1.2 * seconds, 7)


def sure(seconds: float) -> Timing:
    return Timing(0.99 * seconds, seconds, 1.01 * seconds, 7)


def product(m: int, n: int, k: int) -> ProductTiming:
    rate = RATE * m / (m + OUTER) * n / (n + OUTER) * k / (k + INNER)
    seconds = 2 * m * n * k / rate
    return ProductTiming(TimedProduct(m, n, k, seconds), timing(seconds))


def sending(operation: str, size: int, latency: float, rate: float) -> Sending:
    return Sending(operation, 2 * size, size, timing(latency + size / rate))


def found(**more: object) -> Findings:
    machine = Machine(
        device="a core of a made-up processor",
        kind="cpu",
        device_memory=0,
        devices=8,
        node_memory=64 * 10**9,
        ranks=4,
        ranks_on_node=4,
        nodes=1,
        threads=2,
        folder=".",
        file_system="ext4",
    )
    findings = Findings(
        machine,
        alone=Moved(10**8, timing(0.01)),  # 10 GB/s of one core
        at_once=Moved(10**8, timing(1 / 150)),  # 15 of a rank, while four of them have 60
        launch=timing(4e-6),
        products={
            "fp32": [product(m, n, k) for m in (64, 512) for n in (64, 512) for k in (64, 512)]
        },
        disk=DiskRates(1.5e9, 2.5e9, True, 10**9),
    )
    for name, value in more.items():
        setattr(findings, name, value)
    return findings


def cluster(findings: Findings, origin: Origin = ORIGIN) -> Cluster:
    return Cluster.model_validate(tomllib.loads(text(findings, origin)))


def test_a_core_has_its_part_of_what_a_rank_reached() -> None:
    read = cluster(found())
    products = read.products("bf16")
    assert products.peak_tflops * products.reached == pytest.approx(RATE / 2 / 1e12, rel=0.02)
    assert products.half_outer == pytest.approx(OUTER, rel=0.05)
    assert products.half_inner == pytest.approx(INNER, rel=0.05)
    assert read.device.bandwidth_gb_s == pytest.approx(10)
    assert read.node.bandwidth_gb_s == pytest.approx(60)
    assert read.device.launch_us == pytest.approx(4)
    assert read.node.devices == 8
    assert read.files
    assert (read.files.node_gb_s, read.files.read_gb_s) == (1.5, 2.5)


def test_what_was_not_measured_is_left_out_and_refused() -> None:
    read = cluster(found())
    assert not read.device.passes
    with pytest.raises(InputError, match="links in a node"):
        read.need_links(4, 1)
    with pytest.raises(InputError, match="the network"):
        read.need_links(1, 2)
    assert cluster(found(disk=None)).files is None


def test_kernels_are_shares_of_what_a_rank_is_given() -> None:
    half, whole = timing(1 / 7.5), timing(1 / 60)
    kernels = [
        KernelTiming("gelu", "fp32", Moved(10**9, half)),
        KernelTiming("adamw", "fp32", Moved(10**9, whole)),
    ]
    read = cluster(found(kernels=kernels))
    assert read.device.reached_by("gelu", "fp32") == pytest.approx(0.5)
    assert read.device.reached_by("adamw", "fp32") == 1.0
    assert read.device.reached_by("gelu", "bf16") == read.device.bandwidth_reached
    assert read.device.bandwidth_reached == pytest.approx(0.5)


def test_attention_is_a_share_of_the_peak() -> None:
    timed = [
        AttentionTiming(keys, direction, 1e9, timing(1e9 / (RATE * share * keys / (keys + 100))))
        for keys in (128, 512, 2048)
        for direction, share in (("forward", 0.5), ("backward", 0.25))
    ]
    products = cluster(found(attention={"fp32": timed})).products("fp32")
    assert products.attention == pytest.approx(0.5, rel=0.05)
    assert products.attention_backward == pytest.approx(0.25, rel=0.05)
    assert products.attention_half == pytest.approx(100, rel=0.1)


def test_links_are_those_of_the_fastest_operation_and_what_all_reach() -> None:
    sizes = [4096 * 8**power for power in range(5)]
    inside = [sending("all_gather", size, 1e-5, 8e9) for size in sizes]
    inside += [sending("all_reduce", size, 4e-5, 4e9) for size in sizes]
    node = cluster(found(inside=inside, window=Moved(10**9, timing(0.1)))).node
    assert node.link_gb_s == pytest.approx(8, rel=0.02)
    assert node.link_reached == pytest.approx(2 / 3, rel=0.02)
    assert node.link_us == pytest.approx(15, rel=0.1)
    assert node.operations["all_reduce"].us == pytest.approx(40, rel=0.1)
    assert node.window_gb_s == pytest.approx(10)


def test_a_network_has_as_many_adapters_as_a_rank_alone_leaves_unused() -> None:
    sizes = [4096 * 8**power for power in range(5)]
    alone = [sending("all_gather", size, 1e-5, 3e9) for size in sizes]
    at_once = [sending("all_gather", size, 1e-5, 1.5e9) for size in sizes]
    network = cluster(found(between=alone, between_at_once=at_once)).network
    assert network.adapters == 2
    assert network.adapters * network.adapter_gb_s == pytest.approx(6, rel=0.02)
    assert network.latency_us == pytest.approx(10, rel=0.1)


def test_what_computing_hides_is_what_it_does_not_take_longer() -> None:
    sizes = [4096 * 8**power for power in range(5)]
    sent = [sending("all_gather", size, 1e-5, 3e9) for size in sizes]
    both = [
        Beside("reduce_scatter", timing(3), sure(6), sure(8.5)),
        Beside("all_gather", timing(1), sure(2), sure(2.5)),
    ]
    read = cluster(found(inside=sent, between=sent, beside_between=both))
    assert read.network.hidden == pytest.approx(1 - (2.5 + 0.5) / (3 + 1))
    assert read.node.hidden is None
    faster = [Beside("all_gather", timing(1), sure(2), sure(1.9))]
    assert cluster(found(inside=sent, beside_inside=faster)).node.hidden == 1
    noise = [Beside("all_gather", timing(1), timing(2), timing(2.5))]
    assert cluster(found(inside=sent, beside_inside=noise)).node.hidden is None
    assert "# hidden: too noisy" in text(found(inside=sent, beside_inside=noise), ORIGIN)


def test_a_data_sheet_gives_peak_and_bandwidth() -> None:
    sheet = Device(
        name="made up",
        kind="cuda",
        bandwidth_gb_s=20,
        launch_us=5,
        products={"fp32": Products(peak_tflops=0.4)},
    )
    read = cluster(found(), Origin("a host", ["measured on a made-up host"], sheet))
    products = read.products("fp32")
    assert products.peak_tflops == 0.4
    assert products.reached == pytest.approx(0.25, rel=0.02)
    assert read.device.bandwidth_gb_s == 20


def test_notes_are_comments_in_one_line_each() -> None:
    written = text(found(notes=["one node: no network"]), ORIGIN)
    assert "\n# one node: no network\n" in written
    assert all(line.isprintable() for line in written.splitlines())
    assert tomllib.loads(written)["description"] == 'a "quoted" host'


def test_turns_without_a_core_do_not_count() -> None:
    alone = [[(1.0, 0.0), (3.0, 2.0)], [(1.5, 0.5), (1.0, 0.0)]]
    assert of_turns(alone, together=False) == [1.0, 1.0]
    quiet = [[(1.0, 0.0), (1.1, 0.0)]] * 3
    assert of_turns([*quiet, [(9.0, 0.0), (9.0, 8.0)]], together=True) == [1.1] * 3
    disturbed = [[(float(2 + number), 0.0), (1.0, 0.1 * number)] for number in range(1, 6)]
    assert of_turns(disturbed, together=True) == [3.0, 4.0, 5.0]
