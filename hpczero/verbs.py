"""The verbs of the command line: for each the function that carries it out, as "module:function",
a line of help, and its arguments.
"""

from hpczero.arguments import Argument, argument, at_most_one, flag, verb, verb_group

# ------------------------------------------------------------- arguments that several verbs have

_JSON = flag("--json", "print JSON")
_SET = argument(
    "--set SECTION.KEY=VALUE",
    "override one key (may be repeated)",
    dest="overrides",
    action="append",
    default=[],
)
_SPEC = (argument("spec", "the job's TOML file"), _SET)
_RUN_HELP = "the run's directory, its name, or its spec"
_RUN = argument("run RUN", _RUN_HELP)
_STEP = argument("--step N", "of a run: the checkpoint of this step", type=int)
_CHECKPOINT_HELP = "a checkpoint's folder, or a run's directory (then its newest complete one)"
_CHECKPOINT = argument("checkpoint CKPT", _CHECKPOINT_HELP)
_TENSORS = argument(
    "pattern PATTERN",
    "tensors by name, as in a shell; without *, ? and [: those that contain it",
    nargs="?",
)
_TOKEN_FILE = argument("path", "the token file")
_DEVICE = argument(
    "--device",
    "the device to compute on (default: auto, a GPU if there is one)",
    choices=["auto", "cpu", "cuda"],
    default="auto",
)
_PRECISION = argument(
    "--precision",
    "number format of the weights (default: the run's; fp32 for fp16 on CPUs)",
    choices=["bf16", "fp16", "fp32"],
)
_TEXTS = argument(
    "paths PATH", "files, folders or globs; .txt .md .py .jsonl, also as .gz", nargs="+"
)
_FIELD = argument(
    "--field NAME",
    'the field of a .jsonl line that holds the text (default: "text")',
    default="text",
)
_TOKENIZERS = "byte, a tokenizer.json, a SentencePiece *.model, or a folder with one of them"
_END_OF_DOCUMENT = argument("--end-of-document TOKEN", "the token after each document")


def _slot(default: str) -> Argument:
    return argument(
        "--slot",
        "model (the weights), moment1, moment2 (of AdamW), another state of the optimizer that "
        f"show names, or all (default: {default})",
        default=default,
    )


