"""The job spec: one frozen model per table, one role and one description per key.

A role says what a change of the key means for a run that already exists: `identity` makes it
another run (refused on resume), `changeable` is logged, `site` only says where things lie and how
the job is started. Every key here works: a key of a later version is not accepted before.
"""

from typing import Literal

from pydantic import StrictBool

from hpczero import env
from hpczero.spec.batch import Batch
from hpczero.spec.data import Data, Source
from hpczero.spec.model import Model
from hpczero.spec.optimizer import Optimizer, Schedule
from hpczero.spec.table import (
    LARGEST,
    NAME,
    OFFLOAD,
    Line,
    Positions,
    Ranks,
    Table,
    Text,
    key,
)
from hpczero.spec.track import Track


class Train(Table):
    """Length, batch and precision of the training."""

    steps: int = key(100, "changeable", "optimizer steps", ge=1, le=LARGEST)
    global_batch: int = key(
        16, "changeable", "sequences in a step, over all ranks", ge=1, le=1_000_000_000
    )
    micro_batch: int = key(
        8, "changeable", "most sequences that a rank computes at once", ge=1, le=1_000_000
    )
    precision: Literal["bf16", "fp16", "fp32"] = key(
        "bf16", "changeable", "number format of the model; half formats keep fp32 master weights"
    )
    loss_scale: float = key(
        65536.0, "changeable", "fp16 only: initial loss scale; it then follows the overflows", gt=0
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "site", "where the tensors live; auto: on GPUs where there are any"
    )
    grad_clip: float = key(
        1.0, "changeable", "largest global norm of the gradient; 0: no clipping", ge=0
    )
    log_every: int = key(
        10,
        "site",
        "steps between two lines of output, and two rows of the ranks' times and energy",
        ge=1,
        le=LARGEST,
    )
    eval_every: int = key(
        0, "site", "steps between two evaluations; 0: only at the end", ge=0, le=LARGEST
    )
    eval_batches: int = key(
        8, "site", "global batches in an evaluation; 0: no evaluation", ge=0, le=1_000_000
    )
    trace: StrictBool = key(
        False, "site", "write a timeline of every rank, for Perfetto or chrome://tracing"
    )


class Parallel(Table):
    """The layout of the ranks; the data axis takes those that the other axes leave."""

    tensor: int = key(1, "changeable", "ranks that share each layer", ge=1, le=1_000_000)
    pipeline: int = key(1, "changeable", "stages that the layers are cut into", ge=1, le=1_000_000)
    sequence_parallel: StrictBool = key(
        False,
        "changeable",
        "tensor ranks also share the sequence between their products: "
        "less activation memory, a quarter more bytes",
    )
    schedule: Literal["1f1b", "gpipe", "interleaved"] = key(
        "1f1b",
        "changeable",
        "order of forwards and backwards in the pipeline; "
        "interleaved: each stage has several parts of the model",
    )
    chunks: int = key(
        1, "changeable", "interleaved only: parts of the model on each stage", ge=1, le=10_000
    )
    order: str = key(
        "auto",
        "changeable",
        "axes from the innermost (neighbouring ranks) to the outermost, "
        'as in "tensor,data,pipeline"; "auto": fewest bytes between nodes',
        max_length=100,
    )


class Zero(Table):
    """The model states that are sharded over the data ranks, and where they lie."""

    stage: Literal[0, 1, 2, 3] = key(
        1, "changeable", "sharded: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters"
    )
    shard_ranks: Literal["all", "node"] | Ranks = key(
        "all",
        "changeable",
        "data ranks that share one copy of the states; all: every data rank; node: those of a node "
        "(the others have copies of them: nothing of the weights goes between nodes)",
    )
    bucket_mb: int = key(
        0,
        "site",
        "size of a communication buffer in MiB, of which a group has two (one with nccl); "
        "0: 4 on CPUs, on GPUs 256 or what the largest layer needs",
        ge=0,
        le=1_000_000,
    )
    node_shared: Literal["auto", True, False] = key(
        "auto", "site", "the data ranks of a node keep one copy of the parameters together"
    )
    offload: str = key(
        "none",
        "site",
        "where master weights and moments are; cpu: a GPU's in the computer's memory, where the "
        "CPU steps them; nvme: each rank's in a file in this folder ($VARIABLES are expanded)",
        pattern=OFFLOAD,
    )

    @property
    def folder(self) -> str:
        """The folder in which states lie; "" if there is none."""
        kind, _, folder = self.offload.partition(":")
        return env.expand(folder) if kind == "nvme" else ""


