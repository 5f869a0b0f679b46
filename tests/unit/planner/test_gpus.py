"""Plans for GPUs: device and host apart, held against formulas that are written out here."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from hpczero import env
from hpczero.cli import main
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from tests.support.launch import CHECKOUT

FOLDER = CHECKOUT / "jobspecs"
GPT_7B = str(FOLDER / "gpt-7b-gh200.toml")
MIB = 1 << 20
RUNTIME = 250e6  # Python with its libraries: docs/gpu.md


@dataclass(frozen=True)
class Job:
    """A job spec on a site's partition with GPUs."""

    name: str
    site: str
    ranks: int
    per_node: int


JOBS = [
    Job("gpt2-1.5b", "derecho/gpu", 8, 4),
    Job("gpt-7b-h100", "abci/full", 8, 8),
    Job("gpt-7b-gh200", "juwels/booster", 16, 4),
    Job("megatron-8.3b", "frontier/batch", 512, 8),
    Job("turing-nlg-17b", "lumi/standard-g", 256, 8),
    Job("gpt-100b", "abci/full", 400, 16),
]


@pytest.fixture(params=[True, False], ids=["our kernels", "PyTorch's operations"])
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(env, "has_package", lambda name: request.param)
    return request.param


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the layout, and what went to stderr."""
    code = main(["check", "--json", *words])
    said = capsys.readouterr()
    return code, json.loads(said.out)["layout"], said.err


def asked(job: Job) -> list[str]:
    ranks = ["--ranks", str(job.ranks), "--ranks-per-node", str(job.per_node)]
    return [str(FOLDER / f"{job.name}.toml"), *ranks, "--set", f"batch.site={job.site}"]


@dataclass(frozen=True)
class Hand:
    """A GPT on `ranks` GPUs, in half precision, counted by hand. Legend: h hidden, t tensor ranks,
    N data ranks, T tokens of a micro-batch.
    """

    spec: Spec
    ranks: int
    by_kernel: bool

    @property
    def t(self) -> int:
        return self.spec.parallel.tensor

    @property
    def N(self) -> int:
        return self.ranks // self.t

    @property
    def h(self) -> int:
        return self.spec.model.hidden

    @property
    def T(self) -> int:
        return self.micro_batch * self.spec.model.seq_len

    @property
    def micro_batch(self) -> int:
        """Sequences: no rank has more than its share of the batch."""
        return min(self.spec.train.micro_batch, -(-self.spec.train.global_batch // self.N))

    @property
    def accumulated(self) -> int:
        """Micro-batches in a step."""
        return -(-self.spec.train.global_batch // (self.N * self.spec.train.micro_batch))

    @property
    def block(self) -> float:
        """Parameters of a block on a rank: 12 h^2 + 13 h, of which norms and two biases are not
        cut.
        """
        cut = 12 * self.h**2 + 7 * self.h
        return cut / self.t + 6 * self.h

    @property
    def embedding(self) -> float:
        """Parameters: also the head's, which is tied to it."""
        return (self.spec.model.vocab / self.t + self.spec.model.seq_len) * self.h

    @property
    def parameters(self) -> float:
        return self.spec.model.layers * self.block + self.embedding + 2 * self.h

    def states(self) -> dict[str, float]:
        """ZeRO's formulas: 2 + g + 12/N at stage 1, 2 + (g + 12)/N at stage 2 and two unit
        slots.
        """
        psi, g, stage = self.parameters, 4 if self.accumulated > 1 else 2, self.spec.zero.stage
        assert stage in (1, 2)
        return {
            "weights": 2 * psi,
            "master": 4 * psi / self.N,
            "moments": 8 * psi / self.N,
            "gradients": g * psi if stage == 1 else g * psi / self.N,
            "gradient slots": 0 if stage == 1 else 2 * 2 * max(self.block, self.embedding),
        }

    def activations(self) -> float:
        """Two bytes a number; kept of a block are 16 h a token (of heads and of the wide part: a
        tensor rank's share), and in fp32 a number per head and two of each norm. On top comes the
        widest of these: the loss, the head's backward, a block's, the embedding's.
        """
        t, h, tokens, model = self.t, self.h, self.T, self.spec.model
        cut = t if self.spec.parallel.sequence_parallel else 1
        of_block = 2 * (4 * h / cut + 4 * h / t + 2 * 4 * h / t) + 4 * (model.heads / t + 4 / cut)
        logits, embedding = 2 * tokens * model.vocab / t, 2 * model.vocab / t * h
        residual = 2 * tokens * h / cut
        of_pytorch = 0.0 if t > 1 else 12 * tokens * model.vocab
        loss = 2 * residual + (logits if self.by_kernel or t > 1 else of_pytorch)
        widest = max(
            loss,
            2 * residual + logits + embedding,
            2 * (residual + 2 * tokens * 4 * h / t) + 2 * h * 4 * h / t + embedding,
        )
        on_the_way = 2 * 2 * tokens * h if cut > 1 else 0
        return model.layers * of_block * tokens + widest + on_the_way

    def communication(self) -> float:
        """NCCL's buffers: of 256 MiB, or what leaves and what comes of the largest message,
        twice.
        """
        of_data = 4 * 2 * max(self.block, self.embedding)
        of_tensor = 4 * 2 * self.T * self.h if self.t > 1 else 0
        return min(256 * MIB, of_data) + min(256 * MIB, of_tensor)

    def host(self) -> dict[str, float]:
        """The copy for saving behind the training, 12/N; six steps of tokens; Python."""
        tokens = 6 * self.accumulated * self.micro_batch * (self.spec.model.seq_len + 1) * 8
        copy = 12 * self.parameters / self.N if self.spec.checkpoint.asynchronous else 0
        return {"checkpoint copy": copy, "data": tokens, "runtime": RUNTIME}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
