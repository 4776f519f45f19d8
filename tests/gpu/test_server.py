"""`hybrid-prefix serve` on GPUs: alone, as replicas behind megatron's coordinator, and as one replica on several GPUs."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package)

from tests.harness.server_process import HIT, PROMPT, started  # noqa: E402

pytestmark = pytest.mark.gpu


def ask(server, prompt=PROMPT, **fields):
    """Cached tokens, and log-probs of the answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 0} | fields
    status, answer = server.send("/v1/completions", body)
    assert status == 200, answer
    cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached_tokens, answer["choices"][0]["logprobs"]["token_logprobs"]


@pytest.mark.parametrize(
    ("ranks", "argv"),
    [
        (1, ["--preset", "tiny"]),
        (2, ["--preset", "tiny"]),
        (2, ["--preset", "tiny", "--tp", "2"]),
        (2, ["--preset", "hybrid-4b", "--cuda-graphs", "4", "--max-tokens", "4096"]),
        (4, ["--preset", "hybrid-4b", "--cuda-graphs", "4", "--max-tokens", "4096", "--tp", "2"]),
    ],
    ids=["tiny-1", "tiny-2", "tiny-tp2", "hybrid-4b-2", "hybrid-4b-2x2"],
)
def test_the_second_call_is_cached(ranks, argv, tmp_path, monkeypatch):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    exact = "tiny" in argv
    with started(tmp_path, "--served-model-name", "m", *argv, ranks=ranks, device="cuda") as server:
        (first, cold), (second, hit) = ask(server), ask(server)
        assert (first, second) == (0, HIT)
        assert hit[:1] == pytest.approx(cold[:1], abs=5e-5 if exact else 0.1)
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda number: ask(server, f"{number % 4} {PROMPT}"), range(32)))
        assert sum(cached_tokens > 0 for cached_tokens, _ in found) >= 16
        server.wait_until_drained()
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_gone()
        assert "an engine ended" not in server.errors()
