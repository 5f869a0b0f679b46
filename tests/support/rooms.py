"""The rooms: their imports, and which do without torch; held by `test_architecture`."""

# room -> what it may import of hpczero, besides itself; a longer name is more precise and wins for
# that module alone
ALLOWED = {
    "errors": set(),
    "text": {"errors"},
    "svg": set(),
    "safe_files": {"errors"},
    "env": {"errors", "safe_files"},
    "machine": {"errors", "env", "safe_files"},
    "processors": {"machine"},
    "device": {"errors", "machine"},
    "kernel_cache": {"errors", "env", "safe_files"},
    "lock": {"errors", "env", "machine", "safe_files"},
    "cli": {"errors", "env", "arguments", "verbs", ""},
    "verbs": {"arguments", "verb_groups"},
    "verb_groups": {"arguments"},
    "arguments": set(),
    "hashing": set(),
    "__main__": {"cli"},
    "": {"env", "kernel_cache", "train.initialize", "comm.world", "data"},
    "spec": {"errors", "env", "machine", "safe_files", "text"},
    "spec.rules": {"errors", "text", "model.families", "model.shapes"},
    "spec.rules_of_families": {"text", "model.shapes"},
    "spec.rules_of_sequences": {"text"}
    | {"model.attention_layouts", "model.families", "model.shapes"},
    "comm": {"errors", "env", "machine", "device", "spec", "safe_files", "text"},
    "model": {"hpczero_kernels", "spec", "errors", "device", "hashing"},
    "planner": {"errors", "spec", "svg", "text", "comm.grid", "comm.trace", "data.samples"}
    | {"model.shapes", "model.families", "model.work", "model.attention_layouts"}
    | {"parallel.layout", "parallel.states", "parallel.activations.choice"}
    | {"parallel.replicas.exchanged", "parallel.replicas.sizes", "parallel.zero.gather_sizes"}
    | {"optim.matrices", "parallel.zero.matrix_places"}
    | {"parallel.pipeline.schedule", "parallel.pipeline.partition"}
    | {"parallel.pipeline.simulate"},
    "planner.cluster": {"errors", "env", "spec", "text", "planner.needs"},
    "parallel": {"model", "comm", "optim", "spec", "text"}
    | {"hpczero_kernels", "errors", "device"},
    "parallel.offload": {"model", "comm", "parallel", "spec", "text"}
    | {"hpczero_kernels", "errors", "device", "safe_files"},
    "optim": {"spec", "hpczero_kernels", "errors", "text"},
    "optim.matrices": {"spec", "model.shapes", "model.work"},
    "huggingface": {"errors", "safe_files", "spec", "text", "model.shapes", "model.families"}
    | {"checkpoint", "data", "model.attention_layouts"},
    "hdf5": {"errors", "safe_files"},
    "data": {"errors", "env", "hashing", "kernel_cache", "spec", "text", "hdf5", "safe_files"},
    "checkpoint": {"errors", "env", "spec", "text", "hdf5", "lock", "safe_files", ""}
    | {"comm.world", "comm.objects", "model.shapes", "model.families", "parallel.layout"}
    | {"data.token_file", "data.tokenizer"},
    "inference": {"errors", "text", "spec", "machine", "device", "kernel_cache", "comm.group"}
    | {"model", "parallel", "data", "checkpoint", "train.batches", "hpczero_kernels"},
    "track": {"errors", "env", "safe_files", "spec", "text"},
    "train": {
        "errors",
        "env",
        "machine",
        "processors",
        "device",
        "kernel_cache",
        "lock",
        "safe_files",
        "text",
    }
    | {"spec", "comm", "model", "parallel", "optim", "data", "planner", "track"}
    | {"runs.rank_times", "runs.goodput", "runs.energy"}
    | {"checkpoint", "hpczero_kernels", ""},
    "batch": {"errors", "env", "lock", "safe_files", "text", "spec", "comm.grid", "data.supply"}
    | {"model.families", "planner", "train.run_directory", "train", ""},
    "runs": {"errors", "safe_files", "spec", "text"},
    "report": {"errors", "env", "safe_files", "svg", "text", "spec", "runs"}
    | {"comm.grid", "comm.trace", "calibrate.run_trace", "data.samples", "planner.volumes"}
    | {"parallel.pipeline.schedule", "parallel.pipeline.simulate", "train.trace_file"},
    "doctor": {
        "errors",
        "env",
        "machine",
        "processors",
        "safe_files",
        "text",
        "comm",
        "hpczero_kernels",
        "",
    },
    "calibrate": {"errors", "machine", "processors", "device", "safe_files", "spec", "comm", "text"}
    | {"planner", "train.setup", "hpczero_kernels"},
    "calibrate.traced_run": {"errors", "safe_files", "spec", "text", "comm.grid", "comm.trace"}
    | {"model.families", "model.shapes", "parallel.states", "planner.volumes"}
    | {"train.trace_file", "calibrate"},
    "calibrate.run_trace": {"errors", "safe_files", "spec", "text", "comm.grid", "comm.trace"}
    | {"model.families", "planner.volumes", "train.trace_file"},
    "calibrate.replay": {"comm.trace", "parallel.pipeline.schedule", "planner"}
    | {"train.trace_file", "calibrate.run_trace"},
    "commands": {"errors", "env", "kernel_cache", "lock", "safe_files", "svg", "text", "spec"}
    | {
        "batch",
        "calibrate",
        "checkpoint",
        "comm",
        "data",
        "doctor",
        "huggingface",
        "inference",
        "model.attention_layouts",
        "model.shapes",
        "model.families",
        "planner",
        "report",
        "runs",
        "track",
        "train",
        "",
    },
}
PURE = (
    *("hashing", "model.attention_layouts", "model.shapes", "model.families", "model.work"),
    *(
        "planner",
        "comm.grid",
        "comm.trace",
        "parallel.layout",
        "parallel.states",
        "parallel.replicas.exchanged",
        "parallel.replicas.sizes",
        "parallel.replicas.turns",
        "parallel.zero.gather_sizes",
        "parallel.zero.matrix_places",
        "optim.matrices",
    ),
    *("parallel.pipeline.schedule", "parallel.pipeline.partition", "parallel.pipeline.simulate"),
)
WITHOUT_TORCH = (
    *(*PURE, "spec", "batch", "data", "checkpoint", "hdf5", "machine", "cli", "verbs", "text"),
    *("arguments", "verb_groups"),
    *("errors", "env", "safe_files", "kernel_cache", "lock", "track", ""),
    *("commands.init", "commands.blame", "commands.top", "commands.top_facts"),
    *("commands.top_frame", "commands.top_ranks", "commands.sweep", "commands.compare"),
    *("commands.report", "report", "runs", "commands.logs", "commands.checkpoint_upkeep"),
    *("commands.check", "commands.checkpoint", "commands.data", "commands.jobs", "commands.site"),
    *("commands.cluster", "commands.plan", "commands.plan_report", "commands.plan_picture"),
    *("commands.explain", "commands.show", "commands.export_import", "commands.tokenizer"),
    *("huggingface", "commands.calibrate", "train.trace_file"),
    *("calibrate.fits", "calibrate.findings", "calibrate.cluster_file"),
    *("calibrate.from_runs", "calibrate.traced_run", "calibrate.run_trace", "calibrate.replay"),
)