@pytest.mark.few(6)
def test_check_agrees_with_the_formulas_device_and_host_apart(
    job: Job, by_kernels: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _, layout, _ = checked(capsys, *asked(job))
    hand = Hand(load(FOLDER / f"{job.name}.toml").spec, job.ranks, by_kernels)
    device, host = layout["memory"]["device"]["rank"], layout["memory"]["host"]["rank"]
    for kind, size in hand.states().items():
        assert device[kind] == pytest.approx(size, rel=0.01), kind
    assert device["communication"] == pytest.approx(hand.communication(), rel=0.01)
    widest = device["activations"] + device["workspace"]
    assert widest == pytest.approx(hand.activations(), rel=0.01)
    on_device = sum(hand.states().values()) + hand.activations() + hand.communication()
    assert sum(device.values()) == pytest.approx(on_device, rel=0.01)
    for kind, size in hand.host().items():
        assert host[kind] == pytest.approx(size, rel=0.01), kind
    assert sum(host.values()) == pytest.approx(sum(hand.host().values()), rel=0.01)
    assert not set(device) & set(host)


def test_weights_are_whole_on_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """7 B at stage 2 on 4 x 4 ranks: 13.3 GB of weights each, and none of a node's together."""
    words = [GPT_7B, "--ranks", "16", "--ranks-per-node", "4"]
    _, layout, _ = checked(capsys, *words)
    assert layout["memory"]["device"]["rank"]["weights"] == pytest.approx(2 * 6.659e9, rel=0.01)
    assert layout["memory"]["windows"] == 0
    assert "checkpoint copy" not in layout["memory"]["device"]["rank"]
    on_cpus = ["--set", "train.device=cpu", "--set", "batch.gpus_per_node=0"]
    _, layout, _ = checked(capsys, *words, *on_cpus)
    assert layout["memory"]["on"] == "cpu"
    assert layout["memory"]["rank"]["weights"] == pytest.approx(2 * 6.659e9 / 4, rel=0.01)


SMALL = ["--set", "batch.gpus_per_node=0"]
CUDA = ["--set", "train.device=cuda"]
PERLMUTTER = ["--set", "batch.site=perlmutter/gpu"]
ON_CPUS = ["--set", "batch.site=perlmutter/cpu"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], "cpu"),
        (CUDA, "cuda"),
        (["--set", "batch.gpus_per_node=4"], "cuda"),
        (PERLMUTTER, "cuda"),
        (ON_CPUS, "cpu"),
        ([*PERLMUTTER, "--set", "train.device=cpu"], "cpu"),
    ],
)
def test_the_device_follows_from_the_spec_or_the_sites_partition(
    words: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, layout, _ = checked(capsys, GPT_7B, "--ranks", "16", "--ranks-per-node", "4", *SMALL, *words)
    assert layout["memory"]["on"] == kind


def test_a_job_that_needs_more_than_its_gpus_have_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = [GPT_7B, "--ranks", "16", "--ranks-per-node", "4", *CUDA]
    code, layout, error = checked(capsys, *job, *PERLMUTTER)
    assert code == 2
    assert "on a GPU (1 rank), where 40.0 GB are available" in error
    assert layout["refusal"] in error
    assert "node_shared" not in error
    assert "checkpoint copy" not in error
    assert "runtime" not in error
    assert checked(capsys, *job, "--set", "batch.site=abci/full")[0] == 0


def test_render_does_not_take_four_gpus_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    """41 GB a rank: with the weights shared on a node, four ranks would have had room in 160 GB."""
    words = ["--set", "train.micro_batch=1", "--set", "model.seq_len=4608", *PERLMUTTER]
    of_site = ["--set", "batch.account=x", "--set", "batch.cpus_per_rank=0"]
    assert main(["render", GPT_7B, *words, *of_site]) == 2
    error = capsys.readouterr().err
    assert "on a GPU (1 rank), where 40.0 GB are available" in error
    assert main(["render", GPT_7B, *words, *of_site, "--set", "zero.stage=3"]) == 0


def test_an_unknown_size_is_said_and_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", GPT_7B, "--ranks", "16", "--ranks-per-node", "4"]) == 0
    said = capsys.readouterr().out
    assert "how much a GPU has is not known (batch.site)" in said
    assert "node_shared" not in said


def test_the_fullest_rank_decides_not_the_mean_of_a_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first of a pipeline's stages keeps the most, and it has a GPU for itself."""
    words = [GPT_7B, "--ranks", "4", "--ranks-per-node", "4", "--set", "parallel.pipeline=4"]
    _, layout, _ = checked(capsys, *words, *CUDA, "--set", "batch.site=abci/full")
    memory = layout["memory"]
    on_host = memory["host"]["rank"]
    whole = sum(size for kind, size in memory["node"].items() if kind not in on_host)
    fullest = sum(memory["device"]["rank"].values())
    assert fullest > 1.05 * whole / 4


def test_cuda_on_a_partition_without_gpus_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ON_CPUS, *CUDA, "--set", "batch.account=x", "--set", "batch.cpus_per_rank=0", *SMALL]
    assert main(["render", GPT_7B, *words]) == 2
    assert "a node of perlmutter/cpu has no GPU" in capsys.readouterr().err


