"""`deploy/`: its options exist, its files are what their programs take, and the proxy beside the server does what it is there for."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.cli import serve
from tests.harness.limits import HANG_S, wait_until
from tests.serve.test_operators import labels_by_name, problems_of
from tests.serve.test_serve import COMPLETION, complete, held

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNIT = DEPLOY / "hybrid-prefix.service"


def text_of(name: str) -> str:
    return (DEPLOY / name).read_text()


def container() -> dict[str, Any]:
    """The server's in the manifest, in its pod."""
    (pod,) = [doc["spec"]["template"]["spec"] for doc in manifest() if doc["kind"] == "Deployment"]
    return pod | pod["containers"][0]


def manifest() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of("kubernetes.yaml")))


def entrypoint(name: str) -> list[str]:
    return json.loads(re.search(r"^ENTRYPOINT (.*)", text_of(name), re.M)[1])


def unit(key: str) -> str:
    return re.search(rf"^{key}=(.*(?:(?<=\\)\n.*)*)", UNIT.read_text(), re.M)[1].replace("\\\n", "")


COMPOSE = yaml.safe_load(text_of("compose.yaml"))["services"]["server"]
COMMANDS = {
    "unit": (shlex.split(unit("ExecStart")), int(unit("TimeoutStopSec"))),
    "compose": (entrypoint("Dockerfile") + COMPOSE["command"], int(COMPOSE["stop_grace_period"].removesuffix("s"))),
    "manifest": (entrypoint("Dockerfile.gpu") + container()["args"], container()["terminationGracePeriodSeconds"]),
}


@pytest.mark.parametrize("where", COMMANDS)
def test_each_option_exists_and_the_end_has_time(where):
    argv, grace_s = COMMANDS[where]
    args = serve.make_parser().parse_args(argv[argv.index("serve") + 1 :])
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1]) if where == "manifest" else 0
    assert args.drain_time + pause_s + 5 < grace_s  # what the server takes beside the drain
    assert args.log_json and args.api_keys and "secret_file=" in args.shared


def test_images_build_from_what_is_there():
    for name in ("Dockerfile", "Dockerfile.gpu"):
        steps = re.findall(r"^([A-Z]+) (.*)", text_of(name), re.M)
        assert steps[0][0] == "FROM" and ("USER", "10001:10001") in steps
        ignored = text_of(f"{name}.dockerignore").split()
        for source in (line.split()[0] for step, line in steps if step == "COPY"):
            assert source == "wheels" or (DEPLOY.parent / source).exists()
            assert source not in ignored
    assert COMPOSE["read_only"] and COMPOSE["user"] == "10001:10001"
    for service in yaml.safe_load(text_of("compose.yaml"))["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or source == "./tls" or (DEPLOY / source).exists(), source


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/hybrid-prefix/bin/hybrid-prefix", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (0, [])


def test_the_manifest_is_of_the_published_schema():
    validate = pytest.importorskip("kubernetes_validate").validate
    for doc in manifest():
        validate(doc, "1.34", strict=True)
    spec = container()
    assert spec["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["name"] for mount in spec["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_alerts_and_the_scrape_name_what_is_there(server):
    complete(server.client(), max_tokens=1)
    known = labels_by_name(server)
    rules = list(chain(*(group["rules"] for group in yaml.safe_load(text_of("alerts.yml"))["groups"])))
    ours = [rule for rule in rules if "hybrid_prefix_" in rule["expr"]]
    assert len(ours) >= 5
    assert not {rule["alert"]: found for rule in ours if (found := problems_of(rule["expr"], "", known))}
    assert set(re.findall(r"\bprocess_\w+", str(rules))) <= known.keys()


# --- The proxy beside the server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of nginx with this configuration, but for addresses, folders and the pauses that a test waits for."""
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("no nginx or no openssl: apt-get install nginx-light openssl")
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "tmp").mkdir()
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=HANG_S)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = text_of("nginx.conf")
    for old, new in (
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("server server:8000", f"server 127.0.0.1:{server.port}"),
        ("/etc/nginx/tls", str(folder)),
        ("/tmp/", f"{folder}/tmp/"),
        ("client_header_timeout 10s", "client_header_timeout 1s"),
        ("client_body_timeout 10s", "client_body_timeout 1s"),
        ("worker_processes auto;", "worker_processes 1; daemon off; user root;"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    argv = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    subprocess.run([*argv, "-t"], check=True, timeout=HANG_S)
    process = subprocess.Popen(argv)
    try:
        wait_until((folder / "tmp" / "nginx.pid").exists, "nginx runs")
        yield port
    finally:
        process.terminate()
        process.wait(HANG_S)


def dial(port: int) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), HANG_S), server_hostname="localhost")


def say(port: int, head: str, body: bytes = b"") -> bytes:
    """All that comes back for a request that closes its connection."""
    with dial(port) as client:
        client.sendall(f"{head}\r\nhost: localhost\r\nconnection: close\r\n".encode() + body)
        return b"".join(iter(lambda: client.recv(4096), b""))


def json_body(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def test_the_proxy_lets_the_api_through_and_keeps_the_rest_inside(proxy):
    assert b'"completion_tokens":3' in say(
        proxy, "POST /v1/completions HTTP/1.1", json_body(COMPLETION | {"max_tokens": 3})
    )
    for path in ("/metrics", "/admin/reset_cache", "/admin/explain", "/health_generate", "/v1/../metrics", "//metrics"):
        assert b" 404 " in say(proxy, f"GET {path} HTTP/1.1", b"\r\n").split(b"\r\n")[0], path
    assert b" 400 " in say(proxy, f"GET /v1/models HTTP/1.1\r\nx: {'x' * 40_000}", b"\r\n").split(b"\r\n")[0]
    assert (
        b" 413 " in say(proxy, "POST /v1/completions HTTP/1.1", b"content-length: 99999999\r\n\r\n").split(b"\r\n")[0]
    )


def test_slow_clients_do_not_reach_the_server(proxy, server):
    """Headers and bodies that never end: the proxy ends them, and the server has no connection for them."""
    before = server.metrics()[("cancelled_requests_total", ())]
    for start in (
        b"POST /v1/completions HT",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
    ):
        with dial(proxy) as client:
            client.sendall(start)
            rest = b"".join(iter(lambda: client.recv(4096), b""))  # until nginx closes it
            assert b" 200 " not in rest
    assert server.metrics()[("cancelled_requests_total", ())] == before


def test_streams_are_not_held_and_a_client_that_leaves_ends_its_answer(proxy, server, monkeypatch):
    body = COMPLETION | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
    before = server.metrics()[("cancelled_requests_total", ())]
    with held(server, monkeypatch, 5), dial(proxy) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + json_body(body))
        found = b""
        while b"data: {" not in found:  # the answer cannot end: the engine waits
            part = client.recv(4096)
            assert part
            found += part
    wait_until(lambda: not server.loop.open_sequences, "the answer of the client that left ended")
    assert server.metrics()[("cancelled_requests_total", ())] == before + 1
