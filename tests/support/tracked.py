"""A run's lines for trackers, and the readers that others have for what they write."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hpczero.spec.schema import Spec
from hpczero.spec.track import Track
from hpczero.track.item import Item, RunFacts
from hpczero.track.tracking import facts_of


def facts(folder: Path, **track: Any) -> RunFacts:
    return facts_of(Spec(name="tiny", track=Track(**track)), folder)


def begin(step: int, when: float = 1.0e9) -> Item:
    return Item("from", step, when, {})


def line(step: int, loss: float, when: float = 1.0e9, **more: Any) -> Item:
    return Item("metrics", step, when, {"step": step, "loss": loss, **more}, 64 * step)


def event(name: str, step: int, when: float = 1.0e9, **values: Any) -> Item:
    return Item("event", step, when, {"event": name, **values})


def tensorboard_losses(folder: Path) -> list[tuple[int, float]]:
    """Return (step, loss) as TensorBoard shows them."""
    return [(one.step, one.value) for one in accumulator(folder).Scalars("loss")]


def accumulator(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "tensors": 0}
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    return found.Reload()


class FakeWandb:
    """A server as `wandb sync` needs one; `runs`: id -> name of a file -> its lines.

    As W&B's, it puts the lines of a file at the place that the client says.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, list[str]]] = {}
        self.configs: dict[str, Any] = {}
        self.url = ""

    def answer(self, path: str, body: bytes) -> Any:
        if path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            run = self.runs.setdefault(path.split("/")[-2], {})
            for name, chunk in files.items():
                run[name] = run.get(name, [])[: chunk["offset"]] + chunk["content"]
            return {}
        return self._graphql(json.loads(body)) if path.endswith("/graphql") else {}

    def _graphql(self, asked: dict[str, Any]) -> Any:
        query, given = asked["query"], asked.get("variables") or {}
        if "upsertBucket" in query:
            if given.get("config"):
                self.configs[given["name"]] = json.loads(given["config"])
            entity = {"name": "me", "id": "1"}
            project = {"name": given.get("project") or "project", "id": "2", "entity": entity}
            bucket = {"id": "3", "name": given.get("name"), "config": "{}", "project": project}
            bucket |= {"displayName": "", "description": "", "sweepName": None}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/up"} for name in given["files"]]
            made = {"runID": "3", "uploadHeaders": [], "files": files}
            return {"data": {"createRunFiles": made}}
        if "viewer" in query:
            viewer = {"id": "4", "entity": "me", "username": "me", "flags": "{}"}
            return {"data": {"viewer": viewer | {"teams": {"edges": []}}}}
        return {"data": {"serverInfo": {"features": []}}}

    def history(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(one) for one in self.runs[run]["wandb-history.jsonl"]]


@contextmanager
def wandb_server() -> Iterator[FakeWandb]:
    fake = FakeWandb()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None: ...

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            content = json.dumps(fake.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_GET = do_POST

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            """Say nothing of clients that hang up."""

    with Server(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
