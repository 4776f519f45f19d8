"""Asynchronous scheduling after a prefill: its first decode is launched before its first token is on the host."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
from tests.engine.test_not_finite import BAD, embedding, without_bad
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, raising, tokens


def order_of(served: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens from now on: launches of forwards, and tokens that arrive on the host."""
    order: list[str] = []
    for name, label in (("forward_launched", "forward"), ("tokens_on_host", "tokens")):
        run = getattr(served.engine.controller, name)
        monkeypatch.setattr(
            served.engine.controller, name, lambda *args, run=run, label=label: (order.append(label), run(*args))[1]
        )
    return order


@pytest.mark.parametrize("slots", [None, 32])
def test_the_first_decode_does_not_wait_for_the_first_token(model, slots, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async", slots=slots)
    order, prompts = order_of(served, monkeypatch), [tokens(2, 9, seed=seed) for seed in (1, 2)]
    for _ in range(2):  # the second time hits
        order.clear()
        served.send(*prompts, count=3)
        assert order == ["forward", "forward", "tokens", "forward", "tokens", "tokens"]
    served.check()
    served.finish()


@pytest.mark.parametrize(
    ("what", "fields", "sent"),
    [
        ("no request goes on", {}, {"count": 1}),
        (
            "log-probs of the prompt",
            {"materialize_only_last_token_logits": False},
            {"params": {"return_log_probs": True}},
        ),
        ("a hit is compared with a miss", {"verify_hits": 1.0}, {}),
    ],
)
def test_what_is_known_once_a_prefill_is_over_comes_before_the_next_forward(model, what, fields, sent, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async", **fields)
    served.send(tokens(2, 9, seed=1))
    order = order_of(served, monkeypatch)
    served.add(tokens(2, 9, seed=1), **({"count": 3} | sent))
    served.run()
    assert order[:2] == ["forward", "tokens"]
    served.check()


def test_a_long_answer_is_keyed_and_kept_as_with_legacy_scheduling(model):
    """The first decode begins where the prompt ends, which may be the end of a block."""
    found: list[Any] = []
    for mode in ("legacy", "async"):
        served = EngineHarness(model, async_sched_mode=mode)
        for tail in (0, 1, BLOCK - 1):
            answer = served.send(tokens(2, tail, seed=tail), count=2 * BLOCK + 5)
            turn = [*tokens(2, tail, seed=tail), *answer.generated_tokens, *tokens(0, 20, seed=3)]
            found.append((tail, list(answer.generated_tokens), served.send(turn).num_cached_tokens))
        served.check()
        served.finish()
    assert found[:3] == found[3:]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("slots", [None, 32])
def test_a_request_is_admitted_while_the_last_forward_runs(model, slots, chunked, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async", slots=slots, enable_chunked_prefill=chunked)
    first = served.add(tokens(1, 9, seed=1), count=8)
    served.step(3)
    order = order_of(served, monkeypatch)
    second = served.add(tokens(2, 9, seed=2), count=4)
    served.step()
    assert order == ["forward", "tokens"] and served.context.num_prefill_requests == 1
    served.step()
    assert order[2:] == ["forward", "tokens"] and served.context.total_request_count == 2
    served.run()
    served.check(first, second)
    served.finish()


@pytest.mark.parametrize("ends", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 2])
def test_requests_end_while_others_are_admitted_ahead(model, ends, new):
    """By an end token, which nobody can foresee; and one that is admitted ahead has one token only."""
    plain = EngineHarness(model, slots=None)
    served = EngineHarness(model, async_sched_mode="async", max_requests=6)
    prompts = [tokens(1, 9 + seed, seed=seed) for seed in range(3)]
    answers = [list(plain.send(prompt, count=12).generated_tokens) for prompt in prompts]
    after = 4  # its tokens before the step that admits
    ids = [
        served.add(prompt, 12, params={"termination_id": answers[row][after] if row < ends else None})
        for row, prompt in enumerate(prompts)
    ]
    while len(served.engine.get_request(ids[-1]).generated_tokens) < after:
        served.step()
    ids += [served.add(tokens(2, seed, seed=seed), 1 + 5 * (seed % 2)) for seed in range(20, 20 + new)]
    served.step()
    context = served.context
    assert context.num_prefill_requests == new
    assert context.request_in_prefill_status_tensor[: context.total_request_count].tolist()[-new:] == [1] * new
    served.run()
    for number in ids[: len(prompts)]:
        found = list(served.finished[number].generated_tokens)
        right = answers[number - 1]
        stop = right.index(right[after]) + 1 if number <= ends else 12
        assert found == right[:stop]
    served.check(*ids[len(prompts) :])
    served.check_drained()


@pytest.mark.parametrize("ends_after", [2, 3, 4])
def test_a_bad_token_of_a_prompt_that_is_admitted_ahead(model, ends_after):
    """What comes before it stays cached; one request that ran beside it goes on, and one ends in that step, or before or after it."""
    served = EngineHarness(model, async_sched_mode="async")
    with embedding(model, BAD, float("nan")):
        beside = [served.add(without_bad(80, seed=seed), count=count) for seed, count in ((5, ends_after), (1, 9))]
        served.step(3)
        bad = served.add([*without_bad(3 * BLOCK - 1, seed=2), BAD, *without_bad(BLOCK, seed=3)])
        served.step()
        assert served.context.num_prefill_requests == 1
        served.run()
    assert served.finished[bad].failed()
    assert max(node.depth_blocks for node in served.cache.nodes()) == 2
    served.check(*beside)
    served.check_drained()


def ahead(served: EngineHarness, *prompts: list[int], count: int = 4, beside: int = 20) -> list[int]:
    """Ids of a request that runs, and of others that were just admitted to a forward launched while its last one ran."""
    ids = [served.add(without_bad(80, seed=5), count=beside)]
    served.step(3)
    ids += [served.add(prompt, count) for prompt in prompts]
    served.step()
    assert served.context.num_prefill_requests == len(prompts)
    return ids


def test_what_resumes_from_a_bad_prefix_restarts_also_if_it_was_admitted_ahead(model):
    """It was launched before the first one is known to be bad: here only the first forward is."""
    served = EngineHarness(model, async_sched_mode="async")
    prompt = [*without_bad(BLOCK + 3, seed=2), BAD, *without_bad(4 * BLOCK, seed=3)]
    with embedding(model, BAD, float("nan")):
        beside, bad = ahead(served, prompt)
    good = served.add([*prompt, *without_bad(20, seed=9)])
    served.run()
    assert served.finished[bad].failed()
    served.check(beside, good)
    served.check_drained()


@pytest.mark.parametrize("then", ["an abort", "all end"])
def test_a_bad_request_that_was_admitted_ahead_is_resolved_by_itself(model, then):
    served = EngineHarness(model, async_sched_mode="async")
    prompt = [*without_bad(3 * BLOCK - 1, seed=2), BAD, *without_bad(BLOCK, seed=3)]
    with embedding(model, BAD, float("nan")):
        beside, bad = ahead(served, prompt, count=1, beside=4 if then == "all end" else 20)
        if then == "an abort":
            served.engine.abort_request(beside)
        served.run()
    assert served.finished[bad].failed()
    assert max(node.depth_blocks for node in served.cache.nodes()) == 2


def test_marks_of_bad_tokens_are_those_of_their_request_if_rows_change_their_order(model):
    """All others end, by an end token, in the step that admits two."""
    running = without_bad(80, seed=5)
    answer = list(EngineHarness(model, slots=None).send(running, count=12).generated_tokens)
    served = EngineHarness(model, async_sched_mode="async", max_requests=6, retention_interval_tokens=BLOCK)
    with embedding(model, BAD, float("nan")):
        first = served.add(running, 12, params={"termination_id": answer[4]})
        while len(served.engine.get_request(first).generated_tokens) < answer.index(answer[4]):
            served.step()
        prompt = [*without_bad(10, seed=2), BAD, *without_bad(4 * BLOCK, seed=3)]
        served.add(without_bad(180, seed=8))
        served.add(prompt)
        served.step()
        assert served.context.num_prefill_requests == 2
        served.run()
        assert served.send([*prompt, 7]).failed()


@pytest.mark.parametrize("fails", ["_dynamic_step_forward_logits", "_dynamic_step_sample_logits"])
def test_a_reset_forgets_what_was_ahead(model, fails, monkeypatch):
    """Plans of a forward that fails after it was published are counted."""
    served = EngineHarness(model, async_sched_mode="async")
    if fails == "_dynamic_step_sample_logits":
        ahead(served, tokens(2, 9, seed=2))
    else:
        served.add(tokens(1, 9, seed=1), count=8)
        served.step(3)
        served.add(tokens(2, 9, seed=2))
    with monkeypatch.context() as patched:
        patched.setattr(served.engine.controller, fails, raising(RuntimeError("a test")))
        with pytest.raises(RuntimeError, match="a test"):
            served.step()
    served.engine.reset()
    assert served.context.prefix_stats().fallbacks == {"forward_failed": 1}
    number = served.send(tokens(1, 5, seed=7)).request_id
    served.check(number)
    served.check_drained()


@pytest.mark.parametrize("slots", [None, 32])
def test_a_request_for_no_token_that_fills_the_longest_sequence(model, slots):
    """Its row has no room for a decode."""
    served = EngineHarness(model, async_sched_mode="async", slots=slots, max_tokens=2048)
    served.add(tokens(16, 0, seed=2), count=0)
    number = served.add(tokens(1, 9, seed=1), count=12)
    served.run()
    served.check(number)


@pytest.mark.parametrize("slots", [None, 32])
def test_megatrons_own_controller_overlaps_as_megatron_does(model, slots):
    served = EngineHarness(model, async_sched_mode="async", slots=slots)
    own = served.engine.controller
    controller = TextGenerationController(own.inference_wrapped_model, own.tokenizer)
    served.engine = HybridPrefixEngine(controller, served.context)
    first = served.add(tokens(1, 5, seed=7), count=40)
    served.step(3)
    second = served.add(tokens(1, 5, seed=8), count=2)
    served.step(5)
    assert second in served.finished
    served.run()
    served.check(first, second)


def test_no_decode_comes_between_prompts_that_fill_a_step(model, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async", max_requests=8)
    launched: list[int] = []
    run = served.engine.controller.forward_launched
    monkeypatch.setattr(
        served.engine.controller,
        "forward_launched",
        lambda: (launched.append(served.context.num_prefill_requests), run())[1],
    )
    for seed in range(4):
        served.add(tokens(14, 0, seed=seed), count=6)
    served.run()
    assert launched[:4] == [1] * 4
    served.check()
