"""The server and clients that nobody here wrote, each with its own verdict: litellm, renderers, lm-eval, guidellm, and those of
agents. (openai: tests/serve, too.)

They run in environments apart (``scripts/clients.sh`` makes them), because their pins clash with ours, and without network.
What the model should say comes from the float64 model.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.clients.with_prompts import MESSAGES, PROMPT
from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.limits import HANG_S
from tests.harness.server_process import BLOCK, LIMIT_TOKENS, Server, started
from tests.harness.tokenizer_folder import CHAT_TEMPLATE, make_folder
from tests.serve.test_tools import FAMILIES

pytestmark = pytest.mark.clients
HERE = Path(__file__).parent
NEW_TOKENS = 12
QUESTIONS = [
    f"Question: {question} Answer:"
    for question in (
        "which block is evicted first?", "what does a prompt need?", "where is the state of the layers?",
        "who keeps keys and values?", "how many blocks are in use?", "what is at the end?",
        "which request is the oldest?", "what do recurrent layers hold?",
    )
]  # fmt: skip
CHOICES = [" the oldest one", " a state at some of their ends", " no request", " keys and values of a prompt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer's folder."""
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    options = ["--preset", "tiny", "--tokenizer", str(folder), "--prompt-log-probs"]
    with started(tmp_path_factory.mktemp("server"), *options, ranks=1) as server:
        yield server
        server.wait_until_drained()
        assert server.send("/health")[1]["engine_failures"] == 0


