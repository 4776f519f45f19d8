"""`hybrid-prefix serve` on GPUs: alone, as replicas behind megatron's coordinator, and as one replica on several GPUs."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package)

from tests.harness.server_process import HIT, PROMPT, started  # noqa: E402

TINY = ("--preset", "tiny", "--cache-gb", "0.5")
LARGE = ("--preset", "hybrid-4b", "--cache-gb", "3", "--cuda-graphs", "4", "--max-tokens", "4096")


def case(name: str, ranks: int, gib: float, *argv: str):
    """A server on a GPU for each rank."""
    return pytest.param(ranks, argv, id=name, marks=pytest.mark.gpu(gib=gib, gpus=ranks, seconds=90))


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
        case("tiny-1", 1, 2, *TINY),
        case("tiny-2", 2, 2, *TINY),
        case("tiny-tp2", 2, 2, *TINY, "--tp", "2"),
        case("hybrid-4b-2", 2, 16, *LARGE),
        case("hybrid-4b-2x2", 4, 10, *LARGE, "--tp", "2"),
    ],
)
def test_the_second_call_is_cached(ranks, argv, tmp_path, monkeypatch):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    exact = "tiny" in argv
    with started(tmp_path, "--served-model-name", "m", *argv, ranks=ranks, device="cuda", with_torchrun=True) as server:
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
