"""``POST /admin/explain`` and ``hybrid-prefix explain``: the guard, whose request is meant, and that the answer comes true."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from megatron_hybrid_prefix.cli.explain import sentences
from megatron_hybrid_prefix.cli.main import main
from megatron_hybrid_prefix.cli.serve import ADMIN_TOKEN
from tests.serve.test_serve import ADMIN, BLOCK, HIT, PROMPT, Server, complete, running

CHAT = {"messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": "x"}]}


def explain(server: Server, request: dict[str, Any], **fields: Any) -> dict[str, Any]:
    status, answer = server.send("/admin/explain", {"request": request} | fields, ADMIN)
    assert status == 200, answer
    assert list(answer["replicas"]) == ["0"]
    return answer["replicas"]["0"]


def error_of(server: Server, body: Any, token: str | None = ADMIN) -> tuple[int, str]:
    status, answer = server.send("/admin/explain", body, token)
    return status, answer["error"]["message"]


def test_the_answer_comes_true(server):
    extra = {"cache_salt": "true"}
    asked = {"prompt": PROMPT} | extra
    before = server.metrics()
    nothing = explain(server, asked)
    assert (nothing["resume_tokens"], nothing["tier"], nothing["kept_tokens"]) == (0, None, [HIT])
    complete(server.client(), extra=extra)
    found = explain(server, asked)
    assert (found["resume_tokens"], found["tier"], found["kv_tokens"]) == (HIT, "device", {"device": HIT})
    assert complete(server.client(), extra=extra).usage.prompt_tokens_details.cached_tokens == HIT
    counted = server.metrics()[("prompt_tokens_total", ())] - before[("prompt_tokens_total", ())]
    assert counted == 2 * len(PROMPT), "an explanation counts no prompt"
    assert explain(server, asked | {"cache_read": False})["refused_by"] == "cache_read"


def test_a_chat_with_its_breakpoints(server):
    asked = CHAT | {"cache_salt": "chat", "cache_breakpoints": [0]}
    found = explain(server, asked)
    assert len(PROMPT) // BLOCK * BLOCK in found["kept_tokens"], "the end of the first message"


def test_only_with_the_token(server, tiny):
    body = {"request": {"prompt": "x"}}
    for token in (None, "wrong"):
        assert error_of(server, body, token) == (401, "Incorrect admin token.")
    with running(tiny, admin_token=None) as without:
        assert error_of(without, body)[0] == 404


def test_a_tenants_request(tiny):
    with running(tiny, keys={"key-a": "a", "key-b": "b"}) as server:
        complete(server.client("key-a"), extra={"cache_salt": "s"})
        asked = {"prompt": PROMPT, "cache_salt": "s"}
        reused = [explain(server, asked, tenant=name)["resume_tokens"] for name in ("a", "b")]
        assert reused == [HIT, 0]
        assert error_of(server, {"request": asked})[0] == 400, "whose?"


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def say(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command. Returns its exit code, output and errors."""
    monkeypatch.setenv(ADMIN_TOKEN, ADMIN)

    def say(*argv: str, url: str = server.url) -> tuple[int, str, str]:
        code = main(["explain", "--url", url, *argv])
        return code, *capsys.readouterr()

    return say


def test_the_command_says_it_in_sentences(server, say, tmp_path, monkeypatch):
    complete(server.client(), extra={"cache_salt": "command"})
    code, out, _ = say(PROMPT, "--salt", "command")
    found = explain(server, {"prompt": PROMPT, "cache_salt": "command"})
    assert code == 0 and out.splitlines() == sentences(found)
    assert out.startswith(f"{HIT} of the {len(PROMPT)} prompt tokens would be reused: from the state on the device.")
    file = tmp_path / "request.json"
    file.write_text(json.dumps(CHAT))
    code, out, _ = say("--request", str(file), "--json")
    assert code == 0 and json.loads(out) == {"replicas": {"0": explain(server, CHAT)}}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert say("--request", "-")[1].splitlines() == sentences(explain(server, CHAT))