def run_client(*command: str, cwd: Path, environment: str = "MHP_CLIENTS_PYTHON") -> str:
    """Output of a program of the clients' environment. It fails the test with its own words."""
    python = Path(os.environ[environment])
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    own = {
        "HF_HOME": str(cwd / "hf"),
        "OPENAI_API_KEY": "none",
        "PYTHONPATH": "",
        "no_proxy": "127.0.0.1",
        "NO_COLOR": "1",
    }
    name, *arguments = command
    program = [str(python), name] if name.endswith(".py") else [str(python.parent / name)]
    done = subprocess.run(
        [*program, *arguments],
        cwd=cwd,
        env=os.environ | offline | proxies | own,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, f"{name}: {done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


# --- What the model should say ---------------------------------------------------------------------------------------


class Expected:
    """The float64 model with the folder's tokenizer."""

    def __init__(self, folder: Path, reference: Any) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.log_probs = cache(lambda tokens: reference.log_probs(list(tokens)))

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def greedy(self, prompt: str, count: int = NEW_TOKENS) -> tuple[str, list[float]]:
        """The likeliest continuation up to the end token, which has no text, and the log-probs of all its tokens."""
        tokens, values = list(self.tokens(prompt)), []
        start = len(tokens)
        for _ in range(count):
            row = self.log_probs(tuple(tokens))[-1]
            best = row.topk(2).values
            assert best[0] - best[1] > 2 * LOG_PROB_NOISE, "a near tie: choose another prompt"
            tokens.append(int(row.argmax()))
            values.append(float(best[0]))
            if tokens[-1] == self._tokenizer.token_to_id("</s>"):
                return self.text(tokens[start:-1]), values
        return self.text(tokens[start:]), values

    def likelihood(self, context: str, ending: str) -> float:
        """Log-probability of an ending, with the tokens of the whole text."""
        tokens, start = self.tokens(context + ending), len(self.tokens(context))
        rows = self.log_probs(tokens)
        return sum(float(rows[at - 1, tokens[at]]) for at in range(start, len(tokens)))


@pytest.fixture(scope="module")
def expected(folder: Path, tiny_reference: Any) -> Expected:
    return Expected(folder, tiny_reference)


def chat_text(messages: list[dict[str, str]]) -> str:
    import jinja2

    return jinja2.Template(CHAT_TEMPLATE, keep_trailing_newline=True).render(
        messages=messages, add_generation_prompt=True
    )


# --- Clients ---------------------------------------------------------------------------------------------------------


def test_litellm(server, expected, tmp_path):
    found = json.loads(run_client(str(HERE / "with_litellm.py"), server.url, cwd=tmp_path).splitlines()[-1])
    assert found["completion"] == expected.greedy(PROMPT)[0]
    assert found["chat"] == expected.greedy(chat_text(MESSAGES))[0]
    assert found["marked"] == [0, 1]
    assert found["too_long"] == "ContextWindowExceededError"


def test_an_agent_on_renderers(server, expected, folder, tmp_path):
    """Ten turns in ids: each goes on at the last answer's last block, and the log-probs are the float64 model's."""
    output = run_client(str(HERE / "with_renderers.py"), server.url, str(folder), cwd=tmp_path)
    turns = json.loads(output.splitlines()[-1])
    assert len(turns) == 10
    assert turns[0]["prompt_ids"] == list(expected.tokens(chat_text(MESSAGES)))
    computed = 0
    for turn in turns:
        prompt, answer = turn["prompt_ids"], turn["completion_ids"]
        assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // BLOCK * BLOCK
        assert 50 < len(answer) <= 60 and turn["finish_reason"] in ("stop", "length")
        rows = expected.log_probs((*prompt, *answer))[len(prompt) - 1 :]
        right = [float(row[token]) for row, token in zip(rows, answer, strict=False)]
        assert turn["completion_logprobs"] == pytest.approx(right, abs=LOG_PROB_NOISE)
        computed = len(prompt) + len(answer) - 1  # the last id was never computed


def test_agents(folder, tmp_path):
    """Plain, streamed, five calls in a loop, a schema; cached tokens are the server's, through litellm's proxy, too."""
    template, program = tmp_path / "chat.jinja", HERE.parents[1] / "scripts/agent_clients.py"
    template.write_text(FAMILIES["qwen3-coder"][0])
    options = ["--tokenizer", str(folder), "--chat-template", str(template), "--max-sequence-length", "4096"]
    with started(tmp_path, "--preset", "tiny", *options, ranks=1) as server:
        print(said := run_client(str(program), server.url, cwd=tmp_path, environment="MHP_AGENTS_PYTHON"))
    assert said.count("5 calls, a schema") == 8


def lm_eval_task(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    """Writes a task and its data."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(common | fields))  # JSON is YAML


def metric(name: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True}]


def lm_eval(server: Server, folder: Path, tasks: str, *arguments: str, kind: str = "", **model: Any) -> Any:
    """Runs tasks. Returns lm-eval's own results, and the samples of each task."""
    path = "/v1/chat/completions" if kind else "/v1/completions"
    fields = {"model": "tiny", "base_url": server.url + path, "max_length": LIMIT_TOKENS, "num_concurrent": 4} | model
    out = folder / f"out-{len(list(folder.glob('out-*')))}"
    options = ["--model", f"local-{kind}completions", "--tasks", tasks, "--include_path", str(folder)]
    options += ["--model_args", ",".join(f"{name}={value}" for name, value in fields.items())]
    options += ["--output_path", str(out), "--log_samples", *arguments]
    run_client("lm-eval", "run", *options, cwd=folder)
    (results,) = out.rglob("results_*.json")
    samples = {
        task: [json.loads(line) for line in file.read_text().splitlines()]
        for task in tasks.split(",")
        for file in out.rglob(f"samples_{task}_*.jsonl")
    }
    return json.loads(results.read_text())["results"], samples


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_lm_eval_knows_the_likeliest_choice(server, expected, folder, tmp_path, backend):
    """Accuracy 1 with the labels of the float64 model, 0 with others. The remote tokenizer is the server's."""
    likelihoods = [[expected.likelihood(question, choice) for choice in CHOICES] for question in QUESTIONS]
    best = [values.index(max(values)) for values in likelihoods]
    assert all(sorted(values)[-1] - sorted(values)[-2] > 0.01 for values in likelihoods), "a near tie"
    fields = {"output_type": "multiple_choice", "doc_to_choice": CHOICES, "metric_list": metric("acc")}
    for name, shift in (("right_choice", 0), ("wrong_choice", 1)):
        rows = [
            {"question": question, "label": (label + shift) % len(CHOICES)}
            for question, label in zip(QUESTIONS, best, strict=True)
        ]
        lm_eval_task(tmp_path, name, rows, doc_to_target="label", **fields)
    tokenizer = {"tokenizer": folder} if backend == "huggingface" else {}
    results, samples = lm_eval(server, tmp_path, "right_choice,wrong_choice", tokenizer_backend=backend, **tokenizer)
    assert (results["right_choice"]["acc,none"], results["wrong_choice"]["acc,none"]) == (1.0, 0.0)
    assert len(samples["right_choice"]) == len(QUESTIONS)
    for sample in samples["right_choice"]:
        values = [float(response[0][0]) for response in sample["resps"]]
        assert values == pytest.approx(likelihoods[sample["doc_id"]], abs=10 * LOG_PROB_NOISE)


def test_lm_eval_generates(server, expected, folder, tmp_path):
    """The answers are the float64 model's: exact match 1, through completions and chats."""

    def rows(prompt_of: Any) -> list[dict[str, str]]:
        return [{"question": text, "answer": expected.greedy(prompt_of(text))[0]} for text in QUESTIONS]

    fields = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": NEW_TOKENS, "temperature": 0, "do_sample": False},
        "metric_list": metric("exact_match"),
    }
    assert not any("\n\n\n" in row["answer"] for row in rows(str))
    lm_eval_task(tmp_path, "text_answer", rows(str), **fields)
    lm_eval_task(tmp_path, "chat_answer", rows(lambda text: chat_text([{"role": "user", "content": text}])), **fields)
    tokenizer = {"tokenizer": folder, "tokenizer_backend": "huggingface"}
    results, _ = lm_eval(server, tmp_path, "text_answer", **tokenizer)
    assert results["text_answer"]["exact_match,none"] == 1.0
    results, _ = lm_eval(server, tmp_path, "chat_answer", "--apply_chat_template", kind="chat-")
    assert results["chat_answer"]["exact_match,none"] == 1.0


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(server, folder, tmp_path, route):
    """A load of 40 requests, 8 at a time. Its report has no error, and all times."""
    report = tmp_path / "report.json"
    before = server.metric("http_requests_total", path=route, status="200")
    arguments = ["--backend", f"kind=openai_http,target={server.url},model=tiny,request_format={route}"]
    arguments += ["--profile", "kind=concurrent,streams=8", "--constraint", "kind=max_requests,count=40"]
    arguments += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
    arguments += ["--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=32"]
    arguments += ["--output", f"kind=json,path={report}", "--disable-console"]
    run_client("guidellm", "run", *arguments, cwd=tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 40, "errored": 0, "incomplete": 0, "total": 40}
    assert metrics["output_token_count"]["successful"]["total_sum"] == 40 * 32
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency", "output_tokens_per_second"):
        found = metrics[name]["successful"]
        assert found["count"] >= 40 and math.isfinite(found["mean"]) and found["median"] > 0, name
    (after,) = server.metric("http_requests_total", path=route, status="200")
    assert after - sum(before) >= 40
    first, between = (metrics[f"{name}_ms"]["successful"] for name in ("time_to_first_token", "inter_token_latency"))
    print(
        f"guidellm {route}: {metrics['output_tokens_per_second']['successful']['mean']:.0f} tokens/s, first token "
        f"{first['median']:.0f} ms, between tokens {between['median']:.1f} ms (medians)"
    )
