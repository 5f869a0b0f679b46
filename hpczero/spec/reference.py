"""The reference of every key, printed from the schema: as text, as the page docs/spec.md, as data."""

from typing import Any

from hpczero.spec.keys import Key, about, tables
from hpczero.spec.toml import toml_value

ROLES = {
    "identity": "a change makes it another run: refused when a run goes on",
    "changeable": "a run may go on with another value; the change is logged",
    "site": "says where things lie and how the job is started, not what is computed",
}
_EXTENDS = '`extends = "base.toml"` names one other spec, relative to the file that says so, whose values hold where this one says nothing.'
_INTRODUCTION = f"""# The job spec

<!-- Printed by `hpczero spec --markdown` from hpczero/spec/schema.py: edit that, not this. -->

A job is one TOML file. Every key has a default, so that a spec says only what is special about the job. Unknown keys, wrong types and
values that contradict each other are errors, all reported at once, with file and line.

{_EXTENDS}
Tables merge, arrays replace. The first of these that names a key decides: `--set section.key=value` on the command line, the spec,
what it extends, the profile of the site, the default. `hpczero check SPEC --explain section.key` tells from where.

The role of a key says what a change means for a run that already exists:

"""


def as_text() -> str:
    lines = [f'extends = ""  (no default)\n    {_EXTENDS.replace("`", "")}']
    for table, found in tables().items():
        lines.append(f"\n[{table}]  {about(table)}" if table else "")
        lines += [f"{key.leaf} = {toml_value(key.default)}  ({key.role})\n    {key.description}: {key.allowed}" for key in found.values()]
    return "\n".join(lines) + "\n\n" + "\n".join(f"{role}: {meaning}" for role, meaning in ROLES.items())


def as_markdown() -> str:
    page = _INTRODUCTION + "\n".join(f"- `{role}`: {meaning}" for role, meaning in ROLES.items()) + "\n"
    for table, found in tables().items():
        page += f"\n## {f'[{table}]' if table else 'Above all tables'}\n\n{about(table)}\n\n"
        page += "| key | default | allowed | role | meaning |\n|---|---|---|---|---|\n"
        page += "".join(_row(key) for key in found.values())
    return page.rstrip("\n")


def as_data() -> list[dict[str, Any]]:
    return [
        {"key": key.name, "default": key.default, "allowed": key.allowed, "role": key.role, "description": key.description}
        for found in tables().values()
        for key in found.values()
    ]


def _row(key: Key) -> str:
    cells = [f"`{key.leaf}`", f"`{toml_value(key.default)}`", key.allowed, key.role, key.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