class Memory(Table):
    """Activations: what is kept from forward to backward, and what is computed again."""

    recompute: Literal["none", "selective", "block", "auto"] = key(
        "none",
        "site",
        "activations that are computed again in backward, not kept; selective: results of norms "
        "and activation functions; block: all of a block but its input; auto: the first of these "
        "that fits into the memory",
    )
    recompute_every: int = key(
        1, "site", "2: in every second block alone, and so on", ge=1, le=1_000_000
    )
    partition_activations: bool = key(
        False,
        "site",
        "inputs of blocks that are computed again are cut over the tensor ranks, and gathered then",
    )
    offload_activations: Literal["none", "cpu"] = key(
        "none", "site", "cpu: what a GPU keeps for backward is in the computer's memory meanwhile"
    )
    loss_chunk: Positions | Literal["auto"] = key(
        0,
        "site",
        "positions whose logits exist at a time; 0: a micro-batch's; auto: an eighth, or 2048",
    )


class Comm(Table):
    """The communication between ranks."""

    backend: Literal["auto", "mpi", "nccl", "gloo"] = key(
        "auto",
        "site",
        "what carries collectives: MPI, or torch.distributed (nccl on GPUs, gloo on CPUs); "
        "auto: nccl where each rank has a GPU",
    )
    compress: Literal["none", "int8"] = key(
        "none",
        "changeable",
        "int8: sums of gradients between replicas, and half-precision weights that are gathered "
        "between nodes, are sent in 8 bits (blocks of 256 with a scale)",
    )
    ranks_per_node: int = key(
        0, "site", "test a layout: so many ranks are a node; 0: the real one", ge=0, le=1_000_000
    )
    timeout_s: float = key(
        600.0, "site", "seconds to wait for other ranks before the job fails", gt=0, le=1e9
    )


class Checkpoint(Table):
    """The checkpoints of a run: saving them, and resuming from one."""

    every: int = key(
        1000,
        "changeable",
        "steps between two checkpoints; 0: only when the run ends or is stopped, -1: never",
        ge=-1,
        le=LARGEST,
    )
    keep: int = key(2, "changeable", "newest checkpoints that are kept; 0: all", ge=0, le=LARGEST)
    keep_every: int = key(
        0, "changeable", "keep for good those of steps that this divides; 0: none", ge=0, le=LARGEST
    )
    asynchronous: StrictBool = key(
        True,
        "site",
        "save in the background, from a copy of the states "
        "(12 bytes a parameter over all data ranks)",
    )
    writers: Literal["node", "rank"] = key(
        "node", "site", "who writes a file: a node, or each rank"
    )
    resume: Text = key(
        "auto", "site", 'where to begin: "auto", the newest complete one; "never"; or its folder'
    )
    weights_only: StrictBool = key(
        False, "site", "load only the weights of the checkpoint in resume: a new run, from step 0"
    )
    on_error: Literal["stop", "continue"] = key(
        "stop", "site", "what a run does that cannot save a checkpoint"
    )


class Paths(Table):
    """Locations of files; $SCRATCH, $USER and ~ are expanded."""

    cache: Text = key(
        "", "site", "folder for what can be built again (token files); empty: ~/.cache/hpczero"
    )


class Spec(Table):
    """A job: the model, its data, its training."""

    name: str = key("run", "identity", "name of the run, and of its folder", pattern=NAME)
    seed: int = key(1, "identity", "seed of all random numbers", ge=0, le=2**63 - 1)
    output: Line = key("runs", "site", "folder that holds the runs' folders")
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    zero: Zero = Zero()
    memory: Memory = Memory()
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()
    paths: Paths = Paths()
    batch: Batch = Batch()

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence that the job reads."""
        return self.data.seq_len or self.model.seq_len

    @property
    def shortest(self) -> tuple[str, int]:
        """The key that says the shortest sequences of any step, and their tokens."""
        longest = "data.seq_len" if self.data.seq_len else "model.seq_len"
        phases = [("schedule.seq_len", length) for _, length in self.schedule.seq_len]
        return min([(longest, self.seq_len), *phases], key=lambda said: said[1])

    @property
    def text_len(self) -> int:
        """Tokens of text in a sequence."""
        return self.model.text_len(self.seq_len)

    @property
    def counts_targets(self) -> bool:
        """A step's targets are known only when its samples are read."""
        return self.data.documents != "packed" or self.model.masks

    def of_source(self, source: Source) -> "Spec":
        """Return the job with one source of the mixture alone."""
        data = self.data.model_copy(update={"source": source.path, "sources": ()})
        return self.model_copy(update={"data": data})

    def at_step(self, step: int) -> "Spec":
        """Return the job with the sequences of this step, counted from 0, and as many tokens."""
        lengths = [length for first, length in self.schedule.seq_len if first <= step]
        if not lengths or lengths[-1] == self.seq_len:
            return self
        times = self.seq_len // lengths[-1]
        train = {
            "global_batch": self.train.global_batch * times,
            "micro_batch": self.train.micro_batch * times,
        }
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={"seq_len": lengths[-1]}),
                "train": self.train.model_copy(update=train),
            }
        )

    @property
    def compresses_gathers(self) -> bool:
        """True if weights that are gathered between nodes, should there be any, have 8 bits."""
        is_asked_for = self.comm.compress == "int8" and self.train.precision != "fp32"
        return is_asked_for and self.zero.stage > 0 and self.zero.offload == "none"