NOTHING: dict[str, Any] = {
    **{"prompt_tokens": 17, "block_tokens": 4, "limit_tokens": 16, "epoch": 0, "resume_tokens": 0, "tier": None},
    **{"kv_tokens": {"device": 0}, "state_tokens": {"device": []}, "evicted_tokens": [], "seen_tokens": 0},
    **{"kept_tokens": [], "writing_tokens": [], "scored_tokens": None, "reason": "no_such_prefix"},
    **{"least_load_tokens": 0, "most_states": 8, "refused_by": None, "writes": True},
}
KV = {"kv_tokens": {"device": 16}, "seen_tokens": 16, "reason": "states_gone"}
STATE = KV | {"state_tokens": {"device": [8]}}
SHARED = {"kv_tokens": {"device": 4, "host": 8, "shared": 16}, "state_tokens": {"host": [8], "shared": [16]}}
SHARED |= {"seen_tokens": 16, "least_load_tokens": 36, "reason": "memory"}
KV_GOES = "KV goes to token 16 on the device."


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"kept_tokens": [16]}, ["Block 1 is on no tier: no earlier", "This request would keep the state at 16: "]),
        ({"refused_by": "verify_hits"}, ["Every hit is computed again, to compare: verify_hits is 1."]),
        ({"refused_by": "prompt_log_probs_gb"}, ["The request asks for the log-probs of its prompt, and"]),
        ({"most_states": 0}, ["There is no room for a cached state: raise mamba_gb"]),
        (
            {"prompt_tokens": 4, "limit_tokens": 3, "reason": "below_one_block"},
            ["The prompt is no longer than a block of 4 tokens"],
        ),
        (KV, [KV_GOES, "Between 0 and 16 no state was kept, or it was evicted."]),
        (KV | {"limit_tokens": 15}, [KV_GOES, "Tokens after 15 are always computed.", "Between 0 and 12 no state"]),
        ({"epoch": 2, "reason": "epoch"}, ["The weights epoch is 2: what was cached before it is gone."]),
        ({"reason": "other_salt"}, ["Its start is cached with another salt or adapter"]),
        ({"reason": "kv_gone", "evicted_tokens": [8]}, ["KV after token 0 was evicted.", "Evicted: the state at 8."]),
        (KV | {"writing_tokens": [4, 8]}, [KV_GOES, "A running forward writes the states at 4, 8."]),
        (STATE, [KV_GOES, "The state at 8 is on the device, but the device has no room to load it now."]),
        (
            STATE | {"scored_tokens": [4], "reason": "not_read"},
            [KV_GOES, "The state at 8 is on the device, but the log-probs of the prompt"],
        ),
        (
            SHARED,
            [
                *(f"KV goes to token {at}" for at in ("4 on the device", "8 on the host", "16 on the shared tier")),
                "The state at 8 is on the host, but the device has no room",
                "The state at 16 is on the shared tier, but a load that saves fewer than 36 tokens does not begin.",
            ],
        ),
        ({"writes": False}, ["Block 1 is on no tier", "This request would keep nothing: cache_write is false."]),
    ],
)
def test_the_words_of_the_numbers(numbers, said):
    first, *found = sentences(NOTHING | numbers)
    assert first == f"0 of the {(NOTHING | numbers)['prompt_tokens']} prompt tokens would be reused: nothing."
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "give a prompt or --request FILE"),
        (("x", "--request", "y"), "give a prompt or --request FILE"),
        (("x", "--admin-token", "wrong"), "refuses: Incorrect admin token."),
        (("x", "--tenant", "a"), "refuses: 'tenant' must be the name"),
        (("x", "--url", "ftp://127.0.0.1"), "--url: ftp://127.0.0.1 must begin with http:// or https://"),
        (("x", "--url", "127.0.0.1"), "--url: "),
        (("x", "--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 does not answer: "),
        (("--request", "no such file"), "no such file"),
    ],
)
def test_bad_input_is_one_line(say, argv, problem):
    code, out, err = say(*argv)
    assert (code, out) == (2, "") and err.startswith("error: ") and problem in err and err.count("\n") == 1


def test_without_a_token_nothing_is_sent(say, monkeypatch):
    monkeypatch.delenv(ADMIN_TOKEN)
    code, _, err = say("x")
    assert code == 2 and "--admin-token" in err


@pytest.mark.parametrize(("text", "problem"), [("[1]", "has no JSON object"), ("{", "not JSON")])
def test_a_bad_file_is_named(say, tmp_path, text, problem):
    file = tmp_path / "request.json"
    file.write_text(text)
    code, _, err = say("--request", str(file))
    assert code == 2 and str(file) in err and problem in err
