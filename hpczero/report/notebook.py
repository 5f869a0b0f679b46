"""A report for a lab book: Markdown, with the figures as files of SVG in a folder beside it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hpczero.report import as_svg
from hpczero.report.contents import Block, Figure, Preformatted, Report, Table, Text
from hpczero.safe_files import make_folders, write_text
from hpczero.text import printable

_MEANT = "\\`*_{}[]<>#|&!~$"  # characters that Markdown, or HTML in it, takes for its own


def write(report: Report, path: Path) -> None:
    """Write the text, and its figures into the folder `<name>_figures`."""
    folder = path.with_name(f"{path.stem}_figures")
    make_folders(folder)
    names = {}
    for name, figure in report.named_figures():
        write_text(folder / f"{name}.svg", as_svg.whole_file(figure.drawing))
        names[id(figure)] = f"{folder.name}/{name}.svg"
    write_text(path, markdown(report, names))


def markdown(report: Report, files: dict[int, str]) -> str:
    """Return the text; `files`: the file of each figure, by its id()."""
    lines = [f"# {plain(report.title)}", ""]
    for chapter in report.chapters:
        if len(report.chapters) > 1:
            lines += [f"## {plain(chapter.title)}", ""]
        lines += [f"- {plain(name)}: **{plain(value)}**" for name, value in chapter.facts.items()]
        lines.append("")
        for section in chapter.sections:
            lines += [f"{'#' * (2 + (len(report.chapters) > 1))} {plain(section.title)}", ""]
            for block in section.blocks:
                lines += [*_block(block, files), ""]
    return "\n".join([*lines, plain(report.footer), ""])


def plain(text: str) -> str:
    """Return words as Markdown that shows them and does nothing else."""
    return "".join("\\" + one if one in _MEANT else one for one in printable(text, 2000))


def _block(block: Block, files: dict[int, str]) -> Iterator[str]:
    match block:
        case Figure():
            name = plain(block.drawing.title)
            yield f"![{name}](<{files[id(block)]}>)"
            yield ""
            yield plain(block.caption)
        case Table():
            yield plain(block.caption) + ":"
            yield ""
            yield _row(block.head)
            yield "|" + "---|" * len(block.head)
            yield from map(_row, block.rows)
        case Text():
            yield ("**Note:** " if block.warns else "") + plain(block.words)
        case Preformatted():
            yield plain(block.caption) + ":"
            yield ""
            yield from (f"    {printable(line, 2000)}" for line in block.words.split("\n"))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(plain, cells)) + " |"