def test_ranks_lie_on_nodes_as_the_partition_has_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    _, layout, _ = checked(capsys, GPT_7B, "--ranks", "16", *SMALL, *PERLMUTTER)
    assert layout["memory"]["ranks_on_node"] == 4
    assert layout["memory"]["device"]["ranks_on_gpu"] == 1
    _, layout, _ = checked(
        capsys, GPT_7B, "--ranks", "16", "--ranks-per-node", "16", *SMALL, *PERLMUTTER
    )
    assert layout["memory"]["device"]["ranks_on_gpu"] == 4


def test_ranks_on_a_node_are_those_that_the_run_will_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`comm.ranks_per_node`, which the run follows, before those of the batch job."""
    words = [GPT_7B, "--ranks", "8", "--set", "batch.ranks_per_node=4"]
    of_job = checked(capsys, *words)[1]
    of_run = checked(capsys, *words, "--set", "comm.ranks_per_node=2")[1]
    assert [len(layout["nodes"]) for layout in (of_job, of_run)] == [2, 4]


AWAY = ["--set", "memory.offload_activations=cpu"]


@pytest.mark.parametrize("pipeline", [1, 4])
def test_of_blocks_whose_activations_are_away_two_count_on_the_gpu(
    pipeline: int, by_kernels: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """For all micro-batches of a pipeline together, of which the first stage keeps as many as there
    are stages; the host has what all blocks keep. Each figure of a block is the same in both.
    """
    job = [GPT_7B, "--ranks", "4", *CUDA, "--set", f"parallel.pipeline={pipeline}"]
    whole, away = (checked(capsys, *job, *how)[1]["memory"] for how in ([], AWAY))
    kept = whole["device"]["rank"]["activations"]
    stays = away["device"]["rank"]["activations"]
    assert "over_bus" not in whole
    assert away["host"]["rank"]["activations on the host"] == pytest.approx(kept, rel=0.05)
    spec = load(GPT_7B).spec
    hand = Hand(spec, 4, by_kernels)
    of_block = (16 * hand.h * 2 + 4 * (spec.model.heads + 4)) * hand.T
    assert kept == pytest.approx(spec.model.layers * of_block, rel=0.05)
    assert stays == pytest.approx(2 * of_block, rel=0.15)
    micro_batches = spec.train.global_batch * pipeline // (4 * spec.train.micro_batch)
    moved = 2 * spec.model.layers // pipeline * of_block * micro_batches
    assert away["over_bus"]["rank"] == pytest.approx(moved, rel=0.01)


@pytest.mark.parametrize(("batch", "down"), [(8, 2), (16, 4)])
def test_states_elsewhere_move_gradients_down_and_weights_up(
    batch: int, down: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two bytes each; gradients of several micro-batches are summed in fp32 at stage 2. Two ranks
    share a GPU, and its bus.
    """
    words = [GPT_7B, "--ranks", "8", *PERLMUTTER, "--set", "train.micro_batch=1"]
    words += ["--set", f"train.global_batch={batch}", "--set", "zero.offload=cpu"]
    _, layout, _ = checked(capsys, *words, "--ranks-per-node", "8")
    of_rank = layout["memory"]["over_bus"]["rank"]
    assert of_rank == pytest.approx((down + 2) * 6.659e9 / 8, rel=0.01)
    assert layout["memory"]["over_bus"]["gpu"] == 2 * of_rank
    main(["check", *words, "--ranks-per-node", "8"])
    seconds = f"{2 * of_rank / 25e9:.3g} s at 25 GB/s"
    assert seconds in capsys.readouterr().out
