"""Clusters: their files, what the verbs print, and what is wrong in a file."""

import json
import shutil
from pathlib import Path

import pytest

from hpczero.env import shared_folder
from hpczero.errors import InputError
from hpczero.planner import cluster
from hpczero.planner.cluster import find, names
from tests.support.launch import hpczero, launch

PEAKS = {"V100": 125, "A100": 312, "H100": 989, "GH200": 989, "MI250X": 191.5}
SHIPPED = sorted(path.stem for path in shared_folder("clusters").glob("*.toml"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_has_sources_and_the_peaks_of_data_sheets(name: str) -> None:
    found = find(name).cluster
    assert all(len(source) > 20 for source in found.sources)
    family = next((key for key in PEAKS if found.device.name.startswith(key)), None)
    if found.device.kind == "cuda":
        assert family
        assert max(rate.peak_tflops for rate in found.device.products.values()) == PEAKS[family]
        assert found.device.memory_gb >= 32
    assert found.node.bandwidth_gb_s >= found.device.bandwidth_gb_s or found.device.memory_gb


def test_all_kinds_of_nodes_are_there() -> None:
    devices = {
        (find(name).cluster.device.name, find(name).cluster.node.devices) for name in SHIPPED
    }
    for device, count in (
        ("V100-SXM3-32GB", 16),
        ("A100-SXM4-40GB", 8),
        ("A100-SXM4-80GB", 8),
        ("A100-SXM4-40GB", 4),
        ("H100-SXM5-80GB", 8),
        ("GH200-96GB", 4),
        ("MI250X (one of its two GPUs)", 8),
    ):
        assert (device, count) in devices


def test_half_precision_stands_in_for_the_other_one() -> None:
    v100 = find("dgx2-v100").cluster
    assert v100.products("bf16") == v100.products("fp16")
    cpu = find("epyc-7763").cluster
    assert cpu.products("bf16") == cpu.products("fp32")


def test_a_file_of_ones_own_wins(here: Path) -> None:
    shutil.copy(shared_folder("clusters") / "dgx-h100.toml", here / "clusters")
    path = here / "clusters" / "dgx-h100.toml"
    path.write_text(path.read_text().replace("devices = 8", "devices = 2"))
    assert find("dgx-h100").cluster.node.devices == 2
    assert find(str(path)).cluster.node.devices == 2
    path.rename(here / "clusters" / "mine.toml")
    assert find("dgx-h100").cluster.node.devices == 8
    assert "mine" in names()


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [
        ("devices = 8", "devices = 0", "node.devices (line "),
        ("peak_tflops = 989", "peak_tflops = -1", "device.products.bf16.peak_tflops (line "),
        ("peak_tflops = 989", "peak_tflops = inf", "device.products.bf16.peak_tflops (line "),
        ("link_us = 8\n", "", "node (line "),
        ("link_us = 8", "link_ms = 8", "node.link_ms"),
        ("sources = [", "sources = []\nmore = [", "sources"),
        ("[network]", "[network", "not valid TOML"),
        ('kind = "cuda"', 'kind = "tpu"', "device.kind"),
    ],
)
def test_a_mistake_is_named_with_its_line(here: Path, there: str, instead: str, said: str) -> None:
    text = (shared_folder("clusters") / "dgx-h100.toml").read_text()
    assert there in text
    path = here / "wrong.toml"
    path.write_text(text.replace(there, instead))
    with pytest.raises(InputError) as error:
        find("wrong.toml")
    assert said in str(error.value)


def test_links_that_are_left_out_are_refused_to_jobs_that_use_them(here: Path) -> None:
    text = (shared_folder("clusters") / "epyc-7763.toml").read_text()
    for line in ("link_gb_s = 10\n", "link_us = 1\n"):
        assert line in text
        text = text.replace(line, "")
    (here / "alone.toml").write_text(text.partition("[network]")[0])
    alone = find("alone.toml").cluster
    alone.need_links(1, 1)
    with pytest.raises(InputError, match=r"links in a node, which 2 ranks use"):
        alone.need_links(2, 1)
    with pytest.raises(InputError, match=r"the network, which 3 nodes use"):
        alone.need_links(1, 3)
    find("dgx-h100").cluster.need_links(8, 3)
    spec = shared_folder("jobspecs") / "quickstart.toml"
    plan = launch(hpczero("plan", str(spec), "--cluster", "alone.toml", "--nodes", "2"), 60, here)
    assert plan.code == 2
    assert "does not have the network, which 2 nodes use" in plan.err
    shown = launch(hpczero("cluster", "show", "alone.toml"), 60, here)
    assert "its links are not in the file" in shown.out
    assert "network   not in the file" in shown.out


def test_an_unknown_cluster_is_said_with_those_there_are() -> None:
    with pytest.raises(InputError) as error:
        find("summit")
    for name in SHIPPED:
        assert name in str(error.value)


def test_a_precision_that_a_device_lacks_is_said(here: Path) -> None:
    text = (shared_folder("clusters") / "dgx2-v100.toml").read_text()
    (here / "half.toml").write_text(text.replace("[device.products.fp32]\npeak_tflops = 15.7", ""))
    with pytest.raises(InputError, match="no rate of products in fp32: it has those of fp16"):
        find("half.toml").cluster.products("fp32")


def test_the_verbs(here: Path) -> None:
    listed = launch(hpczero("cluster", "list", "--json"), 60, here)
    assert [row["cluster"] for row in json.loads(listed.out)] == SHIPPED
    shown = launch(hpczero("cluster", "show", "dgx2-v100"), 60, here)
    assert "125 TFLOP/s" in shown.out
    assert "arXiv 1910.02054" in shown.out
    data = json.loads(launch(hpczero("cluster", "show", "dgx2-v100", "--json"), 60, here).out)
    assert data["node"]["devices"] == 16
    wrong = launch(hpczero("cluster", "show", "summit"), 60, here)
    assert (wrong.code, wrong.err.count("hpczero: ")) == (2, 1)
    assert cluster.folders()[0] == Path("clusters")
