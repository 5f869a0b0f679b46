"""The job spec: one frozen model per table, one description and one role per key (design §3).

A role says what a change of the key means for a run that already exists: `identity` makes it another run (refused on
resume), `changeable` is logged, `site` says only where things lie and how the job is started. Every key here works: what a later
version brings is not accepted before.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

Role = Literal["identity", "changeable", "site"]

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
PATH = r"^[^\x00-\x1f\x7f-\x9f]*$"
FACTORY = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
LARGEST = 10**15  # bound of the counts that have no natural one: sums and products of them stay exact everywhere
# Patterns that a text may be held to, and what they mean in words.
PATTERNS = {
    NAME: 'at most 100 letters, digits, ".", "_", "-", the first a letter or digit',
    PATH: "no control characters",
    FACTORY: 'as in "package.module:factory"',
}


def key(default: Any, role: Role, description: str, **limits: Any) -> Any:
    """A key of the spec: its default, its role, one line about it, and pydantic's limits (gt, ge, le, ...)."""
    return Field(default=default, description=description, json_schema_extra={"role": role}, **limits)


_Factory = Annotated[str, Field(pattern=FACTORY, max_length=200)]
_Decay = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Model(Table):
    """What is trained."""

    family: Literal["gpt"] | _Factory = key(
        "gpt", "identity", "kind of model, or the function (importable by this name) that makes a torch.nn.Module from this table"
    )
    layers: int = key(4, "identity", "transformer blocks", ge=1, le=10_000)
    hidden: int = key(256, "identity", "width of the residual stream", ge=1, le=10_000_000)
    heads: int = key(4, "identity", "attention heads", ge=1, le=1_000_000)
    head_dim: int = key(0, "identity", "width of a head; 0: hidden / heads, rounded up", ge=0, le=10_000_000)
    ffn: int = key(0, "identity", "width inside the feed-forward part; 0: 4 x hidden", ge=0, le=100_000_000)
    vocab: int = key(257, "identity", "number of different tokens; the byte tokenizer has 257", ge=1, le=1_000_000_000)
    seq_len: int = key(128, "identity", "tokens in a sequence", ge=1, le=100_000_000)
    dropout: float = key(0.0, "identity", "probability to drop a value (after the embedding, attention and feed-forward)", ge=0, lt=1)
    tied_embeddings: StrictBool = key(True, "identity", "the head uses the embedding's weight")
    kernels: Literal["auto", "torch"] = key("auto", "site", "hpczero's kernels where they are faster, or PyTorch's operations alone")


class Data(Table):
    """What it is trained on."""

    source: str = key(
        "stdlib",
        "identity",
        '"stdlib" (text of the running Python\'s library), "synthetic", or the path of a token file',
        min_length=1,
        max_length=4096,
        pattern=PATH,
    )
    tokenizer: Literal["byte"] = key("byte", "identity", "how text becomes tokens, when hpczero builds the file")
    validation_fraction: float = key(0.05, "identity", "share of the text kept for validation, when hpczero builds the file", ge=0, lt=1)
    prefetch: int = key(4, "site", "steps that the background reader is ahead", ge=1, le=1000)


class Train(Table):
    """How long, how much at once, how precisely."""

    steps: int = key(100, "changeable", "optimizer steps", ge=1, le=LARGEST)
    global_batch: int = key(16, "changeable", "sequences in a step, over all ranks", ge=1, le=1_000_000_000)
    micro_batch: int = key(8, "changeable", "sequences that a rank takes through the model at once, at most", ge=1, le=1_000_000)
    precision: Literal["bf16", "fp16", "fp32"] = key(
        "bf16", "changeable", "number format of the model; half formats keep fp32 master weights"
    )
    loss_scale: float = key(65536.0, "changeable", "fp16 only: the first loss scale; it then follows the overflows", gt=0)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "site", "where the tensors live; auto: on GPUs where there are any")
    grad_clip: float = key(1.0, "changeable", "largest global norm of the gradient; 0: no clipping", ge=0)
    log_every: int = key(10, "site", "steps between two lines of output", ge=1, le=LARGEST)
    eval_every: int = key(0, "site", "steps between two evaluations; 0: only at the end", ge=0, le=LARGEST)
    eval_batches: int = key(8, "site", "global batches in an evaluation; 0: no evaluation", ge=0, le=1_000_000)
    trace: StrictBool = key(False, "site", "write what happened when on every rank, for Perfetto or chrome://tracing")


