"""The verbs of the command line that stand behind a noun, as `hpczero ckpt ls`."""

from hpczero.arguments import (
    CHECKPOINT,
    CHECKPOINT_HELP,
    JSON,
    SET,
    SPEC,
    STEP,
    TOKENIZERS,
    Argument,
    argument,
    flag,
    verb,
    verb_group,
)

_TENSORS = argument(
    "pattern PATTERN",
    "tensors by name, as in a shell; without *, ? and [: those that contain it",
    nargs="?",
)
_TOKEN_FILE = argument("path", "the token file, or tokens of Megatron-LM, datatrove or numpy")
_TEXTS = argument(
    "paths PATH",
    "files, folders or globs; .txt .md .py .jsonl, also as .gz or .zst; .parquet .arrow",
    nargs="+",
)
_FIELD = argument(
    "--field NAME",
    'the field of a .jsonl line, or column of a table, that holds the text (default: "text")',
    default="text",
)
_END_OF_DOCUMENT = argument("--end-of-document TOKEN", "the token after each document")


def _slot(default: str) -> Argument:
    return argument(
        "--slot",
        "model (the weights), moment1, moment2 (of AdamW), another state of the optimizer that "
        f"show names, or all (default: {default})",
        default=default,
    )


TOKENIZER_VERBS = {
    "train": verb(
        "hpczero.commands.tokenizer:train",
        "learn a byte-level BPE vocabulary from text",
        argument("-o --output", "the tokenizer.json to write", required=True),
        argument("--vocabulary N", "ids (default: 32768)", type=int, default=32_768),
        *(_TEXTS, _FIELD),
    ),
    "show": verb(
        "hpczero.commands.tokenizer:show",
        "print a tokenizer's facts, and what it makes of a text",
        argument("tokenizer TOKENIZER", f"{TOKENIZERS}, or a token file"),
        argument("--text TEXT", "the text to encode (default: a line of Python)"),
        *(_END_OF_DOCUMENT, JSON),
    ),
}

DATA_VERBS = {
    "build": verb(
        "hpczero.commands.data:build",
        "turn text files into a token file",
        argument("-o --output", "the token file to write (.h5)", required=True),
        _TEXTS,
        argument(
            "--tokenizer NAME",
            f"how text becomes tokens (default: byte): {TOKENIZERS}",
            default="byte",
        ),
        _END_OF_DOCUMENT,
        argument(
            "--validation-fraction",
            "share of the text for validation (default: 0.05)",
            type=float,
            default=0.05,
        ),
        _FIELD,
        argument(
            "--workers N",
            "processes that encode (default: the cores; little text needs none)",
            type=int,
        ),
        argument(
            "--max-bad N",
            "lines and rows that may be left out because they are no text (default: 0)",
            type=int,
            default=0,
        ),
        argument("--submit SPEC", "do it in a job, on a node as the [batch] of this spec says"),
        SET,
        flag("--dry-run", "with --submit: print the script, and submit nothing"),
    ),
    "tokenizer": verb_group(
        "train a tokenizer, or look into one",
        "Train a tokenizer, or look into one.",
        TOKENIZER_VERBS,
    ),
    "show": verb(
        "hpczero.commands.data:show", "print the facts of a token file", _TOKEN_FILE, JSON
    ),
    "verify": verb(
        "hpczero.commands.data:verify",
        "read a whole token file and compare it with its checksums",
        *(_TOKEN_FILE, JSON),
    ),
}

