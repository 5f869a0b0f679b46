"""The tracker "mlflow": a file store of MLflow in <run>/mlflow, with one run.

MLflow keeps all figures that it ever had of a step. So each job empties the run's metrics and
parameters, and writes what metrics.jsonl has of earlier steps: it has no step twice. A parameter
is a file: those that are the default are in the artifact spec.toml alone.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from hpczero import safe_files
from hpczero.track.earlier import earlier_events, earlier_lines
from hpczero.track.item import Item, RunFacts, figures, text

_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # in a batch of MLflow's
_LONGEST_PARAMETER = 500  # letters
_SPEC = "spec.toml"  # an artifact
_EVENTS, _LONGEST_NOTE = 30, 5000  # of the last events, which are the run's description
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}  # state of the run -> MLflow's word


class MlflowRun:
    """In a process of its own (`hpczero.track.process`)."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._folder = Path(facts.folder)
        self._store = self._folder / "mlflow"
        safe_files.make_own_folder(self._store)
        self._client = MlflowClient(tracking_uri=self._store.as_uri())
        self._id = ""
        self._known_until = facts.began
        self._events = deque[str](maxlen=_EVENTS)
        self._state = ""

    def write(self, items: Sequence[Item]) -> None:
        waiting: list[Item] = []
        for item in items:
            if item.kind == "from":
                self._log(waiting)
                waiting = []
                self._begin(item.step)
            elif item.kind == "event":
                self._note(item)
            else:
                waiting.append(item)
            self._known_until = item.time
        self._log(waiting)
        if any(item.kind == "event" for item in items):
            self._describe()

    def _begin(self, step: int) -> None:
        self._id = self._made() if (run := self._found()) is None else self._emptied(run)
        keys = self._facts.changed.items()
        self._client.log_text(self._id, self._facts.toml, _SPEC)
        parameters = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in keys]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            some = parameters[first : first + _MOST_PARAMETERS]
            self._client.log_batch(self._id, params=some)
        self._events.clear()
        for item in earlier_events(self._folder, self._known_until):
            self._note(item)
        self._log(earlier_lines(self._folder, step))

    def _found(self) -> Run | None:
        """Return the run that an earlier job has made."""
        for experiment in self._client.search_experiments():
            for run in self._client.search_runs([experiment.experiment_id]):
                return run
        return None

    def _made(self) -> str:
        name = self._facts.project
        experiment = self._client.get_experiment_by_name(name)
        of_run = experiment.experiment_id if experiment else self._client.create_experiment(name)
        made: str = self._client.create_run(of_run, run_name=self._facts.name).info.run_id
        return made

    def _emptied(self, run: Run) -> str:
        name: str = run.info.run_id
        of_run = self._store / run.info.experiment_id / name
        for kind in ("metrics", "params"):
            safe_files.remove_tree(of_run / kind)
            safe_files.make_folder(of_run / kind)
        self._client.update_run(name, status="RUNNING", name=self._facts.name)
        return name

    def _log(self, items: Iterable[Item]) -> None:
        found = (
            Metric(name, value, int(1000 * item.time), item.step)
            for item in items
            for name, value in figures(item).items()
        )
        while batch := list(islice(found, _MOST_METRICS)):
            self._client.log_batch(self._id, metrics=batch)

    def _note(self, item: Item) -> None:
        self._state = str(item.values.get("state", "")) if item.event == "stop" else ""
        self._events.append(text(item))

    def _describe(self) -> None:
        words = "".join(f"- `{event.replace('`', ' ')}`\n" for event in self._events)
        self._client.set_tag(self._id, "mlflow.note.content", words[-_LONGEST_NOTE:])

    def close(self) -> None:
        if self._id:
            self._client.set_terminated(self._id, _STATUS.get(self._state, "FAILED"))

    def give_up(self) -> None:
        """Do nothing: the process is ended."""
