"""The reference of every key, printed from the schema: as text, as the page docs/spec.md, as data."""

import json
from typing import Any

from hpczero.spec.keys import Key, about, flat, tables
from hpczero.spec.schema import Spec

# From a `Spec` to TOML: the resolved copy that a run keeps, and the commented spec to start from.
_UNSAFE = {code: f"\\u{code:04x}" for code in [*range(0x7F, 0xA0), 0x2028, 0x2029]}


def to_toml(spec: Spec) -> str:
    """Every key with its value; reading it gives an equal spec."""
    values = flat(spec)
    sections = []
    for table, found in tables().items():
        lines = [f"[{table}]"] if table else []
        sections.append(
            "\n".join(
                [
                    *lines,
                    *(f"{key.leaf} = {toml_value(values[key.name])}" for key in found.values()),
                ]
            )
        )
    return "\n\n".join(sections) + "\n"


def to_start_from(name: str) -> str:
    """A spec with every key explained; those that say where things lie and how the job is started are left to their defaults."""
    sections = []
    for table, found in tables().items():
        lines = [f"# {about(table)}", *([f"[{table}]"] if table else [])]
        for key in found.values():
            value = name if key.name == "name" else key.default
            start = "# " if key.role == "site" else ""
            setting = f"{start}{key.leaf} = {toml_value(value)}"
            choices = f": {key.allowed}" if key.is_choice else ""
            lines.append(f"{setting:<34} # {key.description}{choices}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def toml_value(value: Any) -> str:
    """Booleans, whole numbers, finite floats, text, lists of them, and tables of these on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).translate(_UNSAFE)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        entries = ", ".join(
            f"{toml_value(str(name))} = {toml_value(item)}" for name, item in value.items()
        )
        return f"{{ {entries} }}" if entries else "{}"
    raise TypeError(f"no TOML for {type(value).__name__}")


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
        lines += [
            f"{key.leaf} = {toml_value(key.default)}  ({key.role})\n    {key.description}: {key.allowed}"
            for key in found.values()
        ]
    return (
        "\n".join(lines)
        + "\n\n"
        + "\n".join(f"{role}: {meaning}" for role, meaning in ROLES.items())
    )


def as_markdown() -> str:
    page = (
        _INTRODUCTION
        + "\n".join(f"- `{role}`: {meaning}" for role, meaning in ROLES.items())
        + "\n"
    )
    for table, found in tables().items():
        page += f"\n## {f'[{table}]' if table else 'Above all tables'}\n\n{about(table)}\n\n"
        page += "| key | default | allowed | role | meaning |\n|---|---|---|---|---|\n"
        page += "".join(_row(key) for key in found.values())
    return page.rstrip("\n")


def as_data() -> list[dict[str, Any]]:
    return [
        {
            "key": key.name,
            "default": key.default,
            "allowed": key.allowed,
            "role": key.role,
            "description": key.description,
        }
        for found in tables().values()
        for key in found.values()
    ]


def _row(key: Key) -> str:
    cells = [
        f"`{key.leaf}`",
        f"`{toml_value(key.default)}`",
        key.allowed,
        key.role,
        key.description,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
