"""The trackers of a run, on rank 0: what the run directory gets, they get too."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpczero.spec.keys import flat, keys
from hpczero.spec.load import to_toml
from hpczero.spec.schema import Spec
from hpczero.track.callback import Callback
from hpczero.track.item import Item, Kind, RunFacts, tokens_of
from hpczero.track.lane import Lane, Tracker
from hpczero.track.process import InProcess
from hpczero.track.tensorboard_files import TensorBoard

Makers = Mapping[str, Callable[[], Tracker]]  # tracker by its name

_SECONDS_TO_END = 20.0  # for all trackers together
_LEFT_OUT = "batch"  # variables and commands of the job, people's addresses


class Tracking:
    """Its methods neither wait, but for `close`, nor raise anything.

    What comes before the first `go_on_from` is held until then: trackers learn first which steps
    are computed again.
    """

    def __init__(self, spec: Spec, folder: Path, makers: Makers | None = None) -> None:
        """`makers`: in place of the spec's trackers."""
        made = _makers(spec, folder) if makers is None else makers
        self._lanes = [Lane(name, make) for name, make in made.items()]
        self._held: list[Item] | None = []
        self._step = 0  # the last one
        self._tokens = 0  # up to it

    def add(self, kind: Kind, values: Mapping[str, Any]) -> None:
        """Hand on a line of metrics or memory, or an event with its name as "event"."""
        if not self._lanes:
            return
        step = values.get("step")
        if not isinstance(step, int):
            step = self._step
        elif kind == "metrics":
            self._step = step
            self._tokens += tokens_of(values)
        item = Item(kind, step, time.time(), dict(values), self._tokens)
        if self._held is not None:
            self._held.append(item)
            return
        for lane in self._lanes:
            lane.put(item)

    def go_on_from(self, step: int, tokens: int) -> None:
        """Say that the next step is this one, after so many tokens; later ones come again."""
        self._step = step - 1
        self._tokens = tokens
        now = time.time()
        held, self._held = self._held or [], None
        for lane in self._lanes:
            lane.put(Item("from", step, now, {}))
            for item in held:
                lane.put(Item(item.kind, self._step, item.time, item.values))

    def problems(self) -> list[str]:
        """Return what is to be said by now, each thing once."""
        return [what for lane in self._lanes for what in lane.problems()]

    def close(self) -> list[str]:
        """Let the trackers end, for some time; return what is to be said.

        Of a run that ended before `go_on_from` they get nothing, and keep what they have.
        """
        for lane in self._lanes:
            lane.end()
        until = time.monotonic() + _SECONDS_TO_END
        said = [what for lane in self._lanes for what in lane.wait(until)]
        self._lanes = []
        return said


def facts_of(spec: Spec, folder: Path) -> RunFacts:
    """Return what trackers know of a run: its spec but for [batch], which may hold secrets."""
    known = {name: value for name, value in flat(spec).items() if keys()[name].table != _LEFT_OUT}
    sections = to_toml(spec).split("\n\n")
    return RunFacts(
        folder=str(folder),
        began=time.time(),
        name=spec.name,
        project=spec.track.project,
        tables=spec.model_dump(mode="json", exclude={_LEFT_OUT}),
        changed={name: value for name, value in known.items() if value != keys()[name].default},
        toml="\n\n".join(one for one in sections if not one.startswith(f"[{_LEFT_OUT}]")),
    )


def _makers(spec: Spec, folder: Path) -> Makers:
    track = spec.track
    if not track.is_on:
        return {}
    facts = facts_of(spec, folder)
    makers: dict[str, Callable[[], Tracker]] = {}
    for name in track.to:
        in_process = partial(InProcess, name, facts)
        makers[name] = partial(TensorBoard, facts) if name == "tensorboard" else in_process
    if track.callback:
        makers[f"track.callback = {track.callback}"] = partial(Callback, track.callback)
    return makers
