"""What operators read: metrics, the dashboard, log lines."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.cli import serve
from megatron_hybrid_prefix.console.engine_options import Budgets
from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.serve import app, front, http_server
from megatron_hybrid_prefix.serve.metrics import families_of, memory_samples, prefix_samples
from megatron_hybrid_prefix.support import private_folder
from tests.harness.limits import HANG_S, wait_until
from tests.harness.server_process import post
from tests.serve.test_serve import BLOCK, COMPLETION, HIT, PROMPT, TOKENIZER, Server, complete, held, running

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


# --- Metrics and the dashboard ---------------------------------------------------------------------------------------


def test_the_depth_of_a_hit_is_that_of_its_state(server, salt):
    before = server.metrics()
    for _ in range(3):  # a miss and two hits
        complete(server.client(), extra=salt)
    complete(server.client(), PROMPT[: BLOCK + 5], extra=salt)  # no state was kept that early
    found = {key: value - before.get(key, 0) for key, value in server.metrics().items()}
    assert found[("hit_depth_tokens_count", ())] == 2
    assert found[("hit_depth_tokens_sum", ())] == 2 * HIT
    assert HIT == 256
    at = {dict(labels)["le"]: value for (name, labels), value in found.items() if name == "hit_depth_tokens_bucket"}
    assert (at["128.0"], at["256.0"]) == (0, 2)


def labels_by_name(server: Server) -> dict[str, set[str]]:
    """Names of all samples of ``/metrics``, with their labels. A reason is there when it first happened: so all are."""
    registry = CollectorRegistry()
    samples = [*prefix_samples(PrefixStats(fallbacks={"stale_match": 1}).as_dict())]
    samples += memory_samples(server.engine.context)
    registry.register(type("Source", (), {"collect": lambda self: families_of(samples)})())
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=HANG_S) as answer:
        pages = [answer.read().decode(), generate_latest(registry).decode()]
    return {
        sample.name: set(sample.labels)
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def problems_of(query: str, legend: str, known: dict[str, set[str]]) -> list[str]:
    """Names and labels of a PromQL query that ``/metrics`` lacks, and labels of the legend that the query drops."""
    found = []
    kept: set[str] = set()
    for labels in re.findall(r"\bby \(([^)]*)\)", query):
        kept |= {label.strip() for label in labels.split(",")}
    names = re.findall(r"\b(hybrid_prefix_\w+)(?:\{([^}]*)\})?", query)
    if not names:
        found.append("no metric")
    for name, selector in names:
        if name not in known:
            found.append(f"no metric {name}")
            continue
        selected = set(re.findall(r"(\w+)\s*[=!]", selector))
        found += [f"{name} has no label {label}" for label in sorted((kept | selected) - known[name])]
    if "_bucket" in query and "le" not in kept:
        found.append("buckets added up")
    bare = re.sub(r"\{[^}]*\}", "", query)
    if any(name.endswith("_total") and f"rate({name}[" not in bare and "sum(" + name not in bare for name, _ in names):
        found.append("a counter without rate")
    if query.count("(") != query.count(")"):
        found.append("parentheses")
    return found + [f"legend: {label}" for label in re.findall(r"\{\{(\w+)\}\}", legend) if label not in kept]


def test_each_query_of_the_dashboard_has_its_metrics(server):
    complete(server.client(), max_tokens=1)
    known = labels_by_name(server)
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    targets = [(panel["title"], target) for panel in panels for target in panel["targets"]]
    problems = {
        (title, target["expr"]): found
        for title, target in targets
        if (found := problems_of(target["expr"], target["legendFormat"], known))
    }
    assert not problems
    shown = " ".join(target["expr"] for _, target in targets)
    wanted = [*("first_token", "between_tokens", "end_to_end"), *("generated_tokens", "hit_depth", "lost_tokens")]
    wanted += ["slots", "memory_bytes"]
    assert [name for name in wanted if name not in shown] == []
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))


def test_metrics_say_who_has_the_memory(tiny):
    with running(tiny, cache_gb=0.02) as server:
        for _ in range(2):
            complete(server.client(), max_tokens=1)
        server.wait_until_idle()
        found = server.metrics()
        layout = server.engine.context.layout
    owned = {dict(labels)["owner"]: value for (name, labels), value in found.items() if name == "memory_bytes"}
    assert sum(owned.values()) == layout.total_blocks * layout.block_bytes
    assert owned["kv_running"] == owned["states_running"] == 0
    assert owned["kv_cached"] > 0 and owned["checkpoints"] == found[("slots_used", ())] * layout.state_bytes > 0
    assert found[("memory_page_bytes", ())] == layout.page_bytes
    changed = {dict(labels)["to"] for (name, labels) in found if name == "memory_pages_changed_total"}
    assert changed == {"kv", "states"} and ("memory_blocks_moved_total", ()) in found


def test_a_query_without_its_metric_is_found(server):
    server.send("/health")  # a counter of replies has no labels before the first one
    known = labels_by_name(server)
    for query, legend, problem in (
        ("sum(hybrid_prefix_slot)", "", "no metric hybrid_prefix_slot"),
        ("sum by (stat) (rate(hybrid_prefix_http_requests_total[1m]))", "", "has no label stat"),
        ('sum(rate(hybrid_prefix_http_requests_total{code="429"}[1m]))', "", "has no label code"),
        ("sum(rate(hybrid_prefix_end_to_end_seconds_bucket[1m]))", "", "buckets added up"),
        ("sum by (le) (rate(hybrid_prefix_end_to_end_seconds_bucket[1m]))", "{{status}}", "legend: status"),
        ("avg(hybrid_prefix_http_requests_total)", "", "a counter without rate"),
        ("sum(vector(1))", "", "no metric"),
    ):
        assert any(problem in found for found in problems_of(query, legend, known)), query


# --- Log lines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The log as the command writes it."""
    found, access_level = io.StringIO(), front.access.level
    handler = logging.StreamHandler(found)
    handler.setFormatter(logging.Formatter(front.LINE))
    handler.addFilter(front.add_request_id)
    root = logging.getLogger()
    root.addHandler(handler)
    front.access.setLevel(logging.INFO)
    yield found
    root.removeHandler(handler)
    front.access.setLevel(access_level)