CHECKPOINT_VERBS = {
    "ls": verb(
        "hpczero.commands.checkpoint:ls",
        "list checkpoints, and tell which are complete",
        argument(
            "paths PATH",
            "runs, folders of runs or of checkpoints (default: runs)",
            nargs="*",
            default=["runs"],
        ),
        JSON,
    ),
    "show": verb(
        "hpczero.commands.checkpoint:show",
        "list the tensors of a checkpoint, and the rank and file that hold them",
        *(CHECKPOINT, _TENSORS, STEP),
        flag("--pieces", "also every piece: rank, file, offset, part of the tensor"),
        JSON,
    ),
    "stats": verb(
        "hpczero.commands.checkpoint:stats",
        "norm, mean, std, min, max, and the number of NaN and infinities, of each tensor",
        *(CHECKPOINT, _TENSORS, STEP, _slot("model"), JSON),
    ),
    "diff": verb(
        "hpczero.commands.checkpoint:diff",
        "list the tensors in which two checkpoints differ, and by how much; 0: none, 1: some",
        argument("a A", CHECKPOINT_HELP),
        argument("b B", "the checkpoint to compare it with"),
        argument(
            "--tolerance T",
            "relative norm of a difference that does not count (default: 0)",
            type=float,
            default=0.0,
        ),
        *(_slot("all"), JSON),
    ),
    "verify": verb(
        "hpczero.commands.checkpoint_upkeep:verify",
        "compare a whole checkpoint with its checksums (alone or under mpirun)",
        argument("checkpoints CKPT", CHECKPOINT_HELP, nargs="+"),
        *(STEP, JSON),
    ),
    "export": verb(
        "hpczero.commands.export_import:export",
        "write the weights as safetensors",
        CHECKPOINT,
        argument("output OUT", "a file *.safetensors, or a folder"),
        argument(
            "--shard-size SIZE",
            "several files of at most this size (5GB), with an index, in the folder OUT",
        ),
        argument(
            "--dtype",
            "of the weights (default: fp32, as they are)",
            choices=["fp32", "bf16", "fp16"],
            default="fp32",
        ),
        flag("--hf", "as a model of Hugging Face, in the folder OUT: weights, config, tokenizer"),
        argument("--architecture NAME", "with --hf: which, where several could be the model"),
        argument(
            "--tokenizer NAME", f"with --hf: {TOKENIZERS}, or a token file (default: the run's)"
        ),
        STEP,
    ),
    "import": verb(
        "hpczero.commands.export_import:import_",
        "make a checkpoint at step 0 from weights in safetensors files",
        argument("files FILE", "safetensors files, or folders of them", nargs="+"),
        flag("--hf", "FILE is a model's folder as Hugging Face has them"),
        argument("--spec", "the job's TOML file, whose model has these tensors", required=True),
        SET,
        argument("-o --output RUN", "the run's directory (default: that of the spec)"),
    ),
    "prune": verb(
        "hpczero.commands.checkpoint_upkeep:prune",
        "remove checkpoints; never the newest complete one",
        argument("path RUN", "a run's directory, or its folder of checkpoints"),
        argument("--keep N", "keep the N newest complete ones", type=int),
        argument(
            "--keep-every K",
            "with --keep: also keep those of steps that K divides",
            type=int,
            default=0,
        ),
        flag("--incomplete", "also remove those that are incomplete"),
        flag("--damaged", "also remove those that are damaged"),
        flag("--set-aside", "also remove those that are set aside"),
        flag("--dry-run", "only print which ones would be removed"),
    ),
}

SITE_VERBS = {
    "list": verb("hpczero.commands.site:list_", "list sites and partitions", JSON),
    "show": verb(
        "hpczero.commands.site:show",
        "a site's nodes, limits, and defaults of a job there",
        argument("name SITE", 'as in "perlmutter" or "perlmutter/gpu"'),
        JSON,
    ),
    "new": verb(
        "hpczero.commands.site:new",
        "write a profile of this site from the answers of its scheduler",
        argument("name NAME", "of the site"),
        argument(
            "-o --output FILE",
            "the file to write (default: sites/NAME.toml in the user's settings)",
        ),
    ),
}

CLUSTER_VERBS = {
    "list": verb(
        "hpczero.commands.cluster:list_", "list the clusters that jobs can be planned for", JSON
    ),
    "show": verb(
        "hpczero.commands.cluster:show",
        "a cluster's devices, nodes and network, and where the numbers come from",
        argument("name CLUSTER", "its name, or a file *.toml"),
        JSON,
    ),
}

SHOW_VERBS = {
    "attention": verb(
        "hpczero.commands.show:attention",
        "the blocks of keys that a layer's queries see, and their share of dense attention",
        *SPEC,
        argument("--layer N", "the layer (default: the first one with blocks)", type=int),
        argument("--head N", "the head (default: 0)", type=int, default=0),
        argument("--svg FILE", "draw the blocks"),
        JSON,
    ),
}
