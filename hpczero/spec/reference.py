"""The reference of every key, printed from the schema, and specs as TOML text.

The reference is printed as text, as the page docs/spec.md and as data. TOML is written for the
resolved copy that a run keeps, and for the commented spec to start from.
"""

import json
from typing import Any

from hpczero.spec.keys import Key, about, flat, tables
from hpczero.spec.schema import Spec

ROLES = {
    "identity": "a change makes it another run: refused on resume",
    "changeable": "a run may resume with another value; the change is logged",
    "site": "says where things lie and how the job is started, not what is computed",
}
_EXTENDS = (
    '`extends = "base.toml"` names one other spec, relative to the file that says so.\n'
    "Its values hold where this one says nothing."
)
_INTRODUCTION = f"""# The job spec

<!-- Printed by `hpczero spec --markdown` from hpczero/spec/schema.py: edit that, not this. -->

A job is one TOML file. Every key has a default, so that a spec says only what is special about the
job. Unknown keys, wrong types and values that contradict each other are errors, all reported at
once, with file and line.

{_EXTENDS}
Tables merge, arrays replace. The first of these that names a key decides: `--set section.key=value`
on the command line, the spec, what it extends, the profile of the site, the default.
`hpczero check SPEC --explain section.key` prints where a value comes from.

The role of a key says what a change means for a run that already exists:

"""


def as_text() -> str:
    extends = _EXTENDS.replace("`", "").replace("\n", "\n    ")
    lines = [f'extends = ""  (no default)\n    {extends}']
    for table, entries in tables().items():
        lines.append(f"\n[{table}]  {about(table)}" if table else "")
        for key in entries.values():
            lines.append(f"{key.leaf} = {toml_value(key.default)}  ({key.role})")
            lines.append(f"    {key.description}: {key.allowed}")
    roles = [f"{role}: {meaning}" for role, meaning in ROLES.items()]
    return "\n".join([*lines, "", *roles])


def as_markdown() -> str:
    page = _INTRODUCTION
    page += "".join(f"- `{role}`: {meaning}\n" for role, meaning in ROLES.items())
    for table, entries in tables().items():
        page += f"\n## {f'[{table}]' if table else 'Above all tables'}\n\n{about(table)}\n\n"
        page += "| key | default | allowed | role | meaning |\n|---|---|---|---|---|\n"
        page += "".join(_row(key) for key in entries.values())
    return page.rstrip("\n")


def _row(key: Key) -> str:
    default = toml_value(key.default)
    cells = [f"`{key.leaf}`", f"`{default}`", key.allowed, key.role, key.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def as_data() -> list[dict[str, Any]]:
    return [
        {
            "key": key.name,
            "default": key.default,
            "allowed": key.allowed,
            "role": key.role,
            "description": key.description,
        }
        for entries in tables().values()
        for key in entries.values()
    ]


# --------------------------------------------------------------------------------- specs as TOML

_UNSAFE = {code: f"\\u{code:04x}" for code in [*range(0x7F, 0xA0), 0x2028, 0x2029]}


def to_toml(spec: Spec) -> str:
    """Return every key with its value; reading it gives an equal spec."""
    values = flat(spec)
    sections = []
    for table, entries in tables().items():
        lines = [f"[{table}]"] if table else []
        lines += [f"{key.leaf} = {toml_value(values[key.name])}" for key in entries.values()]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def to_start_from(name: str) -> str:
    """Return a spec with every key explained; keys whose role is `site` are commented out."""
    sections = []
    for table, entries in tables().items():
        lines = [f"# {about(table)}", *([f"[{table}]"] if table else [])]
        for key in entries.values():
            value = name if key.name == "name" else key.default
            start = "# " if key.role == "site" else ""
            setting = f"{start}{key.leaf} = {toml_value(value)}"
            choices = f": {key.allowed}" if key.is_choice else ""
            lines.append(f"{setting:<34} # {key.description}{choices}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def toml_value(value: Any) -> str:
    """Write a boolean, number or text, or a list or table of these, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).translate(_UNSAFE)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        entries = [f"{toml_value(str(name))} = {toml_value(item)}" for name, item in value.items()]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    raise TypeError(f"no TOML for {type(value).__name__}")