def ask(server: Server, identity: str, body: dict[str, Any]) -> str:
    """Sends a completion with a request id. Returns the id of the reply."""
    headers = {"x-request-id": identity, "content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            answer.read()
            return answer.headers["x-request-id"]
    except urllib.error.HTTPError as error:
        return error.headers["x-request-id"]


def test_log_lines_have_time_level_and_request_id(server, log, monkeypatch):
    """Also those of the engine's thread, and of two requests at once."""
    real = server.engine.add_request

    def refuse(request_id: int, prompt: Any, sampling: Any) -> Any:
        if len(prompt) < 3:
            raise RuntimeError("injected")
        return real(request_id, prompt, sampling)

    monkeypatch.setattr(server.engine, "add_request", refuse)
    asked = {"first.one": "x", "second:one": "xy", "third-one": "a secret prompt", "a b": "another secret"}
    bodies = [COMPLETION | {"prompt": prompt, "max_tokens": 2} for prompt in asked.values()]
    with ThreadPoolExecutor() as pool:
        *kept, replaced = identities = list(pool.map(lambda *of: ask(server, *of), asked, bodies))
    assert kept == list(asked)[:3] and re.fullmatch(r"[0-9a-f]{32}", replaced)  # "a b" does not fit into a line

    def lines_of(identity: str) -> int:
        return log.getvalue().count(f" {identity} POST /v1/completions ")

    wait_until(lambda: all(map(lines_of, identities)), "each has its line")
    text = log.getvalue()
    lines = [line for line in text.splitlines() if re.match(r"\d{4}-\d\d-\d\d ", line)]
    form = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>INFO|WARNING|ERROR) (?P<id>\S+) (?P<message>.*)")
    found: dict[str, list[str]] = {}
    for line in lines:
        match = form.fullmatch(line)
        assert match is not None, line
        found.setdefault(match["id"], []).append(f"{match['level']} {re.sub(r'[0-9.]+ s', 'S', match['message'])}")
    failed = [
        "ERROR the engine refused a request",
        "ERROR an answer failed: RuntimeError: injected",
        "INFO POST /v1/completions 500 S prompt={} cached=0 generated=0",
    ]
    for identity, tokens in (("first.one", 1), ("second:one", 2)):
        assert found.pop(identity) == [line.format(tokens) for line in failed]
    assert found.pop("third-one") == ["INFO POST /v1/completions 200 S prompt=15 cached=0 generated=2"]
    assert found.pop(replaced) == ["INFO POST /v1/completions 200 S prompt=14 cached=0 generated=2"]
    assert "secret" not in text  # what is left in `found` is the late line of a request of another test, if any
    assert ask(server, "mine", COMPLETION | {"n": 0}) == "mine"
    assert len(ask(server, "x" * 65, COMPLETION | {"n": 0})) == 32


