"""Requests that are aborted, preempted, or limit what may be cached of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.inference.inference_request import DynamicInferenceRequest

from megatron_hybrid_prefix.mcore import HybridPrefixEngine
from megatron_hybrid_prefix.upstream.blocks import block_counts
from tests.harness.engine_helpers import assert_matches, greedy
from tests.harness.lifecycle_helpers import BLOCK, MANY, MODES, EngineHarness, IdTokenizer, tokens
from tests.harness.selection import mostly_slow

each_mode = pytest.mark.parametrize("mode", mostly_slow(MODES, "async"))


# -- abort -------------------------------------------------------------------------------------------------------------


def check_aborted(served: EngineHarness, number: int, count: range) -> None:
    """Checks that the request came back once, as finished, with this many right tokens, and that its future is done."""
    record, request = served.records[number], served.finished[number]
    assert request.status.name == "COMPLETED" and not request.failed()
    assert len(request.generated_tokens) == request.generated_length
    assert len(request.generated_tokens) in count
    if request.generated_tokens:
        assert_matches(served.reference, request)
    assert number not in served.engine.requests
    assert record.request_id == number
    assert not served.engine.abort_request(number)


def test_abort_of_unknown_and_finished_requests(model):
    served = EngineHarness(model)
    assert not served.engine.abort_request(99)
    served.send(tokens(1, 20, seed=1))
    assert not served.engine.abort_request(1)
    alone = served.add(tokens(1, 20, seed=2))
    assert served.engine.abort_request(alone)  # nothing but this is left, and it has to come back
    assert served.engine.has_unfinished_requests()
    served.run()
    check_aborted(served, alone, range(0, 1))
    assert not served.engine.abort_request(99)
    served.check_drained()
    assert served.step() == []


@each_mode
def test_abort_during_prefill(model, mode):
    """With async scheduling its forward is running; otherwise it is about to be admitted. None of its tokens is
    returned.
    """
    served = EngineHarness(model, async_sched_mode=mode)
    other = served.add(tokens(1, 20, seed=1), 8)
    served.step(3)
    victim = served.add(tokens(2, 20, seed=2), 8)
    if mode == "async":
        served.step()
        assert (victim in served.cache.live) and not served.engine.get_request(victim).generated_tokens
    assert served.engine.abort_request(victim)
    assert served.step() == [victim]
    check_aborted(served, victim, range(0, 1))
    assert (served.held_blocks, served.live_slots) == (2, 1)
    again = served.send(tokens(2, 20, seed=2))
    assert again.num_cached_tokens == (2 * BLOCK if mode == "async" else 0)  # what it had computed is good
    served.run()
    served.check(other, again.request_id)
    served.check_drained()


@each_mode
@pytest.mark.parametrize("max_requests", [2, 4], ids=["full", "room"])
def test_abort_between_two_chunks(model, mode, max_requests):
    served = EngineHarness(
        model, async_sched_mode=mode, enable_chunked_prefill=True, max_tokens=2 * BLOCK, max_requests=max_requests
    )
    served.send(tokens(0, 9, seed=4))
    other = served.add(tokens(0, 50, seed=1), 12)
    served.step(2)
    victim = served.add(tokens(5, 20, seed=2), 8)
    behind = served.add(tokens(1, 20, seed=3), 8)
    served.step(2)
    assert served.context.chunked_prefill_request_id == victim
    assert served.engine.get_request(victim).finished_chunk_token_count >= BLOCK
    assert served.engine.abort_request(victim)
    assert served.step() == [victim]
    check_aborted(served, victim, range(0, 1))
    assert served.context.chunked_prefill_request_id == -1 and victim not in served.cache.live
    served.run()
    again = served.send(tokens(5, 20, seed=2))
    served.check(other, behind, again.request_id)
    served.check_drained()


@each_mode
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_abort_while_paused_without_free_blocks(model, mode, victims):
    """Rows 0 and 1 are paused, 2 and 3 run: where one of these goes too, its blocks must not wake one that was given up."""
    served = EngineHarness(model, blocks=11, paused_blocks=5, async_sched_mode=mode)
    served.send(tokens(0, 9, seed=4))
    for seed in range(4):
        served.add(tokens(1, 50 + seed, seed=seed), 40)
    served.step_until(lambda: served.context.paused_request_count == 2)
    rows = served.context.request_ids[:4].tolist()
    aborted = [rows[row] for row in victims]
    held, free_slots = served.held_blocks, served.context.mamba_metadata.mamba_state_free_slot_count
    for number in aborted:
        assert served.engine.abort_request(number)
    assert sorted(served.step()) == sorted(aborted)
    for number in aborted:
        check_aborted(served, number, range(10, 20))
    rest = 4 - len(aborted)
    assert served.live_slots == rest
    assert served.context.mamba_metadata.mamba_state_free_slot_count == free_slots + len(aborted)
    assert served.held_blocks <= held - 2 * len(aborted) + rest  # a request that goes on may take a block
    served.run()
    served.check(*{*rows} - {*aborted})
    served.check_drained()


@each_mode
def test_abort_in_the_step_that_would_have_been_the_last(model, mode):
    served = EngineHarness(model, async_sched_mode=mode)
    victim = served.add(tokens(1, 20, seed=1), 4)
    while len(served.engine.get_request(victim).generated_tokens) < 3:
        served.step()
    assert served.engine.abort_request(victim)
    assert served.step() == [victim]
    check_aborted(served, victim, range(3, 4))
    served.check_drained()
    assert [served.step(), served.step()] == [[], []]  # idle steps


def test_abort_around_the_context_of_megatron(model):
    """The engine with megatron's context, without a cache: aborts work there, too."""
    served = EngineHarness(model, slots=None)
    served.engine = HybridPrefixEngine(served.engine.controller, served.context)
    victim, other = (served.add(tokens(1, 20, seed=seed), 9) for seed in (1, 2))
    served.step(4)
    assert served.engine.abort_request(victim)
    assert served.step() == [victim]
    check_aborted(served, victim, range(2, 5))
    served.run()
    served.check(other)
    served.check_drained()


