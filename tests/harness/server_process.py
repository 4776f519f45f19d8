"""`hybrid-prefix serve` in processes of its own: how to start it, to ask it, and to check that nothing is left of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prometheus_client.parser import text_string_to_metric_families

from tests.harness.limits import HANG_S, wait_until
from tests.harness.workers.launch import COMMAND, Prepared, environment, environments_of, torchrun

BLOCK = 64
LIMIT_TOKENS = 1024
ADMIN = "admin-secret"
PROMPT = "Keys and values lie in blocks, and a state at the ends of some of them. " * 4
HIT = len(PROMPT) // BLOCK * BLOCK


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """The bytes of a request, whose body may be shorter than its length."""
    size = f"content-length: {len(body) if length is None else length}"
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", size, *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Endpoint:
    """A running server."""

    url: str

    def client(self, key: str = "none", *, kind: Any = None, **options: Any) -> Any:
        import openai

        kind = kind or openai.OpenAI
        return kind(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=HANG_S, **options)

    def send(self, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """Status and JSON of a request: GET without a body, POST with one (bytes or JSON)."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=HANG_S
            ) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, without its end."""
        data = json.dumps(body | {"stream": True}).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=HANG_S) as answer:
            lines = [line.decode().removeprefix("data: ").strip() for line in answer if line.strip()]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Samples by name (without the common prefix) and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=HANG_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return {
            (sample.name.removeprefix("hybrid_prefix_"), tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }


class Server(Endpoint):
    """A server, and all its processes: torchrun, or the ranks."""

    def __init__(self, process: subprocess.Popen[str] | Prepared, url: str, errors: list[Path]) -> None:
        self.process, self.url, self._errors = process, url, errors
        self.ranks = (
            process.pids if isinstance(process, Prepared) else sorted(children(process.pid), key=_rank_of_torchrun)
        )
        self.pids = [pid for rank in self.ranks for pid in (rank, *children(rank))]

    def metric(self, name: str, **labels: str) -> list[float]:
        """Samples with these labels, in the order of the replicas."""
        found = [
            (dict(own).get("replica", ""), value)
            for (sample, own), value in self.metrics().items()
            if sample == name and labels.items() <= dict(own).items()
        ]
        return [value for _, value in sorted(found)]

    def wait_until_drained(self) -> None:
        """Waits until nothing runs and no block is held."""
        wait_until(
            lambda: (
                not any(
                    self.metric("running_requests") + self.metric("waiting_requests") + self.metric("open_sequences")
                )
                and self.metric("kv_blocks") == self.metric("kv_blocks_available")
            ),
            "the server is drained",
        )

    def errors(self) -> str:
        return "".join(path.read_text() for path in self._errors)

    def wait_until_gone(self) -> None:
        wait_until(lambda: not any(map(_is_running, self.pids)), "all processes of the server are gone")


def _is_running(pid: int) -> bool:
    try:
        return " Z " not in re.sub(r"\(.*\)", "", Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):  # it ended before it was opened, or read
        return False


def children(pid: int) -> list[int]:
    """Processes that it started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found += map(int, (task / "children").read_text().split())
    return found


def _rank_of_torchrun(pid: int) -> int:
    found = re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else -1


@contextmanager
def started(
    folder: Path, *argv: str, ranks: int = 2, device: str = "cpu", with_torchrun: bool = False
) -> Iterator[Server]:
    """A server on this many ranks. All its processes are ended at the end.

    Torchrun, which GPUs need, ends all ranks if one fails. Without it, the others go on.
    """
    options = ["--port", "0", "--block-size-tokens", str(BLOCK), "--max-sequence-length", str(LIMIT_TOKENS)]
    options += ["--max-requests", "4", "--max-waiting", "200", *argv]
    with patch.dict("os.environ", HYBRID_PREFIX_ADMIN_TOKEN=ADMIN):
        if with_torchrun:
            process, outputs, errors = _under_torchrun(folder, ["serve", *options], ranks, device)
        else:
            process = Prepared(folder, COMMAND, "serve", *options, environments=environments_of(ranks))
            outputs, errors = process.outputs, process.errors
    try:
        pids = process.pids if isinstance(process, Prepared) else [process.pid]

        def url() -> str | None:
            found = re.search(r"^serving .* on (http://\S+)\n", outputs[0].read_text(), re.M)
            assert found or all(map(_is_running, pids)), "".join(path.read_text()[-4000:] for path in errors)
            return found and found[1]

        wait_until(url, "the server said its URL")
        yield Server(process, url() or "", errors)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_S)


def _under_torchrun(
    folder: Path, argv: list[str], ranks: int, device: str
) -> tuple[subprocess.Popen[str], list[Path], list[Path]]:
    """The command under torchrun, and the files of its output and errors."""
    output, errors = folder / "output", folder / "errors"
    with output.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(
            [*torchrun(ranks), str(COMMAND), *argv], env=environment(device), stdout=stdout, stderr=stderr, text=True
        )
    return process, [output], [errors]
