"""`deploy/`: its options exist, its files are what their programs take, and the proxy beside the server does what it is there for."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.cli import serve
from tests.harness.limits import HANG_S, wait_until
from tests.harness.workers.launch import free_port
from tests.serve.test_operators import labels_by_name, problems_of
from tests.serve.test_serve import COMPLETION, held

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TEXTS = {path.name: path.read_text() for path in DEPLOY.iterdir() if path.is_file()}
SERVICES = yaml.safe_load(TEXTS["compose.yaml"])["services"]
MANIFEST = list(yaml.safe_load_all(TEXTS["kubernetes.yaml"]))
POD = next(each["spec"]["template"]["spec"] for each in MANIFEST if each["kind"] == "Deployment")
CONTAINER = POD["containers"][0]
UNIT = dict(re.findall(r"^(\w+)=((?:.*\\\n)*.*)", TEXTS["hybrid-prefix.service"], re.M))


def need(*programs: str) -> None:
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"no {missing[0]}: apt-get install nginx-light openssl systemd")


def entrypoint(name: str) -> list[str]:
    return json.loads(re.search(r"^ENTRYPOINT (.*)", TEXTS[name], re.M)[1])


COMPOSED = SERVICES["server"]
PAUSE_S = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
COMMANDS = {  # and the seconds until the process is killed
    "unit": (shlex.split(UNIT["ExecStart"].replace("\\\n", "")), int(UNIT["TimeoutStopSec"])),
    "compose": (entrypoint("Dockerfile") + COMPOSED["command"], int(COMPOSED["stop_grace_period"][:-1])),
    "manifest": (entrypoint("Dockerfile.gpu") + CONTAINER["args"], POD["terminationGracePeriodSeconds"] - PAUSE_S),
}


@pytest.mark.parametrize("where", COMMANDS)
def test_each_option_exists_and_the_end_has_time(where):
    argv, grace_s = COMMANDS[where]
    args = serve.make_parser().parse_args(argv[argv.index("serve") + 1 :])
    assert args.drain_time + 5 < grace_s  # what the server takes beside the drain
    assert args.log_level == "info,json" and args.api_keys and "secret_file=" in args.shared


def test_files_that_are_copied_or_mounted_are_there():
    copied = chain(*(re.findall(r"^COPY (.*) \S+$", TEXTS[name], re.M) for name in ("Dockerfile", "Dockerfile.gpu")))
    mounted = chain(*(service.get("volumes", ()) for service in SERVICES.values()))
    paths = [DEPLOY.parent / path for line in copied for path in line.split()]
    paths += [DEPLOY / volume.partition(":")[0] for volume in mounted if volume.startswith(".")]
    missing = [str(path.relative_to(DEPLOY.parent)) for path in paths if not path.exists()]
    assert len(paths) > 10 and set(missing) <= {"wheels", "deploy/tls"}  # which whoever deploys makes
    ignored = (DEPLOY.parent / ".gitignore").read_text().split()
    assert {"/wheels/", "/deploy/tls/", "/deploy/secrets/"} <= set(ignored)


def test_systemd_takes_the_unit(tmp_path):
    need("systemd-analyze")
    unit = tmp_path / "hybrid-prefix.service"
    unit.write_text(TEXTS[unit.name].replace("/opt/hybrid-prefix/bin/hybrid-prefix", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


def test_the_manifest_is_of_the_published_schema():
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in MANIFEST:
        validate(each, "1.34", strict=True)
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_alerts_name_what_is_there(server):
    assert server.send("/v1/completions", COMPLETION)[0] == 200
    known = labels_by_name(server)
    (group,) = yaml.safe_load(TEXTS["alerts.yml"])["groups"]
    queries = [rule["expr"] for rule in group["rules"]]
    ours = [query for query in queries if "hybrid_prefix_" in query]
    assert len(ours) >= 5 and not {query: found for query in ours if (found := problems_of(query, "", known))}
    assert set(re.findall(r"\bprocess_\w+", str(queries))) <= known.keys()


# --- The proxy beside the server --------------------------------------------------------------------------------------

TLS = ssl.create_default_context()
TLS.check_hostname, TLS.verify_mode = False, ssl.CERT_NONE


@pytest.fixture(scope="module")
def proxy(server, tmp_path_factory):
    """The port of nginx with this configuration, but for addresses, folders and the pauses that a test waits for."""
    need("nginx", "openssl")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    made += ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(made, check=True, capture_output=True, timeout=HANG_S)
    text = TEXTS["nginx.conf"]
    for old, new in (
        ("/tmp/", f"{folder}/"),
        ("/etc/nginx/tls", str(folder)),
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("server server:8000", f"server 127.0.0.1:{server.port}"),
        ("client_header_timeout 10s", "client_header_timeout 1s"),
        ("client_body_timeout 10s", "client_body_timeout 1s"),
        ("worker_processes auto", "worker_processes 1"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    command = ["nginx", "-p", folder, "-c", folder / "nginx.conf"]
    subprocess.run(command, check=True, timeout=HANG_S)  # until it listens
    yield port
    subprocess.run([*command, "-s", "stop"], check=True, timeout=HANG_S)


def ask(port: int, path: str, body: Any = None, **headers: str) -> http.client.HTTPSConnection:
    """The connection, whose reply can be had. A request without a body is a GET."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=HANG_S, context=TLS)
    headers |= {} if body is None else {"content-type": "application/json"}
    connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
    return connection


def test_the_proxy_lets_the_api_through_and_keeps_the_rest_inside(proxy):
    assert json.loads(ask(proxy, "/v1/completions", COMPLETION).getresponse().read())["usage"]["completion_tokens"]
    for path in ("/metrics", "/health", "/admin/explain", "/health_generate", "/v1/../metrics", "//metrics"):
        assert ask(proxy, path).getresponse().status == 404, path
    assert ask(proxy, "/v1/models", x="x" * 40_000).getresponse().status == 400
    assert ask(proxy, "/v1/completions", {}, **{"content-length": "99999999"}).getresponse().status == 413


@pytest.mark.parametrize(
    "start", [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"]
)
def test_slow_clients_do_not_reach_the_server(proxy, server, start):
    """A header or a body that does not end: the proxy ends the connection."""
    before = server._server.server_state.total_requests
    with TLS.wrap_socket(socket.create_connection(("127.0.0.1", proxy), HANG_S)) as client:
        client.sendall(start)
        assert b" 200 " not in b"".join(iter(lambda: client.recv(4096), b""))
    assert server._server.server_state.total_requests == before


@pytest.mark.parametrize("stream", [True, False])
def test_streams_are_not_held_and_a_client_that_leaves_ends_its_answer(proxy, server, monkeypatch, stream):
    body = COMPLETION | {"stream": stream, "max_tokens": 900, "ignore_eos": True, "return_token_ids": True}
    cancelled = ("cancelled_requests_total", ())
    before = server.metrics()[cancelled]
    with held(server, monkeypatch, 20):  # so the answer cannot end
        with closing(ask(proxy, "/v1/completions", body)) as connection:
            if stream:
                lines, tokens = iter(connection.getresponse().readline, b""), 0
                while tokens < 10:  # in as many events as the server makes of them
                    event = next(lines).removeprefix(b"data: ").strip()
                    tokens += len(json.loads(event)["choices"][0]["token_ids"]) if event else 0
            wait_until(lambda: server.loop.open_sequences, "the engine has it")
    wait_until(lambda: server.metrics()[cancelled] == before + 1, "the answer of the client that left ended")