# -- preemption --------------------------------------------------------------------------------------------------------


def preempting(model: Any, mode: str = "async", **fields: Any) -> EngineHarness:
    """Four of the engine's requests do not fit at full length."""
    return EngineHarness(model, blocks=11, async_sched_mode=mode, tokenizer=IdTokenizer(), **fields)


def crowd(served: EngineHarness, params: dict[str, Any] | None = None, **attributes: Any) -> list[int]:
    """Four requests that fill ten blocks before they finish."""
    return [served.add(tokens(1, 50 + seed, seed=seed), 40, params=params, **attributes) for seed in range(4)]


def preempted(served: EngineHarness) -> list[int]:
    """Requests that were preempted after their first token."""
    return [number for number, record in served.records.items() if len(record.requests) > 1]


@each_mode
def test_preempted_requests_keep_their_attributes(model, mode):
    served = preempting(model, mode)
    session = {"id": "s", "end": True}
    crowd(served, {"top_n_logprobs": 3}, cache_salt="one", cache_breakpoints=[BLOCK], cache_session=session)
    served.run()
    served.check()
    assert served.engine.evicted_request_count >= len(preempted(served)) > 0
    for number in preempted(served):
        last = served.records[number][-1]
        assert (last.sampling_params.cache_salt, last.sampling_params.cache_breakpoints) == ("one", [BLOCK])
        assert last.sampling_params.cache_session == session
        assert (last.enable_prefix_caching, last.block_size_tokens) == (True, BLOCK)
    for request in served.finished.values():
        assert [len(entry) for entry in request.generated_top_n_logprobs] == [3] * 40
    stats = served.cache.stats()
    assert stats.sessions_ended == 4, "with each request, however often that was preempted"
    assert stats.checkpoints_by_reason["breakpoint"] >= 4
    assert stats.reused_tokens == sum(request.num_cached_tokens for request in served.finished.values())
    # Each resumed from its own first block, unless its state made room for others.
    assert stats.resumed_tokens in range(0, served.engine.evicted_request_count * BLOCK + 1, BLOCK)
    cached = [served.send(tokens(1, 53, seed=3), cache_salt=salt).num_cached_tokens for salt in ("two", "two", "one")]
    assert cached[:2] == [0, BLOCK]
    served.finish()


