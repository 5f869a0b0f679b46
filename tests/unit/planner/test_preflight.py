"""The decision whether a job fits: on recorded facts of ranks, and the alternatives that it
offers.
"""

import mmap
import re
from pathlib import Path
from typing import Any

import pytest

from hpczero.model import families
from hpczero.parallel.states import UpdateMemory
from hpczero.planner.fit import as_it_fits, close_calls, is_tight, refusal
from hpczero.spec.schema import Memory, Model, Parallel, Spec, Train, Zero

pytest.importorskip("torch", reason="preflight asks a World")

from hpczero.train import process
from hpczero.train.preflight import limits_from_ranks

GB = 10**9
HALF_BILLION = Model(layers=36, hidden=1024, heads=16, vocab=32_000, seq_len=128)


def spec(**zero: Any) -> Spec:
    return Spec(
        model=HALF_BILLION,
        train=Train(micro_batch=1, global_batch=4),
        zero=Zero(**({"stage": 0, "node_shared": False} | zero)),
    )


def rank(node: int = 0, available: float = 24, **changes: Any) -> dict[str, Any]:
    seen = {
        "node": node,
        "host": f"n{node}",
        "computer": f"boot{node}",
        "available": int(available * GB),
        "limits": {},
        "shm": 12 * GB,
        "held": 0,
    }
    return seen | changes


def judged(job: Spec, *seen: dict[str, Any]) -> str | None:
    return refusal(job, families.layers(job.model), limits_from_ranks(seen))


def test_what_fits_is_not_refused() -> None:
    assert judged(spec(), *[rank(available=40)] * 4) is None
    assert judged(spec(stage=3), *[rank()] * 4) is None
    assert judged(spec(), rank(0), rank(1)) is None


def test_room_for_what_malloc_keeps_free() -> None:
    """States, and 2.5 times as much again as activations and workspace take."""
    job = spec()
    model = families.layers(job.model)

    def judge(available: float) -> tuple[bool, bool]:
        limits = limits_from_ranks([rank(available=available)] * 4)
        return refusal(job, model, limits) is None, is_tight(job, model, limits)

    assert judge(35.5) == (True, False)  # 33.07 GB, of which 0.91 come and go
    assert judge(35.2) == (True, True)
    assert judge(20)[0] is False
    on_gpus = limits_from_ranks([on_gpu(0, 12, available=5), on_gpu(1, 12, available=5)])
    assert not is_tight(job, model, on_gpus)


def test_what_is_too_close_to_call_is_said() -> None:
    job = spec()
    limits = limits_from_ranks([rank(available=34)] * 4)
    (call,) = close_calls(job, families.layers(job.model), limits)
    assert call == "33.1 GB of 34.0 GB on n0 are too close to call: it may come to 34.7 GB"
    roomy = limits_from_ranks([rank(available=35)] * 4)
    assert not close_calls(job, families.layers(job.model), roomy)


def test_the_memory_of_the_optimizer_counts() -> None:
    job, seen = spec(), [rank(available=40)] * 4
    averages = UpdateMemory(average=True)
    limits = limits_from_ranks(seen, averages)
    refused = refusal(job, families.layers(job.model), limits)
    assert refused
    assert "average 1.9 GB" in refused


def on_gpu(number: int, free: float = 80, **changes: Any) -> dict[str, Any]:
    gpu = {
        "identity": f"GPU-{number}",
        "name": f"NVIDIA H200 (cuda:{number})",
        "free": int(free * GB),
        "held": 0,
    }
    return rank(**changes) | {"gpu": gpu}


