"""No text of a spec is run by the shell or read as a directive.

Each script that is rendered is read by the parser of the directives, and run by a shell in which
every command that it may start is a fake one that writes down its words. A file that the hostile
texts would make tells whether any of them was carried out.
"""

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpczero.batch import render as header
from hpczero.batch.job import BatchJob, SubmitHost, plan, program
from hpczero.batch.render import launch_command, render
from hpczero.errors import InputError
from hpczero.spec.load import load, toml_value

EVIL = [
    "$(touch HERE)",
    "`touch HERE`",
    "; touch HERE;",
    "| touch HERE",
    "& touch HERE &",
    "${IFS}touch${IFS}HERE",
    "$((HERE=1))",
    "<(touch HERE)",
    "' ; touch HERE ; '",
    '" ; touch HERE ; "',
    "\\'; touch HERE #",
    "\n#SBATCH --wrap=x\ntouch HERE\n",
    "\n#PBS -l select=99\ntouch HERE\n",
    "#SBATCH --nodes=99",
    "#PBS -q other",
    "x #SBATCH --nodes=99",
    "--nodes=99",
    "-q",
    "-",
    "--",
    "{{ 7 * 7 }}",
    "{% include 'base.sh.j2' %}",
    "%j",
    "a b",
    "*",
    "~",
    "é",
    "\u202e",
    "\r",
    "\t",
    "\x00",
    "\x1b[31m",
    "a,ALL",
    "a:b=c",
    "x" * 300,
    "",
    "!!",
    "a\\",
    "EOF\ntouch HERE\n",
]
SHELL = [text for text in EVIL if text.isprintable() and 0 < len(text) < 300]
TEXTS = st.one_of(
    st.sampled_from(SHELL),
    st.sampled_from(EVIL),
    st.lists(st.sampled_from([*EVIL, "a", "/", " ", "1"]), max_size=3).map("".join),
    st.text(max_size=12),
)
NAMES = st.sampled_from(
    ["PATHS", "a b", "X;touch HERE", "$(touch HERE)", "1X", "X=Y", "-n", ""]
) | st.text(max_size=6)
ONE = [
    "account",
    "queue",
    "qos",
    "constraint",
    "reservation",
    "exclude",
    "pbs_chunk",
    "pbs_place",
    "after",
    "begin",
    "mail",
    "mem",
    "walltime",
    "bind",
    "venv",
    "container",
    "site",
]
SEVERAL = [
    "modules",
    "launch_options",
    "command",
    "container_options",
    "pbs_resources",
    "extra_directives",
    "env_pass",
]
QUOTED = [
    "launch_options",
    "command",
    "container_options",
    "env",
]  # free text, which the shell must get quoted
FAKES = ("srun", "mpirun", "mpiexec", "module")


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, Any]:
    batch: dict[str, Any] = {"site": draw(st.sampled_from(["generic/slurm", "generic/pbs"]))}
    batch["launcher"] = draw(st.sampled_from(["auto", "mpirun", "mpiexec"]))
    batch["venv"] = "/" + draw(st.sampled_from(SHELL)) if draw(st.booleans()) else ""
    for key in draw(
        st.lists(st.sampled_from([*QUOTED, *SEVERAL, *ONE]), min_size=1, max_size=2, unique=True)
    ):
        if key in QUOTED and draw(st.integers(0, 5)):
            harmless = st.sampled_from(["A", "LD_PRELOAD_", "IFS_"])
            batch[key] = (
                {draw(harmless): draw(st.sampled_from(SHELL))}
                if key == "env"
                else draw(st.lists(st.sampled_from(SHELL), max_size=3))
            )
        elif key in ONE:
            batch[key] = draw(TEXTS)
        elif key in SEVERAL:
            batch[key] = draw(st.lists(TEXTS, max_size=2))
        else:
            batch[key] = {draw(NAMES): draw(TEXTS) for _ in range(2)}
    return batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the fake commands; they write their words into `said`, each ended by a zero byte."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "bin").mkdir()
    for name in FAKES:
        program = folder / "bin" / name
        program.write_text(
            f"#!{shutil.which('bash')}\n"
            'printf \'%s\\0\' "${0##*/}" "$@" >>"$SAID"\nprintf \'\\n\\0\' >>"$SAID"\n'
        )
        program.chmod(0o755)
    return folder


def dry_run(folder: Path, script: str) -> list[list[str]]:
    """Return the commands that the script starts.

    There is no other program that it could find: touch is a function of the shell.
    """
    said = folder / "said"
    said.unlink(missing_ok=True)
    variables = {"PATH": str(folder / "bin"), "SAID": str(said), "HOME": str(folder)}
    # the script's own touch has another argument
    guard = (
        f'touch() {{ case $1 in */links) ;; *) : >"{folder}/done" ;; esac; }}\nexport -f touch\n'
    )
    path = folder / "script.sh"
    path.write_text(
        guard + script.replace("export PATH=", "export HPCZERO_OWN_PATH="), encoding="utf-8"
    )
    subprocess.run(
        [shutil.which("bash") or "bash", str(path)],
        cwd=folder,
        env=variables,
        capture_output=True,
        timeout=20,
        check=False,
    )
    text = said.read_bytes().decode(errors="surrogateescape") if said.exists() else ""
    commands: list[list[str]] = [[]]
    for word in text.split("\0")[:-1]:
        if word == "\n":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands[:-1]