def test_the_command_logs_in_this_form(monkeypatch, capsys):
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging, "getLogger", lambda name=None: root)
    front.start_logging("debug")
    assert root.level == logging.DEBUG  # the package's: all are `root` here
    root.warning("hello")
    assert re.fullmatch(r"\S+ \S+ WARNING - hello\n", capsys.readouterr().err)
    front.start_logging(as_json=True)
    root.error("no %s", "luck", extra={"fields": {"status": 500}}, exc_info=ValueError("two\nlines"))
    line = json.loads(capsys.readouterr().err)  # one line
    assert (line["level"], line["message"], line["status"], line["request_id"]) == ("ERROR", "no luck", 500, "-")
    assert "ValueError: two\nlines" in line["exception"]


# --- The cache, verified or off --------------------------------------------------------------------------------------


def config_of(*argv: str) -> Any:
    args = serve.make_parser().parse_args(argv)
    return serve.cache_config(args, Budgets.of(args, "cpu", free_bytes=2**40))


def test_hits_can_be_verified():
    assert config_of().verify_hits == 0 and config_of("--verify-hits", "0.5").verify_hits == 0.5
    for wrong in ("1.5", "-1", "nan", "all"):
        with pytest.raises(InputError, match="--verify-hits"):
            config_of("--verify-hits", wrong)


def test_the_memory_and_the_limit_of_its_checkpoints():
    def budget(*argv: str) -> tuple[float | None, float | None]:
        config = config_of(*argv)
        return config.cache_gb, config.mamba_gb

    assert budget() == (pytest.approx(0.25 + 0.05), None)
    assert budget("--cache-gb", "2", "--host-gb", "1") == (2, None)
    assert budget("--cache-gb", "2", "--mamba-gb", "1") == (2, 1)
    assert budget("--mamba-gb", "0.1") == (pytest.approx(0.3), 0.1)
    for wrong, message in (
        (["--cache-gb", "1", "--mamba-gb", "2"], "^--mamba-gb 2: the most for checkpoints in --cache-gb 1, so"),
        (["--mamba-gb", "2"], "^--mamba-gb 2: the most for checkpoints in --cache-gb 0.3, so"),
        (["--buffer-gb", "2"], "^unrecognized arguments: --buffer-gb 2"),
    ):
        with pytest.raises(InputError, match=message):
            budget(*wrong)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache-gb", "0.02"], r"memory: 20.* MiB for KV and states: \d+ KV blocks of .*, or \d+ pages"),
        (["--mamba-gb", "0.02", "--cache-gb", "0.12"], r"mamba_gb=0.02: at most \d+ states cached"),
        (["--checkpoint-dtype", "int8"], r"recurrent states: .* MiB each, .*; .* MiB as checkpoints"),
    ],
)
def test_the_engine_has_that_memory(options, said, tiny, platform):
    args = serve.make_parser().parse_args([*options, "--max-requests", "4"])
    engine = serve.make_engine(tiny, TOKENIZER, platform, args)
    assert re.search(said, engine.context.memory_report())


def test_bits_and_states_in_fewer_bytes_are_refused_before_a_model_is_built():
    with pytest.raises(InputError, match=r"^exact='bits' keeps states as they are: it needs checkpoint_dtype=None$"):
        serve.check_options(serve.make_parser().parse_args(["--exact", "bits", "--checkpoint-dtype", "int8"]))


def test_without_the_cache_every_prompt_is_computed_whole(tiny):
    assert config_of("--no-cache").mamba_gb == 0 and config_of("--no-cache", "--exact", "bits").exact == "bits"
    for options in (["--mamba-gb", "1"], ["--host-gb", "1"], ["--verify-hits", "0.5"]):
        with pytest.raises(InputError, match=options[0]):
            serve.check_options(serve.make_parser().parse_args(["--no-cache", *options]))
    with running(tiny, slots=0, caches=False) as server:
        for extra in ({}, {}, {"cache_read": True, "cache_write": True}, {}):
            answer = complete(server.client(), extra=extra)
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
        found = server.metrics()
        assert found[("computed_prompt_tokens_total", ())] == 4 * len(PROMPT)
        assert found[("slots", ())] == found[("hit_depth_tokens_count", ())] == 0