def test_a_gpus_memory_holds_the_model_and_the_computers_the_rest() -> None:
    assert judged(spec(), on_gpu(0, 12, available=5), on_gpu(1, 12, available=5)) is None
    text = judged(spec(), on_gpu(0, 12, available=0.4), on_gpu(1, 12, available=0.4))
    assert text is not None
    assert re.match(
        (
            r"zero\.stage = 0 needs 500\.0 MB on n0 \(2 ranks\), where 400\.0 MB are available "
            r"\(each rank: .*runtime 250\.0 MB"
        ),
        text,
    )
    assert "moments" not in text


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    assert judged(spec(), on_gpu(0, 20), on_gpu(0, 20)) is None
    text = judged(spec(node_shared="auto"), on_gpu(0, 12), on_gpu(0, 12))
    assert text is not None
    assert re.match(
        (
            r"zero\.stage = 0 needs 1\d\.\d GB on NVIDIA H200 \(cuda:0\) of n0 \(2 ranks\), "
            r"where 12\.0 GB are available"
        ),
        text,
    )
    assert "runtime" not in text
    assert "node_shared = " not in text, "which is for CPUs"


def test_too_large_says_all_numbers_and_what_would_fit() -> None:
    text = judged(spec(), *[rank()] * 4)
    assert text is not None
    assert re.match(
        (
            r"zero\.stage = 0 needs 3\d\.\d GB on n0 \(4 ranks\), where 24\.0 GB are available "
            r"\(each rank: moments 3\.9 GB, "
        ),
        text,
    )
    for stage in (1, 2, 3):
        assert f"zero.stage = {stage} (" in text
        assert judged(spec(stage=stage), *[rank()] * 4) is None, "what is offered fits"
    assert "mpirun -n 2 (" in text
    assert judged(spec(), *[rank()] * 2) is None
    assert "such nodes" not in text, "more nodes do not help what is not sharded"


def test_it_stays_refused_with_one_byte_less_than_it_needs() -> None:
    text = judged(spec(), rank(available=1))
    assert text is not None
    low, high = 1, 40 * GB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if judged(spec(), rank() | {"available": middle}) is None
            else (middle, high)
        )
    assert judged(spec(), rank() | {"available": high}) is None
    assert judged(spec(), rank() | {"available": high - 1}) is not None
    assert f"needs {high / GB:.1f} GB" in text


