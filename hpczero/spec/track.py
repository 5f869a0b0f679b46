"""The table [track] of the spec: where a run's figures go besides its directory."""

from typing import Annotated, Literal

from pydantic import Field

from hpczero.spec.table import NAME, Factory, Table, key

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class Track(Table):
    """Trackers that get a run's figures and events, each in the run's directory."""

    to: Annotated[tuple[TrackerName, ...], Field(strict=False, max_length=3)] = key(
        (),
        "site",
        "trackers; tensorboard: event files; wandb: an offline run of W&B, to sync later; "
        "mlflow: a file store of MLflow",
    )
    project: str = key(
        "hpczero", "site", "project of the run at W&B, and its experiment in MLflow", pattern=NAME
    )
    callback: Factory | Literal[""] = key(
        "",
        "site",
        "a function that rank 0 calls with each line of metrics.jsonl and events.jsonl; "
        "empty: none",
    )

    @property
    def is_on(self) -> bool:
        return bool(self.to or self.callback)