# ------------------------------------------------------------------------------------ the verbs

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
        argument("tokenizer TOKENIZER", f"{_TOKENIZERS}, or a token file"),
        argument("--text TEXT", "the text to encode (default: a line of Python)"),
        *(_END_OF_DOCUMENT, _JSON),
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
            f"how text becomes tokens (default: byte): {_TOKENIZERS}",
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
    ),
    "tokenizer": verb_group(
        "train a tokenizer, or look into one",
        "Train a tokenizer, or look into one.",
        TOKENIZER_VERBS,
    ),
    "show": verb(
        "hpczero.commands.data:show", "print the facts of a token file", _TOKEN_FILE, _JSON
    ),
    "verify": verb(
        "hpczero.commands.data:verify",
        "read a whole token file and compare it with its checksums",
        *(_TOKEN_FILE, _JSON),
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
        _JSON,
    ),
    "show": verb(
        "hpczero.commands.checkpoint:show",
        "list the tensors of a checkpoint, and the rank and file that hold them",
        *(_CHECKPOINT, _TENSORS, _STEP),
        flag("--pieces", "also every piece: rank, file, offset, part of the tensor"),
        _JSON,
    ),
    "stats": verb(
        "hpczero.commands.checkpoint:stats",
        "norm, mean, std, min, max, and the number of NaN and infinities, of each tensor",
        *(_CHECKPOINT, _TENSORS, _STEP, _slot("model"), _JSON),
    ),
    "diff": verb(
        "hpczero.commands.checkpoint:diff",
        "list the tensors in which two checkpoints differ, and by how much; 0: none, 1: some",
        argument("a A", _CHECKPOINT_HELP),
        argument("b B", "the checkpoint to compare it with"),
        argument(
            "--tolerance T",
            "relative norm of a difference that does not count (default: 0)",
            type=float,
            default=0.0,
        ),
        *(_slot("all"), _JSON),
    ),
    "verify": verb(
        "hpczero.commands.checkpoint_upkeep:verify",
        "compare a whole checkpoint with its checksums (alone or under mpirun)",
        argument("checkpoints CKPT", _CHECKPOINT_HELP, nargs="+"),
        *(_STEP, _JSON),
    ),
    "export": verb(
        "hpczero.commands.export_import:export",
        "write the weights as safetensors",
        _CHECKPOINT,
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
            "--tokenizer NAME", f"with --hf: {_TOKENIZERS}, or a token file (default: the run's)"
        ),
        _STEP,
    ),
    "import": verb(
        "hpczero.commands.export_import:import_",
        "make a checkpoint at step 0 from weights in safetensors files",
        argument("files FILE", "safetensors files, or folders of them", nargs="+"),
        flag("--hf", "FILE is a model's folder as Hugging Face has them"),
        argument("--spec", "the job's TOML file, whose model has these tensors", required=True),
        _SET,
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
    "list": verb("hpczero.commands.site:list_", "list sites and partitions", _JSON),
    "show": verb(
        "hpczero.commands.site:show",
        "a site's nodes, limits, and defaults of a job there",
        argument("name SITE", 'as in "perlmutter" or "perlmutter/gpu"'),
        _JSON,
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
        "hpczero.commands.cluster:list_", "list the clusters that jobs can be planned for", _JSON
    ),
    "show": verb(
        "hpczero.commands.cluster:show",
        "a cluster's devices, nodes and network, and where the numbers come from",
        argument("name CLUSTER", "its name, or a file *.toml"),
        _JSON,
    ),
}