def test_preempted_requests_that_must_not_be_cached(model):
    served = preempting(model)
    crowd(served, cache_write=False)
    served.run()
    assert preempted(served)
    assert served.cache.memory_use().keyed_blocks == served.kept_states == served.cache.stats().reused_tokens == 0
    served.finish()


@pytest.mark.parametrize("place", ["after", "across"])
def test_stop_words_of_preempted_requests(model, place):
    """A stop word that comes after the preemption, or that started before it; kept in the answer, or cut off."""
    first = preempting(model)
    crowd(first)
    first.run()
    said = {number: list(request.generated_tokens) for number, request in first.finished.items()}
    for number in preempted(first):
        split = len(first.records[number][0].generated_tokens)
        start = split - 1 if place == "across" else split + 4
        word = said[number][start : start + 2]
        pairs = [said[number][at : at + 2] for at in range(start)]
        if word not in pairs:
            break
    else:
        raise AssertionError("no stop word that comes once")

    for keep in (True, False):
        served = preempting(model)
        stop = {"stop_words": [" ".join(map(str, word))], "detokenize_stop_sequence": keep}
        for seed in range(4):
            served.add(tokens(1, 50 + seed, seed=seed), 40, params=stop if seed + 1 == number else None)
        served.run()
        assert [len(part.generated_tokens) for part in served.records[number].requests] == (
            [split, start + 2 - split] if keep else [min(split, start), max(0, start - split)]
        )
        request = served.finished.pop(number)
        assert request.generated_tokens == said[number][: start + 2 * keep]
        assert_matches(served.reference, request)
        served.finish()


@pytest.mark.parametrize("params", [{"skip_prompt_log_probs": True}, {"skip_prompt_log_probs": False}], ids=str)
def test_a_stop_word_that_is_the_whole_answer(model, params):
    served = EngineHarness(model, tokenizer=IdTokenizer(), materialize_only_last_token_logits=False)
    prompt = tokens(1, 20, seed=1)
    first = served.send(prompt)
    served.check()
    for words in (first.generated_tokens[:1], first.generated_tokens[:2]):
        number = served.add(prompt, params=params | {"stop_words": [" ".join(map(str, words))], "top_n_logprobs": 2})
        served.run()
        request = served.finished[number]
        assert request.generated_tokens == request.generated_log_probs == request.generated_top_n_logprobs == []
        assert len(request.prompt_log_probs or ()) == (0 if params["skip_prompt_log_probs"] else len(prompt) - 1)
    served.check_drained()


class BegunTokenizer(IdTokenizer):
    """Begins a prompt with token 7, and has two tokens that end an answer beside ``eod``."""

    bos, eod, end_tokens = 7, 511, (510, 509)

    def encode_prompt(self, text: str) -> list[int]:
        return [7, *self.tokenize(text)]


def test_an_answer_ends_at_each_end_token_of_the_tokenizer(model):
    """If the request names none itself."""
    served = EngineHarness(model, tokenizer=BegunTokenizer())
    prompt = tokens(1, 20, seed=1)
    answer = list(served.send(prompt, count=8).generated_tokens)
    served.engine.controller.tokenizer.end_tokens = (510, answer[3])
    ends = answer.index(answer[3]) + 1
    for params, attributes, length in (
        ({"termination_id": None}, {}, ends),
        ({"termination_id": None}, {"stop_token_ids": [510]}, ends),
        ({"termination_id": -1}, {}, 8),
        ({"termination_id": 511}, {}, 8),
    ):
        number = served.add(prompt, 8, params=params, **attributes)
        served.run()
        request = served.finished[number]
        assert list(request.generated_tokens) == answer[:length] and len(request.generated_log_probs) == length
    served.check_drained()


