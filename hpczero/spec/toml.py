"""From a `Spec` to TOML: the resolved copy that a run keeps, and the commented spec to start from."""

import json
from typing import Any

from hpczero.spec.keys import about, flat, tables
from hpczero.spec.schema import Spec

_UNSAFE = {code: f"\\u{code:04x}" for code in [*range(0x7F, 0xA0), 0x2028, 0x2029]}


def to_toml(spec: Spec) -> str:
    """Every key with its value; reading it gives an equal spec."""
    values = flat(spec)
    sections = []
    for table, found in tables().items():
        lines = [f"[{table}]"] if table else []
        sections.append("\n".join([*lines, *(f"{key.leaf} = {toml_value(values[key.name])}" for key in found.values())]))
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
        entries = ", ".join(f"{toml_value(str(name))} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    raise TypeError(f"no TOML for {type(value).__name__}")
