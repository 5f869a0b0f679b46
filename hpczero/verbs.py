"""The verbs of the command line: for each the function that carries it out, as "module:function",
a line of help, and its arguments.
"""

from hpczero.arguments import (
    CHECKPOINT,
    DEVICE,
    JSON,
    PRECISION,
    RUN,
    RUN_HELP,
    SET,
    SPEC,
    STEP,
    TOKENIZERS,
    argument,
    at_most_one,
    flag,
    verb,
    verb_group,
)
from hpczero.verb_groups import CHECKPOINT_VERBS, CLUSTER_VERBS, DATA_VERBS, SHOW_VERBS, SITE_VERBS

VERBS = {
    "init": verb(
        "hpczero.commands.init:init",
        "write a commented spec to start from",
        argument("path", "the file to write (default: spec.toml)", nargs="?", default="spec.toml"),
        argument("--from-hf DIR", "for the model in this folder, as Hugging Face has them"),
    ),
    "check": verb(
        "hpczero.commands.sweep:check",
        "read a spec and print its meaning, without running it",
        *SPEC,
        argument("--explain KEY", "print a key's meaning and where its value comes from"),
        argument("--ranks N", "also lay the job out over N ranks", type=int),
        argument("--ranks-per-node K", "with --ranks: K ranks on a node", type=int),
        JSON,
    ),
    "plan": verb(
        "hpczero.commands.plan:plan",
        "the layouts that fit a cluster's nodes, the fastest first, before anything runs",
        argument("spec", "the job's TOML file", nargs="?"),
        SET,
        argument("--cluster CLUSTER", "its name, or a file *.toml (default: batch.cluster)"),
        argument("--nodes N", "nodes of the job, or a range as in 1-64"),
        argument("--ranks-per-node K", "K ranks on a node (default: one a device)", type=int),
        argument(
            "--pin SECTION.KEY",
            "keep the spec's value of a key, as --set does (may be repeated)",
            action="append",
            default=[],
        ),
        argument("--top N", "show the N best layouts (default: 10)", type=int, default=10),
        argument("--write FILE", "write the best layout as a spec"),
        argument("--svg FILE", "draw a step of the best layout; of a range of nodes the trade"),
        argument(
            "--why LAYOUT",
            "what a layout loses against the best one: a row, spec, or as in tensor=4,stage=3",
        ),
        argument("--explain RUN", "where a run and what is predicted of it part"),
        JSON,
    ),
    "run": verb(
        "hpczero.commands.run:run",
        "train: mpirun -n N hpczero run spec.toml",
        *SPEC,
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
        *SPEC,
        argument("-o --output FILE", "write to this file instead of stdout"),
    ),
    "submit": verb(
        "hpczero.batch.submit_sweep:submit",
        "submit a run to Slurm or PBS, as one job or a chain of jobs",
        *SPEC,
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
            "run RUN", f"{RUN_HELP} (default: all that were submitted, a row each)", nargs="?"
        ),
        JSON,
    ),
    "runs": verb(
        "hpczero.commands.jobs:runs",
        "list all runs below a folder, also those started by hand",
        argument("folder FOLDER", "the folder (default: runs)", nargs="?", default="runs"),
        argument(
            "--sort",
            "what they are listed by: the lowest loss, the fastest, the newest first",
            choices=["name", "state", "loss", "validation", "speed", "age"],
            default="name",
        ),
        JSON,
    ),
    "compare": verb(
        "hpczero.commands.compare:compare_",
        "runs beside each other: what differs, losses over steps, tokens and time, the best",
        argument("runs RUN", f"{RUN_HELP}, or a folder: all runs below it", nargs="+"),
        flag("--each", "every run by itself, also those that differ by their seed alone"),
        argument(
            "--over",
            "the losses at equal steps, tokens, seconds of steps, or seconds by the clock",
            choices=["steps", "tokens", "seconds", "clock"],
        ),
        argument("--csv FILE", "write the curves to this file (-: to stdout)"),
        argument(
            "--points N",
            "at most N points of a run's training loss, in --csv and --json (default: 500)",
            type=int,
            default=500,
        ),
        JSON,
    ),
    "cancel": verb(
        "hpczero.commands.jobs:cancel",
        "remove a run's jobs from the queue, and end those that are running",
        RUN,
    ),
    "logs": verb(
        "hpczero.commands.logs:logs",
        "print the output of a run's newest job",
        RUN,
        flag("-f --follow", "keep printing new output until no job is left"),
        argument("--rank R", "the node of this rank, and the lines that name it", type=int),
    ),
    "top": verb(
        "hpczero.commands.top:top",
        "watch a run: progress, loss, what each rank does, memory, events (q ends it)",
        RUN,
        flag("--once", "one frame, as where there is no terminal"),
        argument("--every SECONDS", "between two frames (default: 2)", type=float, default=2.0),
        JSON,
    ),
    "blame": verb(
        "hpczero.commands.blame:blame",
        "say which rank a run waits for, or waited for, and in what; which rank is slow, and why",
        RUN,
        JSON,
    ),
    "report": verb(
        "hpczero.commands.report:report",
        "write what runs did as one page of HTML that needs nothing else",
        argument("runs RUN", f"{RUN_HELP}; several are compared", nargs="+"),
        argument("-o --output FILE", "the page (default: RUN/report.html; of several report.html)"),
        argument("--png FOLDER", "write the figures for slides into a folder"),
        argument("--md FILE", "write it for a lab book, its figures into FILE_figures"),
    ),
    "plot": verb(
        "hpczero.commands.report:plot",
        "print the loss curve of a run",
        RUN,
        argument("--svg FILE", "draw it, too"),
    ),
    "data": verb_group("work with training data", "Work with training data.", DATA_VERBS),
    "ckpt": verb_group(
        "inspect checkpoints", "Inspect checkpoints, without MPI and torch.", CHECKPOINT_VERBS
    ),
    "eval": verb(
        "hpczero.commands.evaluate:eval_",
        "loss, bits per byte and accuracy of a checkpoint on token files (alone or under mpirun)",
        CHECKPOINT,
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
        *(DEVICE, PRECISION, STEP, JSON),
    ),
    "sample": verb(
        "hpczero.commands.sample:sample",
        "generate text from a checkpoint",
        CHECKPOINT,
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
        argument("--tokenizer NAME", f"{TOKENIZERS}, or a token file (default: the run's)"),
        *(DEVICE, PRECISION, STEP, JSON),
    ),
    "doctor": verb(
        "hpczero.commands.doctor:doctor",
        "find problems of this machine, and their fixes (alone or under mpirun)",
        flag("--clean", "remove shared-memory segments that no living process uses"),
        flag("--prebuild", "compile the kernels for this kind of computer, so that no job has to"),
        JSON,
    ),
    "calibrate": verb(
        "hpczero.commands.calibrate:calibrate",
        "measure this machine and write a cluster file of it (alone or under mpirun)",
        argument("-o --output FILE", "the file to write (default: clusters/NAME.toml)"),
        argument("--name NAME", "of the cluster (default: the first rank's host)"),
        argument("--folder DIR", "whose disk is measured (default: the current one)", default="."),
        argument("--seconds N", "it takes about so long (default: 90)", type=float, default=90.0),
        argument(
            "--from RUN",
            "measure nothing, and take the rates that the traces of these runs show",
            dest="runs",
            nargs="+",
            default=[],
        ),
        argument("--base CLUSTER", "with --from: has the numbers that runs do not show"),
        flag("--overwrite", "replace a file that exists"),
        JSON,
    ),
    "site": verb_group(
        "show known sites", "Show known sites: nodes, queues, launchers.", SITE_VERBS
    ),
    "cluster": verb_group(
        "show clusters to plan for", "Show clusters: devices, nodes, network.", CLUSTER_VERBS
    ),
    "show": verb_group("draw what a spec says", "Draw what a spec says.", SHOW_VERBS),
    "spec": verb(
        "hpczero.commands.check:reference",
        "print every key of the spec: type, default, role, meaning",
        JSON,
        flag("--markdown", "print the page docs/spec.md"),
    ),
}
