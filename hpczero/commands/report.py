"""`hpczero report`: what runs did, as one page; `hpczero plot`: the loss curve at a glance."""

import sys
from argparse import Namespace
from pathlib import Path

from hpczero.commands.jobs import run_named
from hpczero.errors import InputError, for_terminal
from hpczero.report import as_png, as_svg, build, learning, notebook, page, terminal
from hpczero.report.contents import Report
from hpczero.runs.record import read_run
from hpczero.safe_files import make_folders, write_text, written_whole

_PAGE = "report.html"


def report(options: Namespace) -> int:
    """Write the page; of one run into its folder, of several here, if nothing else is asked for."""
    paths = [run_named(run) for run in options.runs]
    made = build.report_of([read_run(path) for path in paths])
    output = options.output
    if output is None and not (options.png or options.md):
        output = paths[0] / _PAGE if len(paths) == 1 else _PAGE
    if options.png:
        _write_pngs(made, Path(options.png))
    if options.md:
        notebook.write(made, Path(options.md))
        print(for_terminal(options.md))
    if output is not None:
        write_text(Path(output), page.html(made))
        print(for_terminal(str(output)))
    return 0


def _write_pngs(made: Report, folder: Path) -> None:
    as_png.refuse_without_pillow()
    make_folders(folder)
    for name, figure in made.named_figures():
        path = folder / f"{name}.png"
        with written_whole(path) as file:
            file.write(as_png.png(figure.drawing))
        print(for_terminal(str(path)))


def plot(options: Namespace) -> int:
    """Print the loss curve, and write it as SVG if asked."""
    run = read_run(run_named(options.run))
    figure = learning.loss(run)
    if figure is None:
        raise InputError(f"{run.path}: the run has not finished a step whose loss is known")
    if options.svg:
        write_text(Path(options.svg), as_svg.whole_file(figure.drawing))
    for line in terminal.loss(run, sys.stdout.encoding or "ascii"):
        print(for_terminal(line))
    return 0