def test_what_the_ranks_hold_already_is_part_of_their_need() -> None:
    needed = (
        next(
            size
            for size in range(30 * 10, 40 * 10)
            if judged(spec(), *[rank(available=size / 10)] * 4) is None
        )
        / 10
    )
    assert judged(spec(), *[rank(available=needed - 0.8)] * 4) is not None
    assert judged(spec(), *[rank(available=needed - 0.8, held=GB // 5)] * 4) is None


def test_a_smaller_micro_batch_is_offered() -> None:
    job = spec(stage=3)
    job = job.model_copy(update={"train": Train(micro_batch=64, global_batch=256)})
    text = judged(job, *[rank()] * 4)
    assert text is not None
    offered = re.search(r"would fit: train\.micro_batch = (\d+) \(", text)
    assert offered, text
    smaller = job.model_copy(update={"train": Train(micro_batch=int(offered[1]), global_batch=256)})
    assert judged(smaller, *[rank()] * 4) is None


def test_recomputation_is_offered_and_chosen() -> None:
    """The first of none, selective and block that fits."""
    job = spec(stage=3)
    train, model = Train(micro_batch=64, global_batch=256), HALF_BILLION
    model = model.model_copy(update={"vocab": 1000})
    job = job.model_copy(update={"train": train, "model": model})
    text = judged(job, *[rank()] * 4)
    recompute = re.search(r'would fit: memory\.recompute = "(\w+)"', str(text))
    assert recompute, text
    again = job.model_copy(update={"memory": Memory.model_validate({"recompute": recompute[1]})})
    assert judged(again, *[rank()] * 4) is None
    for available in (500.0, 24.0):
        limits = limits_from_ranks([rank(available=available)] * 4)
        auto = job.model_copy(update={"memory": Memory(recompute="auto")})
        of_model = families.layers(job.model)
        chosen, refused = as_it_fits(auto, of_model, limits)
        assert refused is None
        assert chosen.memory.recompute == ("none" if available == 500.0 else recompute[1])


def writes(node: int, free: float, on_server: bool, folder: str = "/scratch") -> dict[str, Any]:
    storage = {"folder": folder, "free": int(free * GB), "on_server": on_server}
    return rank(node, 100) | {"storage": storage}


def test_a_server_has_the_states_of_all_nodes() -> None:
    """12 bytes a parameter on two nodes: half on each one's own storage, or all on the server."""
    job = spec(stage=1, offload="nvme:/scratch")
    whole = 12 * families.parameter_count(HALF_BILLION) / GB
    for on_server, room in ((False, whole / 2), (True, whole)):
        for times, fits in ((1.01, True), (0.99, False)):
            seen = [writes(node, times * room, on_server) for node in (0, 1)]
            assert (judged(job, *seen) is None) == fits, (on_server, times)
    text = judged(job, *[writes(node, 0.9 * whole, True) for node in (0, 1)])
    assert re.match(r"zero\.offload needs \d\.\d GB in /scratch \(2 ranks\), where", str(text)), (
        text
    )
    assert "such nodes" not in str(text), "more nodes share the same server"


def test_a_loss_by_pieces_is_offered_where_logits_are_what_does_not_fit() -> None:
    model = Model(layers=2, hidden=256, heads=4, vocab=200_000, seq_len=1024)
    train = Train(micro_batch=16, global_batch=16)
    job = spec().model_copy(update={"model": model, "train": train})
    text = judged(job, rank(available=12))
    assert text is not None
    assert re.search(r"each rank: workspace \d", text), text
    assert 'memory.loss_chunk = "auto" (' in text
    by_pieces = job.model_copy(update={"memory": Memory(loss_chunk="auto")})
    assert judged(by_pieces, rank(available=12)) is None
    assert "memory.loss_chunk" not in str(judged(by_pieces, rank(available=1)))


def test_more_nodes_are_offered_where_states_are_sharded() -> None:
    text = judged(spec(stage=3), *[rank(available=8)] * 4)
    assert text is not None
    offered = re.search(r"(\d+) such nodes with (\d+) ranks", text)
    assert offered, text
    assert (
        judged(
            spec(stage=3),
            *[rank(node, available=8) for node in range(int(offered[1])) for _ in range(4)],
        )
        is None
    )


LONG = Model(layers=36, hidden=1024, heads=16, vocab=32_000, seq_len=4096)
WIDE = Model(layers=6, hidden=1024, heads=3, vocab=1_000_000, seq_len=128, tied_embeddings=False)


def of(model: Model, **parallel: Any) -> Spec:
    return spec(stage=3).model_copy(update={"model": model, "parallel": Parallel(**parallel)})


def offered(text: str | None, pattern: str) -> list[int]:
    """The numbers in what is offered."""
    assert text is not None
    found = re.search(rf"(?:would fit: |; ){pattern} \(\d", text)
    assert found, text
    return [int(number) for number in found.groups()]


def test_tensor_and_pipeline_sizes_are_offered_where_stages_are_not_enough() -> None:
    """Activations are what does not fit, and those the ranks of the other axes share."""
    seen = [rank(available=28)] * 4
    text = judged(of(LONG), *seen)
    (tensor,), (pipeline,) = (
        offered(text, r"parallel\.tensor = (\d+)"),
        offered(text, r"parallel\.pipeline = (\d+)"),
    )
    assert (tensor, pipeline) == (2, 4)
    assert judged(of(LONG, tensor=tensor), *seen) is None
    assert judged(of(LONG, pipeline=pipeline), *seen) is None
    assert "parallel" not in str(judged(spec(), *[rank()] * 4)), "a stage is enough"


def test_a_grid_without_data_ranks_needs_no_sharding() -> None:
    seen = [rank(available=50)] * 4
    text = judged(of(WIDE), *seen)
    assert offered(text, r"parallel\.pipeline = (\d+) and zero\.stage = (\d+)") == [4, 0]
    assert judged(of(WIDE, pipeline=4), *seen) is not None
    at_stage_0 = of(WIDE, pipeline=4).model_copy(update={"zero": Zero(stage=0, node_shared=False)})
    assert judged(at_stage_0, *seen) is None


def test_both_are_offered_where_neither_is_enough() -> None:
    two_heads, seen = LONG.model_copy(update={"heads": 2}), [rank(available=29)] * 8
    text = judged(of(two_heads), *seen)
    assert offered(text, r"parallel\.tensor = (\d+) and parallel\.pipeline = (\d+)") == [2, 4]
    assert judged(of(two_heads, tensor=2, pipeline=4), *seen) is None


def test_nothing_that_can_be_set() -> None:
    text = judged(spec(), *[rank(available=0.1)] * 4)
    assert text is not None
    assert "nothing that can be set would fit here" in text


def test_the_smallest_of_the_nodes_decides() -> None:
    text = judged(spec(), rank(0, 24), rank(1, 5), rank(2, 24))
    assert text is not None
    assert "on n1 (1 rank), where 5.0 GB" in text


def test_a_cgroup_binds_the_ranks_that_it_holds() -> None:
    """Cgroups of one task each, and the job's: with the same room, the job's is too small first."""
    tasks = [
        rank(available=100, limits={f"/job/task{number}": 10 * GB, "/job": 30 * GB})
        for number in range(4)
    ]
    text = judged(spec(), *tasks)
    assert text is not None
    assert "in the cgroup /job on n0 (4 ranks), where 30.0 GB" in text
    tasks[2]["limits"]["/job/task2"] = 4 * GB
    text = judged(spec(), *tasks)
    assert text is not None
    assert "in the cgroup /job/task2 on n0 (1 rank), where 4.0 GB" in text
    roomy = [
        rank(available=100, limits={f"/job/task{number}": 10 * GB, "/job": 40 * GB})
        for number in range(4)
    ]
    assert judged(spec(), *roomy) is None


def test_nodes_tried_out_on_one_computer_share_its_memory() -> None:
    pretended = [rank(number // 2, computer="one", host="n") for number in range(4)]
    text = judged(spec(), *pretended)
    assert text is not None
    assert "on n (4 ranks)" in text
    assert judged(spec(), *[rank(number // 2) for number in range(4)]) is None
    containers = [rank(number // 2, computer="one", host=f"c{number // 2}") for number in range(4)]
    assert "(4 ranks)" in (judged(spec(), *containers) or "")


def test_shared_windows_need_room_in_shared_memory() -> None:
    """A window counts once, so the memory itself would do."""
    job = spec(stage=2, node_shared=True)
    assert judged(job, *[rank()] * 4) is None
    text = judged(job, *[rank(shm=GB // 16)] * 4)
    assert text is not None
    assert re.match(
        (
            r"zero\.node_shared needs 1\.\d GB in /dev/shm of n0 \(4 ranks\), where 62\.5 MB are "
            r"available: "
        ),
        text,
    )
    assert "make it larger (docker: --shm-size=3g; else mount -o remount,size=3g " in text
    assert "would fit: zero.node_shared = false" in text
    assert judged(spec(stage=2), *[rank(shm=GB // 16)] * 4) is None
    assert judged(spec(stage=2), *[rank(shm=0)] * 4) is None


class TestAccount:
    def test_a_tensor_of_known_size_is_measured(self) -> None:
        import torch

        size = 64 << 20
        before = process.held()
        held = torch.ones(size, dtype=torch.uint8)
        assert process.held() - before == pytest.approx(size, rel=0.02)
        del held
        assert process.held() - before < size / 10

    def test_memory_that_processes_could_share_is_measured(self) -> None:
        size = 32 << 20
        before = process.held()
        with mmap.mmap(-1, size) as window:
            assert process.held() - before < size / 10, "nothing is there before it is touched"
            window.write(bytes(size))
            assert process.held() - before == pytest.approx(size, rel=0.1)

    def test_files_pages_are_left_out(self, tmp_path: Path) -> None:
        rollup = tmp_path / "smaps_rollup"
        rollup.write_text(
            "5578a28fb000-7ffc305dc000 ---p 00000000 00:00 0    [rollup]\nRss:   9999 kB\n"
            "Pss:    900 kB\nPss_Anon:    500 kB\n"
            "Pss_File:    300 kB\nPss_Shmem:    100 kB\nSwapPss:    7 kB\n"
        )
        assert process.held(rollup) == 607 * 1024
        assert process.held(tmp_path / "nowhere") == 0