# --- What an operator signs for --------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_a_drain_has_its_lines_and_answers_probes(tiny, monkeypatch, caplog, again):
    """What is open goes on to its end, or to the second signal: a stream, an answer that waits, half of a request."""
    caplog.set_level(logging.INFO, "megatron_hybrid_prefix")
    monkeypatch.setattr(app, "_SNAPSHOT_S", 0.0)  # the engine is held
    monkeypatch.setattr(http_server, "SAME_SIGNAL_S", 0.0)
    server = Server(tiny, max_requests=1)
    http, api = server._server, server.app.state.api
    http._drain_s = HANG_S
    server.start()
    stream, half = (socket.create_connection(("127.0.0.1", server.port), HANG_S) for _ in range(2))
    with stream, half, ThreadPoolExecutor() as pool:
        try:
            with held(server, monkeypatch):
                body = COMPLETION | {"stream": True, "max_tokens": 100, "ignore_eos": True}
                stream.sendall(post("/v1/completions", json.dumps(body).encode()))
                events = stream.makefile("rb")
                assert any(line.startswith(b"data: {") for line in events)
                half.sendall(post("/v1/completions", b"{", length=100))
                waiting = pool.submit(server.send, "/v1/completions", COMPLETION)
                wait_until(lambda: api.open_requests == 3, "all are open")
                http.handle_exit(signal.SIGTERM, None)
                wait_until(lambda: api._stopping, "it was told to stop")
                for path, asked in (("/health", None), ("/health_generate", None), ("/v1/completions", COMPLETION)):
                    assert server.send(path, asked)[0] == 503
                assert server.metrics()[("open_sequences", ())] == 2
                if again:
                    http.handle_exit(signal.SIGINT, None)
                    assert b" 503 " in half.recv(4096)
                    assert waiting.result()[1]["error"]["code"] == "server_stopping"
                else:
                    half.close()
            streamed = events.read()
            assert b"[DONE]" in streamed and (b'"server_stopping"' in streamed) == again
            assert waiting.result()[0] == (503 if again else 200)
            server._thread.join(HANG_S)
        finally:
            server.stop()
    lines = [re.sub(r"[0-9.]+ s", "S", record.getMessage()) for record in caplog.records]
    assert ("SIGINT again: open requests (3) end now" in lines) == again
    assert "SIGTERM: no new requests; open ones (3) have S" in lines and "the server ends after a drain of S" in lines
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    replies = [record.fields["path"] for record in caplog.records if record.name == front.access.name]
    assert set(replies) == {"/v1/completions"}  # those to probes are "debug"


def test_sigterm_before_the_server_is_ready_has_a_line():
    code = """if True:
        import os, signal
        from megatron_hybrid_prefix.cli import serve
        serve.running.started_platform = lambda _: os.kill(os.getpid(), signal.SIGTERM)
        serve.main(["--port", "0"])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 143 and "SIGTERM before the server was ready: it ends" in done.stderr


def test_metrics_of_the_process_and_its_versions(server):
    found = server.metrics()
    assert found[("process_resident_memory_bytes", ())] > 0 and ("process_open_fds", ()) in found
    (labels,) = [dict(labels) for name, labels in found if name == "info"]
    assert labels["model"] == "tiny" and labels["version"] == __version__ and labels["device"]
    assert labels["megatron_core"].startswith("0.") and {"torch", "python", "build"} <= labels.keys()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
@pytest.mark.parametrize("option", ["--api-keys={keys}", "--shared=file://{folder}/tier?gb=1&secret_file={keys}"])
def test_keys_that_others_can_read_are_refused_or_named_once(option, mode, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(private_folder, "_is_own_group", lambda group: False)
    keys = tmp_path / "keys"
    keys.write_text("name 0123456789abcdef\n")
    keys.chmod(mode)
    argv = [option.format(keys=keys, folder=tmp_path), "--host-gb=1"]
    line = f"others can read the keys in {keys}: chmod 600 it"
    with nullcontext() if mode == 0o600 else pytest.raises(InputError, match=line):
        serve.check_options(serve.make_parser().parse_args(argv))
    args = serve.make_parser().parse_args([*argv, "--allow-readable-keys"])
    for _ in range(2):
        serve.check_options(args)
        serve.read_keys(args.api_keys)
    assert caplog.text.count(line) == (mode != 0o600)