VERBS = {
    "init": verb(
        "hpczero.commands.check:init",
        "write a commented spec to start from",
        argument("path", "the file to write (default: spec.toml)", nargs="?", default="spec.toml"),
        argument("--from-hf DIR", "for the model in this folder, as Hugging Face has them"),
    ),
    "check": verb(
        "hpczero.commands.check:check",
        "read a spec and print its meaning, without running it",
        *_SPEC,
        argument("--explain KEY", "print a key's meaning and where its value comes from"),
        argument("--ranks N", "also lay the job out over N ranks", type=int),
        argument("--ranks-per-node K", "with --ranks: K ranks on a node", type=int),
        _JSON,
    ),
    "run": verb(
        "hpczero.commands.run:run",
        "train: mpirun -n N hpczero run spec.toml",
        *_SPEC,
        at_most_one(
            flag("--resume", "continue the run that exists; an error if there is none"),
            flag("--fresh", "start anew; the run that exists is moved aside"),
        ),
        argument(
            "--progress",
            "how progress is shown (auto: live on a terminal)",
            choices=["auto", "live", "lines"],
            default="auto",
        ),
    ),
    "render": verb(
        "hpczero.commands.site:render",
        "write the batch script of a job, for Slurm or PBS",
        *_SPEC,
        argument("-o --output FILE", "write to this file instead of stdout"),
    ),
    "submit": verb(
        "hpczero.batch.submit:submit",
        "submit a run to Slurm or PBS, as one job or a chain of jobs",
        *_SPEC,
        flag("--dry-run", "print the script, and submit nothing"),
        flag(
            "--probe",
            "only a trial, as a run of its own: the same layout for five steps, a save, a restore",
        ),
        flag("--wait", "return when its jobs have ended; 0 if the run is finished then"),
    ),
    "status": verb(
        "hpczero.commands.jobs:status",
        "the state of a run, or of all that were submitted",
        argument(
            "run RUN", f"{_RUN_HELP} (default: all that were submitted, a row each)", nargs="?"
        ),
        _JSON,
    ),
    "runs": verb(
        "hpczero.commands.jobs:runs",
        "list all runs below a folder, also those started by hand",
        argument("folder FOLDER", "the folder (default: runs)", nargs="?", default="runs"),
        _JSON,
    ),
    "cancel": verb(
        "hpczero.commands.jobs:cancel",
        "remove a run's jobs from the queue, and end those that are running",
        _RUN,
    ),
    "logs": verb(
        "hpczero.commands.logs:logs",
        "print the output of a run's newest job",
        _RUN,
        flag("-f --follow", "keep printing new output until no job is left"),
        argument("--rank R", "the node of this rank, and the lines that name it", type=int),
    ),
    "data": verb_group("work with training data", "Work with training data.", DATA_VERBS),
    "ckpt": verb_group(
        "inspect checkpoints", "Inspect checkpoints, without MPI and torch.", CHECKPOINT_VERBS
    ),
    "eval": verb(
        "hpczero.commands.evaluate:eval_",
        "loss, bits per byte and accuracy of a checkpoint on token files (alone or under mpirun)",
        _CHECKPOINT,
        argument("files FILE", "token files (default: the run's)", nargs="*"),
        argument(
            "--split",
            "the part of each file (default: validation)",
            choices=["validation", "train", "all"],
            default="validation",
        ),
        argument(
            "--sequences N",
            "only N sequences, drawn at random (default: 0, all)",
            type=int,
            default=0,
        ),
        argument("--seq-len N", "tokens in a sequence (default: the run's)", type=int, default=0),
        argument(
            "--documents",
            "how documents count (default: as in the run)",
            choices=["packed", "masked", "padded"],
        ),
        argument(
            "--batch N", "sequences at once on a rank (default: 2,048 tokens)", type=int, default=0
        ),
        argument("--tensor N", "ranks that share the model (default: 1)", type=int, default=1),
        *(_DEVICE, _PRECISION, _STEP, _JSON),
    ),
    "sample": verb(
        "hpczero.commands.sample:sample",
        "generate text from a checkpoint",
        _CHECKPOINT,
        argument(
            "prompts PROMPT",
            "the texts to go on from (default: all of stdin; on a terminal, a new document)",
            nargs="*",
        ),
        argument("--file FILE", 'a prompt a line (- is stdin); of .jsonl the field "prompt"'),
        argument(
            "--tokens N", "the most tokens of an answer (default: 128)", type=int, default=128
        ),
        argument(
            "--temperature T", "0: always the likeliest token (default: 1)", type=float, default=1.0
        ),
        argument(
            "--top-k K", "draw from the K likeliest tokens (default: 0, all)", type=int, default=0
        ),
        argument(
            "--top-p P",
            "draw from the likeliest tokens that have the share P together (default: 1, all)",
            type=float,
            default=1.0,
        ),
        argument("--seed N", "another seed draws other tokens (default: 0)", type=int, default=0),
        argument("--batch N", "prompts at once (default: 8)", type=int, default=8),
        argument("--begin TOKEN", "a token before each prompt, such as <s>"),
        argument("--tokenizer NAME", f"{_TOKENIZERS}, or a token file (default: the run's)"),
        *(_DEVICE, _PRECISION, _STEP, _JSON),
    ),
    "doctor": verb(
        "hpczero.commands.doctor:doctor",
        "find problems of this machine, and their fixes (alone or under mpirun)",
        flag("--clean", "remove shared-memory segments that no living process uses"),
        flag("--prebuild", "compile the kernels for this kind of computer, so that no job has to"),
        _JSON,
    ),
    "site": verb_group(
        "show known sites", "Show known sites: nodes, queues, launchers.", SITE_VERBS
    ),
    "cluster": verb_group(
        "show clusters to plan for", "Show clusters: devices, nodes, network.", CLUSTER_VERBS
    ),
    "spec": verb(
        "hpczero.commands.check:reference",
        "print every key of the spec: type, default, role, meaning",
        _JSON,
        flag("--markdown", "print the page docs/spec.md"),
    ),
}