class Optimizer(Table):
    """How the weights follow the gradient."""

    name: Literal["adamw"] = key("adamw", "changeable", "the rule")
    lr: float = key(3e-4, "changeable", "learning rate at its highest", gt=0)
    betas: tuple[_Decay, _Decay] = key((0.9, 0.95), "changeable", "decay of the first and second moment", strict=False)
    eps: float = key(1e-8, "changeable", "added to the root of the second moment", gt=0)
    weight_decay: float = key(0.1, "changeable", "decoupled decay of matrices (biases and norms have none)", ge=0)


class Schedule(Table):
    """The learning rate over the steps."""

    name: Literal["constant", "linear", "cosine", "wsd"] = key(
        "cosine", "changeable", "shape after the warm-up: wsd keeps the rate, then decays it over the last decay_steps"
    )
    warmup_steps: int = key(0, "changeable", "steps of linear growth from 0", ge=0, le=LARGEST)
    decay_steps: int = key(0, "changeable", "wsd only: steps of the decay; 0: a fifth of all steps", ge=0, le=LARGEST)
    min_lr: float = key(0.0, "changeable", "learning rate at the end", ge=0)


class Parallel(Table):
    """How the ranks are laid out; the data axis is what remains of them."""

    tensor: int = key(1, "changeable", "ranks that share each layer", ge=1, le=1_000_000)
    pipeline: int = key(1, "changeable", "stages that the layers are cut into", ge=1, le=1_000_000)
    sequence_parallel: StrictBool = key(
        False, "changeable", "tensor ranks also share the sequence between their products: less activation memory, a quarter more bytes"
    )
    schedule: Literal["1f1b", "gpipe", "interleaved"] = key(
        "1f1b", "changeable", "order of forwards and backwards in the pipeline; interleaved: each stage has several parts of the model"
    )
    chunks: int = key(1, "changeable", "interleaved only: parts of the model on each stage", ge=1, le=10_000)
    order: str = key(
        "auto",
        "changeable",
        'axes from the innermost (neighbouring ranks) to the outermost, as in "tensor,data,pipeline"; "auto": fewest bytes between nodes',
        max_length=100,
    )


class Zero(Table):
    """Which of the model states are cut into shards over the data ranks, and where they lie."""

    stage: Literal[0, 1, 2, 3] = key(1, "changeable", "sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters")
    bucket_mb: int = key(4, "site", "size of a communication buffer in MiB, whatever the model; a group has two", ge=1, le=1_000_000)
    node_shared: Literal["auto", True, False] = key("auto", "site", "the data ranks of a node keep one copy of the parameters together")


class Comm(Table):
    """How the ranks talk."""

    backend: Literal["auto", "mpi", "nccl", "gloo"] = key(
        "auto", "site", "what carries collectives: MPI, or torch.distributed (nccl on GPUs, gloo on CPUs); auto: nccl where each rank has a GPU"
    )
    ranks_per_node: int = key(0, "site", "try out a node layout: so many ranks count as a node; 0: as it is", ge=0, le=1_000_000)
    timeout_s: float = key(600.0, "site", "seconds that a rank waits for the others before the job ends with an error", gt=0, le=1e9)


class Checkpoint(Table):
    """What is kept of a run on disk, and where it begins again."""

    every: int = key(1000, "changeable", "steps between two checkpoints; 0: only when the run ends or is stopped, -1: never", ge=-1, le=LARGEST)
    keep: int = key(2, "changeable", "newest checkpoints that are kept; 0: all", ge=0, le=LARGEST)
    keep_every: int = key(0, "changeable", "checkpoints of steps that this divides are kept for good; 0: none", ge=0, le=LARGEST)
    asynchronous: StrictBool = key(True, "site", "save behind the training, from a copy of the states (12 bytes a parameter over all data ranks)")
    writers: Literal["node", "rank"] = key("node", "site", "who writes a file: a node, or each rank")
    resume: str = key("auto", "site", 'where to begin: "auto", the newest complete one; "never"; or its folder', max_length=4096, pattern=PATH)
    weights_only: StrictBool = key(False, "site", "take nothing but the weights from the checkpoint that resume names: a run of its own, from step 0")
    on_error: Literal["stop", "continue"] = key("stop", "site", "what a run does that cannot save a checkpoint")


class Paths(Table):
    """Where files lie; $SCRATCH, $USER and ~ are expanded."""

    cache: str = key("", "site", "folder for what can be built again (token files); empty: ~/.cache/hpczero", max_length=4096, pattern=PATH)


class Spec(Table):
    """A job: what to train, on what, how."""

    name: str = key("run", "identity", "name of the run, and of its folder", pattern=NAME)
    seed: int = key(1, "identity", "everything random follows from it", ge=0, le=2**63 - 1)
    output: str = key("runs", "site", "folder that holds the runs' folders", min_length=1, max_length=4096, pattern=PATH)
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    zero: Zero = Zero()
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()
    paths: Paths = Paths()
