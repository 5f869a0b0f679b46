"""Run folders with chosen figures, without training."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGAN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
TEXT = {"path": "text.h5", "fingerprint": "a text"}


def stamp(seconds: float) -> str:
    """Return the time so many seconds after the first start, as runs write it."""
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Made:
    """A run in lines of metrics; `settings`: "train.steps" -> value in TOML's words."""

    lines: Iterable[Mapping[str, Any]] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1
    events: Iterable[Mapping[str, Any]] = ({"time": stamp(0), "event": "start", "ranks": [{}]},)
    summary: Mapping[str, Any] = field(default_factory=lambda: {"data": TEXT, "state": "finished"})

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        keys = {"seed": self.seed, "name": f'"{folder.name}"', **self.settings}
        spec = "".join(f"{key} = {value}\n" for key, value in keys.items())
        (folder / "spec.toml").write_text(spec)
        for name, objects in (("metrics", self.lines), ("events", self.events)):
            text = "".join(json.dumps(one) + "\n" for one in objects)
            (folder / f"{name}.jsonl").write_text(text)
        if self.summary:
            (folder / "summary.json").write_text(json.dumps(self.summary))
        return folder


def line(step: int, loss: float, tokens: int = 100, seconds: float = 1.0, **more: Any) -> Any:
    """Return a line of metrics; its time is a second a step after the first start."""
    figures = {"loss": loss, "tokens": tokens, "step_seconds": seconds}
    return {"time": stamp(float(step)), "step": step, **figures, **more}


def evaluated(loss: float, error: float | None = 0.01) -> dict[str, Any]:
    return {"validation_loss": loss, "validation_standard_error": error}


def steady(
    validation: float, seed: int = 1, lr: float = 0.001, error: float | None = 0.01, steps: int = 40
) -> Made:
    """Return a run whose loss falls towards its validation loss, which its last line has."""
    lines = [line(step, validation + 1 / step) for step in range(1, steps)]
    lines.append(line(steps, validation + 1 / steps, **evaluated(validation, error)))
    settings = {"train.steps": str(steps), "optimizer.lr": str(lr)}
    return Made(lines, settings, seed)
