"""Building a token file from the files of a corpus: streaming, resumable, the same bytes each time.

Phase 1: every section of text is encoded and appended to the raw files of its split in the work
folder. From time to time they are flushed and `journal.json` is replaced: it records which inputs
are done and how long the raw files were then. Phase 2: the raw files are copied into a token file
under a temporary name, which is flushed and renamed.

A builder that finds a journal truncates the raw files to the lengths given there and resumes. The
split of a section depends only on the text before it, so an interruption leaves no trace.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from hpczero.data.corpus import Corpus
from hpczero.data.encode import Effort, Listener, Reader
from hpczero.data.journal import BuildState, Recipe, has_journal
from hpczero.data.raw_files import only_builder, replace_file, writing
from hpczero.data.token_file import TokenFile, open_token_file
from hpczero.data.write_token_file import fill_token_file, write_token_file
from hpczero.errors import HpczeroError
from hpczero.safe_files import (
    create_nameless,
    give_name,
    make_own_folder,
    remove_tree,
    sync,
)

_EFFORT = Effort()


def build_token_file(
    corpus: Corpus,
    output: Path,
    recipe: Recipe,
    work: Path,
    listener: Listener,
    effort: Effort = _EFFORT,
) -> TokenFile:
    """Build `output` by way of the folder `work`, which is removed afterwards."""
    with writing(work):
        make_own_folder(work)
    with only_builder(work, output, listener.said):
        with (
            _removed_unless_begun(work),
            closing(Reader(corpus.inputs, recipe, work, listener, effort)) as reader,
        ):
            reader.read()
        _report(reader.state, corpus, listener)
        attributes = recipe.attributes(corpus.inputs) | reader.state.attributes()
        assembled = work / "assembled.h5"
        write_token_file(assembled, recipe.tokenizer, attributes, reader.raw, listener.copied)
        replace_file(assembled, output)
        with suppress(OSError):
            remove_tree(work)
    return open_token_file(output)


def build_in_one_go(corpus: Corpus, output: Path, recipe: Recipe, listener: Listener) -> bool:
    """Build `output` in files without a name: a builder that is killed leaves nothing behind.

    Return False, with nothing done, if the file system does not support such files.
    """
    with writing(output):
        descriptor = create_nameless(output.parent)
    if descriptor is None:
        return False
    try:
        with closing(
            Reader(corpus.inputs, recipe, output.parent, listener, Effort(commit_every=0))
        ) as reader:
            reader.read()
            _report(reader.state, corpus, listener)
            encoding = recipe.tokenizer
            attributes = recipe.attributes(corpus.inputs) | reader.state.attributes()
            fill_token_file(output, descriptor, encoding, attributes, reader.raw, listener.copied)
        # A file that another builder has put there meanwhile has the same bytes.
        with writing(output), suppress(FileExistsError):
            os.fsync(descriptor)
            give_name(descriptor, output)
            sync(output.parent)
    finally:
        os.close(descriptor)
    return True


def is_up_to_date(file: TokenFile, corpus: Corpus, recipe: Recipe) -> bool:
    """Return True if this recipe made the file from inputs of these names and sizes, none newer."""
    wanted = recipe.attributes(corpus.inputs)
    newest = max(source.changed for source in corpus.inputs)
    return (
        all(getattr(file, name) == value for name, value in wanted.items())
        and newest <= file.path.stat().st_mtime_ns
    )


@contextmanager
def _removed_unless_begun(work: Path) -> Iterator[None]:
    """Remove the folder of a build that is refused before it writes its first journal."""
    try:
        yield
    except HpczeroError:
        if not has_journal(work):
            with suppress(OSError):
                remove_tree(work)
        raise


def _report(state: BuildState, corpus: Corpus, listener: Listener) -> None:
    """Tell the listener which files were left out or damaged."""
    unreadable = state.unreadable
    replaced = state.replaced
    empty = state.empty
    bad = state.bad
    for path in corpus.unreadable:
        unreadable.add(str(path))
    if corpus.others:
        listener.said(f"left out, being of other kinds: {corpus.others} files")
    if unreadable.count:
        listener.said(f"WARN left out, cannot be read: {unreadable.count} ({unreadable})")
    if empty.count:
        listener.said(f"without any text: {empty.count} files ({empty})")
    if bad.count:
        listener.said(f"WARN bad records that were left out: {bad.count} ({bad})")
    if replaced.count:
        listener.said(
            f"WARN not UTF-8, undecodable bytes became U+FFFD: {replaced.count} files ({replaced})"
        )