def expected_directives(batch: dict[str, Any], script: str, scheduler: str) -> None:
    """Accept only options that the keys above lead to, each once, and none from inside a text."""
    found = header.directives(script, scheduler)
    extra = len(batch.get("extra_directives", []))
    own = found[: len(found) - extra]
    assert all(len(words) <= 2 for words in own)
    about = [about for words in own for about in header.subjects(words, scheduler)]
    assert len(about) == len(set(about))
    nodes = [
        words
        for words in found
        if words[0].startswith(("--nodes", "-N99")) or words[-1].startswith("select=")
    ]
    assert nodes in (
        [["--nodes=1"]],
        [["-l", words[-1]] for words in nodes if words[-1].startswith("select=1")],
    )
    marks = [line for line in script.split("\n") if line.startswith(("#SBATCH", "#PBS"))]
    assert len(marks) == len(found), "a directive below the first command"


def rendered(
    spec: Path, place: Path, argument: str, output: str
) -> tuple[BatchJob | None, str, str]:
    """Return the job, its script and the refusal; `output`: the run's folder if it is submitted."""
    try:
        read = load(spec).spec
        words = program(read.batch, argument)
        job = plan(read, SubmitHost(str(place), "/env", ()), words)
        if output:
            books = f"{output}/batch/1"
            Path(books).mkdir(parents=True, exist_ok=True)
            for name in ("links", "over"):
                Path(books, name).unlink(missing_ok=True)
            job = replace(job, run=output, submission=books, tag="hpczero:ab:0")
        return job, render(job), ""
    except InputError as error:
        return None, "", str(error)


def test_nothing_of_a_hostile_spec_is_carried_out(folder: Path, everything: bool) -> None:
    examples = 900 if everything else 250
    outcomes: Counter[str] = Counter()
    canary = folder / "done"
    places = [
        folder / name
        for name in ("plain", "a b", "x$(touch HERE)", "';touch HERE;'", "`touch HERE`")
    ]
    for place in places:
        place.mkdir()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        batch=hostile(),
        place=st.sampled_from(places),
        argument=st.sampled_from(SHELL) | TEXTS,
        submitted=st.booleans(),
    )
    def attack(batch: dict[str, Any], place: Path, argument: str, submitted: bool) -> None:
        keys = "".join(f"{key} = {toml_value(value)}\n" for key, value in batch.items())
        (folder / "spec.toml").write_text(
            "[batch]\n" + keys, encoding="utf-8", errors="surrogatepass"
        )
        job, script, refusal = rendered(
            folder / "spec.toml", place, argument, f"{place}/a run" if submitted else ""
        )
        if job is None:
            outcomes["refused"] += 1
            assert all(line.isprintable() for line in refusal.split("\n"))
            return
        outcomes["submitted" if submitted else "rendered"] += 1
        expected_directives(batch, script, job.scheduler)
        commands = dry_run(folder, script)
        loads = [["module", "load", *job.batch.modules]] if job.batch.modules else []
        assert commands == [*loads, launch_command(job)]
        assert not canary.exists()

    attack()
    assert outcomes["rendered"] > examples / 9, outcomes
    assert outcomes["submitted"] > examples / 23, outcomes
    assert outcomes["refused"] > examples / 9, outcomes


def test_the_dry_shell_would_notice(folder: Path) -> None:
    """A script that forgot to quote would be noticed."""
    assert dry_run(folder, "srun a$(touch x) b\n") == [["srun", "a", "b"]]
    assert (folder / "done").exists()
    (folder / "done").unlink()
    assert dry_run(folder, "module load a\nsrun 'a b'\n") == [
        ["module", "load", "a"],
        ["srun", "a b"],
    ]


@pytest.mark.parametrize("name", ["x\n#SBATCH --nodes=9", "-x", "$(touch x)", "a b", "a'b"])
def test_a_hostile_name_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(f"name = {toml_value(name)}\n")
    with pytest.raises(InputError, match="name = "):
        load(tmp_path / "spec.toml")


def test_no_value_of_a_variable_that_is_handed_over_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "hunter2-and-more")
    assert os.environ["TOKEN_OF_MINE"]
    for site, mark in (
        ("generic/slurm", "#SBATCH --export=TOKEN_OF_MINE"),
        ("generic/pbs", "#PBS -v TOKEN_OF_MINE"),
    ):
        (tmp_path / "spec.toml").write_text(
            f'batch = {{ site = "{site}", env_pass = ["TOKEN_OF_MINE"] }}\n'
        )
        script = render(
            plan(load(tmp_path / "spec.toml").spec, SubmitHost.now(), ("run", "spec.toml"))
        )
        assert mark in script.splitlines()
        assert "hunter2" not in script
