"""The tracker "wandb": an offline run of W&B in <run>/wandb, which `wandb sync` uploads later.

Of two offline folders with the same id, the one that is uploaded later replaces the other. So each
job begins a new folder with the run's id, writes what metrics.jsonl has of earlier steps, and
removes the folder of the job before it: the one that is there has all, and no step twice.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from hpczero import safe_files
from hpczero.track.earlier import earlier_events, earlier_lines
from hpczero.track.item import Item, RunFacts, figures, text

_FOLDER = re.compile(r"offline-run-\d{8}_\d{6}-([A-Za-z0-9]{1,64})")


class WandbRun:
    """In a process of its own (`hpczero.track.process`)."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._folder = Path(facts.folder)
        self._run: Any = None
        self._known_until = facts.began
        self._state = ""

    def write(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.kind == "from":
                self._begin(item.step)
            else:
                self._log(item)
            self._known_until = item.time

    def _begin(self, step: int) -> None:
        if self._run:
            self._run.finish(quiet=True)
        older = {
            path: found.group(1)
            for path in sorted((self._folder / "wandb").glob("offline-run-*"))
            if (found := _FOLDER.fullmatch(path.name)) and not path.is_symlink()
        }
        self._run = self._init(next(reversed(older.values()), None))
        for item in earlier_events(self._folder, self._known_until):
            self._log(item)
        for item in earlier_lines(self._folder, step):
            self._log(item)
        new = Path(self._run.dir).parent
        for path, name in older.items():
            if name == self._run.id and path != new:
                safe_files.remove_tree(path)

    def _init(self, name: str | None) -> Any:
        settings = wandb.Settings(
            console="off",  # the rank's output is not this process's
            disable_code=True,
            disable_git=True,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        facts = self._facts
        return wandb.init(
            mode="offline",
            id=name,
            project=facts.project,
            name=facts.name,
            config=dict(facts.tables),
            dir=facts.folder,
            settings=settings,
        )

    def _log(self, item: Item) -> None:
        if item.kind == "event":
            self._state = str(item.values.get("state", "")) if item.event == "stop" else ""
            self._run.write_logs(text(item))
        elif values := figures(item):
            self._run.log(values | {"_timestamp": item.time}, step=item.step)

    def close(self) -> None:
        if self._run:
            self._run.finish(exit_code=0 if self._state in ("finished", "stopped") else 1)

    def give_up(self) -> None:
        """Do nothing: the process is ended."""