def test_a_text_prompt_begins_as_the_tokenizer_says(model):
    megatrons = IdTokenizer()
    megatrons.bos = 7
    served = EngineHarness(model, tokenizer=BegunTokenizer())
    for tokenizer, text, add_bos, prompt in (
        (BegunTokenizer(), "5 6", False, [7, 5, 6]),
        (BegunTokenizer(), "5 6", True, [7, 5, 6]),
        (megatrons, "5 6", False, [5, 6]),
        (megatrons, "7 5 6", True, [7, 5, 6]),
    ):
        served.engine.controller.tokenizer = tokenizer
        number = served.add(text, 2, params={"add_BOS": add_bos})
        assert served.engine.get_request(number).prompt_tokens.tolist() == prompt
        served.run()


@each_mode
def test_a_chunked_prefill_that_finds_no_room_for_its_next_chunk(model, mode):
    """A running request takes a block between two chunks. With async scheduling megatron fails here, even uncached."""
    served = EngineHarness(
        model,
        blocks=8,
        enable_chunked_prefill=True,
        max_tokens=2 * BLOCK,
        async_sched_mode=mode,
        materialize_only_last_token_logits=False,
    )
    running = served.add(tokens(1, 61, seed=1), 20)
    served.step(2)
    chunked = served.add(tokens(5, 40, seed=2), 5, params={"skip_prompt_log_probs": False})
    alone = 0
    while served.engine.has_unfinished_requests():
        served.step()
        alone += chunked in served.engine.waiting_request_ids and served.context.total_request_count == 1
    assert alone > 10 and list(served.finished) == [running, chunked]
    served.check()
    assert len(served.finished[chunked].prompt_log_probs) == 5 * BLOCK + 40 - 1
    assert len(served.finished[chunked].generated_log_probs) == 5
    served.check_drained()


# -- what used to raise, hang or lose something ---------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, MANY])
def test_what_can_never_be_active_is_refused(model, slots):
    """The request needs more blocks than a running one can have. Where these are fewer than all, megatron would pause it forever,
    and assert.
    """
    served = EngineHarness(model, slots=slots, blocks=7, paused_blocks=3)
    most = block_counts(served.context.kv_block_allocator).active
    if slots is None:
        from megatron_hybrid_prefix.mcore.runner import run_batch

        (result,) = run_batch(served.engine, [tokens(most, 10, seed=1)], greedy(70))
        assert result.status == "failed" and f"there are {most}" in result.error
        return
    served.add(tokens(most, 10, seed=1), 70)
    (record,) = served.engine.step_modern()["finished_request_records"]
    assert record.requests[-1].failed()
    served.send(tokens(2, 3, seed=2))
    served.check_drained()


def test_a_chunk_longer_than_the_prompt_takes_nothing(model):
    served = EngineHarness(model, slots=8)
    running = served.add(tokens(0, 60, seed=1), 30)
    served.step(2)
    wrong = DynamicInferenceRequest(
        request_id=99, prompt_tokens=torch.tensor(tokens(0, 30, seed=5)), sampling_params=greedy(4)
    )
    before = served.cache.blocks.available_count
    with pytest.raises(ValueError, match="request 99: a chunk of 31 of 30 prompt tokens"):
        served.context.add_request(wrong, 31)
    assert served.cache.blocks.available_count == before
    served.run()
    served.check(running)
    served.check_drained()


def test_a_chunk_that_runs_in_the_last_row_is_left_alone(model):
    served = EngineHarness(model, async_sched_mode="async", max_requests=2, max_tokens=128, enable_chunked_prefill=True)
    served.add(tokens(0, 20, seed=1), 12)
    served.step(2)
    chunked = served.add(tokens(4, 20, seed=2))
    served.step(1)
    assert served.context.get_index_of_chunked_prefill_request() != -1
    assert not served.context.remove_waiting_row(chunked)
    served.finish()


def test_a_caller_may_write_to_its_prompt_after_adding_it(model):
    """Keys are made at arrival and tokens are read at admission; both must see the prompt as it was added."""
    served = EngineHarness(model)
    first, second = tokens(2, 9, seed=71), tokens(2, 9, seed=72)
    prompt = torch.tensor(first)
    served.add(prompt)
    prompt.copy_(torch.tensor(second))
    served.run()
    assert [int(token) for token in served.finished[1].prompt_tokens] == first
    served.send(first)
    served.check()
