"""A report as one page of HTML that needs nothing else: no script, no file, no network.

The template escapes all that it is given but the drawings, which the XML library has escaped.
"""

from itertools import count
from typing import Any

import jinja2
from markupsafe import Markup

from hpczero import env, safe_files
from hpczero.report import as_svg
from hpczero.report.contents import Figure, Preformatted, Report, Table, Text
from hpczero.text import printable

_TEMPLATE = "report.html.j2"
_LARGEST = 1 << 20  # bytes of the template
_LONGEST = 2000  # characters of a cell


def html(report: Report) -> str:
    text = safe_files.read_small(env.shared_folder("templates") / _TEMPLATE, _LARGEST).decode()
    world = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    numbers = count(1)

    def drawn(figure: Figure) -> Markup:
        return Markup(as_svg.inline(figure.drawing, f"f{next(numbers)}"))

    world.globals |= {"drawn": drawn, "kind": _kind, "numeric": _is_numeric}
    style = Markup(as_svg.style_of_colours(":root"))
    return world.from_string(text).render(report=report, colours=style)


def _shown(value: Any) -> Any:
    """Return a text without control characters; line ends stay in what is preformatted."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(printable(line, _LONGEST) for line in value.split("\n"))
    return value


def _kind(block: object) -> str:
    kinds = {Table: "table", Figure: "figure", Text: "text", Preformatted: "preformatted"}
    return kinds[type(block)]


def _is_numeric(table: Table, column: int) -> bool:
    """Return True if the column's cells are numbers, which stand to the right."""
    cells = [row[column] for row in table.rows if column < len(row) and row[column]]
    return bool(cells) and all(cell.lstrip("-+±")[:1].isdigit() for cell in cells)
