"""Bad requests are refused when they arrive, with an error that names what is wrong, and the running ones go on.

``MHP_BAD_REQUESTS`` is the number of bad requests of the fuzz (200 unless set).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.errors import RequestDroppedError
from megatron_hybrid_prefix.mcore import HybridPrefixController, HybridPrefixEngine
from megatron_hybrid_prefix.upstream.names import (
    DynamicInferenceContext,
    GPTInferenceWrapper,
    SamplingParams,
    TextGenerationController,
)
from tests.harness.bad_requests import BAD, BLOCK, COUNT, LIMIT_TOKENS, Asked, fuzz, good_requests, params
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end
from tests.harness.lifecycle_helpers import MODES, EngineHarness, IdTokenizer, tokens
from tests.harness.limits import HANG_S

CACHE = HybridPrefixConfig(mamba_gb=0.01)
GOOD = good_requests()
LONG = Asked(random_tokens(90, seed=3), {"num_tokens_to_generate": 20})


def build(model: Any, prefix: HybridPrefixConfig | None = CACHE, **fields: Any) -> Any:
    sizes = {"max_sequence_length": LIMIT_TOKENS, "max_requests": 4, "max_tokens": LIMIT_TOKENS, "buffer_size_gb": 0.01}
    return build_engine(model, prefix, **sizes | {"block_size_tokens": BLOCK} | fields)


def on_megatrons_context(model: Any) -> Any:
    """This package's engine and controller around megatron's own context."""
    context = DynamicInferenceContext(model.config, build(model, None).context.config)
    wrapper = GPTInferenceWrapper(model, context)
    wrapper.prep_model_for_inference()
    controller = HybridPrefixController(inference_wrapped_model=wrapper, tokenizer=build(model).controller.tokenizer)
    return HybridPrefixEngine(controller, context)


BUILDS: dict[str, Callable[[Any], Any]] = {
    **{mode: lambda model, mode=mode: build(model, async_sched_mode=mode) for mode in MODES},
    "chunks": lambda model: build(model, enable_chunked_prefill=True, max_tokens=64),
    "without a cache": lambda model: build(model, None),
    "megatron's context": on_megatrons_context,
}


def send(engine: Any, request_id: int, asked: Asked) -> Any:
    return engine.add_request(request_id, asked.prompt, params(asked.fields))


def caches(engine: Any) -> bool:
    return getattr(engine.context, "prefix_cache", None) is not None


def answer(engine: Any, asked: Asked) -> list[int]:
    """A request's answer, alone."""
    finished: dict[int, Any] = {}
    send(engine, 0, asked)
    run_to_end(engine, finished)
    return list(finished[0].generated_tokens)


@pytest.fixture(scope="module")
def alone(tiny):
    """The answers of the good requests, and of the long one: each alone, without a cache."""
    engine = build(tiny, None)
    return [answer(engine, asked) for asked in GOOD], answer(engine, LONG)


def test_each_is_refused_at_once_and_names_what_is_wrong(model, alone):
    engine, finished = build(model), {}
    send(engine, 0, LONG)
    run_to_end(engine, finished, steps=2)
    for name, asked in BAD.items():
        with pytest.raises(ValueError, match=asked.named) as error:
            send(engine, 1, asked)
        assert str(error.value).startswith("request 1: ") and "\n" not in str(error.value), name
        assert list(engine.requests) == [0], name
    run_to_end(engine, finished)
    assert finished[0].generated_tokens == alone[1]
    assert answer(engine, GOOD[3]) == alone[0][3], "and so does the next"


@pytest.mark.parametrize("kind", BUILDS)
def test_fuzz_of_bad_requests_among_good_ones(model, alone, kind):
    """Every good one answers as alone."""
    engine, finished, sent = BUILDS[kind](model), {}, {}
    share = {"legacy": 1, "async": 1}.get(kind, 4)
    for name, number, asked in fuzz(COUNT // share, seed=len(kind)):
        request_id = len(sent)
        if name is None:
            send(engine, request_id, asked)
            sent[request_id] = number
            run_to_end(engine, finished, steps=number % 3)
        elif asked.fields.keys().isdisjoint(
            ("cache_breakpoints", "cache_session", "cache_uses", "cache_pin", "cache_ttls")
        ) or caches(engine):
            with pytest.raises(ValueError, match=asked.named):
                send(engine, request_id, asked)
    run_to_end(engine, finished)
    assert {request_id: alone[0][number] for request_id, number in sent.items()} == {
        request_id: request.generated_tokens for request_id, request in finished.items()
    }
    assert not engine.requests and not engine.has_unfinished_requests()


# -- what is valid -----------------------------------------------------------------------------------------------------


def test_what_is_greedy_with_any_other_field(model, alone):
    engine = build(model)
    for fields in ({"top_k": 0}, {"top_k": 9}, {"top_p": 0.4, "top_k": 0}, {"top_p": 0.4, "top_k": 9}):
        for own in ({"temperature": 0}, {"temperature": 1e-45}, {"temperature": 1e-5}, {"top_p": 1e-300}):
            assert answer(engine, LONG._replace(fields=LONG.fields | fields | own)) == alone[1]


def test_top_k_with_top_p_is_sampled_as_the_options_say(model, alone):
    fields = {"top_k": 20, "top_p": 0.8, "temperature": 1.5}
    answers = []
    for own in (fields, {"sampling_options": fields}, {"top_k": 2, "top_p": 0.1, "sampling_options": fields}):
        answers.append(answer(build(model), LONG._replace(fields=LONG.fields | own)))
    assert answers[0] == answers[1] == answers[2] != alone[1]


def test_what_megatrons_controller_cannot_sample_is_refused(model):
    """It would assert in a step."""
    plain = build(model)
    controller = TextGenerationController(plain.controller.inference_wrapped_model, plain.controller.tokenizer)
    engine = HybridPrefixEngine(controller, plain.context)
    for fields in ({"top_k": 9, "top_p": 0.5}, {"sampling_options": {"seed": 3}}):
        with pytest.raises(ValueError, match="top_k with top_p, do not work with megatron's own controller"):
            send(engine, 0, LONG._replace(fields=LONG.fields | fields))
    # What megatron can sample is no such option.
    for fields in ({"temperature": 0, "top_k": 9, "top_p": 0.5}, {"sampling_options": {"temperature": 0.0}}):
        assert len(answer(engine, LONG._replace(fields=LONG.fields | fields))) == 20


def test_penalties_with_drafts_are_refused(tiny_mtp):
    """A draft changes the penalties of what follows it."""
    engine = build(tiny_mtp, num_speculative_tokens=1)
    for penalty in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        with pytest.raises(ValueError, match=f"{penalty}=1.5 does not go with num_speculative_tokens=1$"):
            send(engine, 0, LONG._replace(fields=LONG.fields | {"sampling_options": {penalty: 1.5}}))


def test_prompts_of_any_kind_of_integers(model, alone):
    ids, engine = torch.tensor(LONG.prompt), build(model)
    for prompt in (tuple(LONG.prompt), ids.int().numpy(), list(ids.numpy()), ids.to(torch.int16), ids):
        assert answer(engine, LONG._replace(prompt=prompt)) == alone[1]
    for prompt in (np.array([1.0]), np.array([[1]]), torch.tensor([True]), np.array(["a"]), torch.zeros(3)):
        with pytest.raises(ValueError, match="a prompt of shape"):
            engine.add_request(0, prompt, greedy(3))
    assert engine.context.prefix_stats().reused_tokens == 4 * BLOCK


def test_without_parameters_it_gets_megatrons_defaults(model):
    engine = build(model)
    engine.add_request(0, [1, 2, 3])
    assert engine.get_request(0).sampling_params.num_tokens_to_generate == LIMIT_TOKENS - 3
    for wrong in ({"top_k": 1}, 7):
        with pytest.raises(ValueError, match="must be megatron's SamplingParams"):
            engine.add_request(1, [1, 2, 3], wrong)


def test_parameters_of_a_subclass_survive_a_preemption(model):
    """Megatron makes a preempted request's parameters anew, with the fields of the class."""

    @dataclass
    class Mine(SamplingParams):
        cache_salt: str = "mine"

    engine = build(model)
    engine.add_request(0, LONG.prompt, Mine(num_tokens_to_generate=5, top_k=1, termination_id=-1))
    engine.requests[0].record.checkpoint()
    assert engine.get_request(0).sampling_params.cache_salt == "mine"


@pytest.mark.parametrize("hashes", [{}, {"precomputed_block_hashes": [7]}], ids=["", "hashes"])
def test_hashes_of_others_are_not_used_and_images_are_refused(model, hashes):
    """Megatron's engine takes both since 0.20."""
    served = EngineHarness(model)
    with pytest.raises(ValueError, match=r"^request 1: imgs: this engine takes text; [^\n]*$"):
        served.engine.add_request(1, tokens(1, 5, seed=1), greedy(2), **hashes, imgs=torch.zeros(1), num_tiles=None)
    served.engine.add_request(1, tokens(1, 5, seed=1), greedy(2), **hashes)
    served.run()
    served.check()


def test_text_that_cannot_be_tokenized(model):
    engine = build(model, tokenizer=IdTokenizer())
    for prompt, fields, named in (
        ("five", {}, "prompt: 'five' cannot be tokenized"),
        ("5 900", {}, "token 900"),
        ("5", {"add_BOS": True}, "prompt: '5' cannot be tokenized"),
        ("5", {"stop_words": ["six"]}, "stop_words: 'six' cannot be tokenized"),
        ("5", {"stop_words": ["7 512"]}, "stop_words has token 512"),
        ("5", {"stop_words": [" "]}, "stop_words: ' ' has no tokens"),
    ):
        with pytest.raises(ValueError, match=named):
            send(engine, 0, Asked(prompt, fields))
    assert not engine.requests


# Fields, and how many tokens follow a prompt of one token less than the longest, of the longest and of one more; None: it fails.
LONGEST: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "some tokens": ({"num_tokens_to_generate": 5, "skip_prompt_log_probs": False}, [1, None, None]),
    "all that fit": ({"num_tokens_to_generate": None}, [1, None, None]),
    "log-probs alone": ({"num_tokens_to_generate": 0, "skip_prompt_log_probs": False}, [0, 0, None]),
}


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("kind", LONGEST)
def test_a_prompt_without_room_for_an_answer_is_returned_as_failed(tiny_mtp, kind, drafts):
    """Callers rely on that: the server, `run_batch` and megatron's own scripts."""
    fields, counts = LONGEST[kind]
    engine = build(tiny_mtp, num_speculative_tokens=drafts, materialize_only_last_token_logits=False)
    finished: dict[int, Any] = {}
    for number, count in enumerate(counts):
        length = LIMIT_TOKENS - 1 + number
        future = send(engine, number, Asked(random_tokens(length, seed=1), fields))
        run_to_end(engine, finished)
        request = finished[number]
        assert request.failed() == future.result().merge().failed() == (count is None)
        assert len(request.generated_tokens) == (count or 0) and (
            count != 0 or len(request.prompt_log_probs) == length - 1
        )
        if length == LIMIT_TOKENS and count is None:
            assert "no room to generate in max_sequence_length=256" in str([event.payload for event in request.events])


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_id_that_is_in_use_is_refused_until_it_is_returned(model, alone, mode):
    engine, finished = build(model, async_sched_mode=mode), {}
    first = send(engine, 5, LONG)

    def refused(number: int) -> None:
        with pytest.raises(ValueError, match=f"request {number}: this id is in use"):
            send(engine, number, GOOD[2])

    refused(5)
    run_to_end(engine, finished, steps=3)
    refused(5)
    send(engine, 6, LONG)
    run_to_end(engine, finished, steps=2)
    engine.abort_request(6)
    refused(6)
    run_to_end(engine, finished)
    assert finished[5].generated_tokens == alone[1] and first.result().merge().generated_tokens == alone[1]
    assert len(finished[6].generated_tokens) < 20
    for number in (5, 6):
        send(engine, number, GOOD[2])
    run_to_end(engine, finished)
    assert finished[5].generated_tokens == finished[6].generated_tokens == alone[0][2]


def test_ids_of_a_wrong_kind_are_refused(model):
    engine = build(model)
    for wrong in (-1, 2**31, "a", None, 1.5, True):
        with pytest.raises(ValueError, match="request_id="):
            send(engine, wrong, GOOD[0])
    assert not engine.requests


def test_generate_takes_ids_that_nobody_has_and_returns_its_own_answers(model, alone):
    engine, finished = build(model), {}
    own = send(engine, 0, LONG)
    send(engine, 2, LONG)
    texts = [GOOD[number].prompt for number in (2, 4)]
    sampling = greedy(4)
    records = engine.generate(texts, sampling)
    assert [record.merge().generated_tokens for record in records] == [alone[0][2][:4], alone[0][4][:4]]
    run_to_end(engine, finished)
    assert own.result().merge().generated_tokens == alone[1]
    assert sampling == greedy(4), "the caller's parameters stay"


def test_generate_runs_all_prompts_or_none(model):
    engine = build(model)
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate([[1, 2], []], greedy(3))
    assert not engine.requests and not engine.has_unfinished_requests()
    assert len(engine.generate([[1, 2]], greedy(3))) == 1
    assert engine.generate([], greedy(3)) == []


# -- futures -----------------------------------------------------------------------------------------------------------


def test_a_reset_resolves_all_futures(model, alone):
    engine = build(model)
    futures = [send(engine, number, LONG) for number in range(6)]  # two of them wait
    run_to_end(engine, {}, steps=3)
    engine.abort_request(0)
    engine.reset()
    for number, future in enumerate(futures):
        with pytest.raises(RequestDroppedError, match=f"request {number}: the engine was reset"):
            future.result()
    assert answer(engine, LONG) == alone[1]


def test_a_cancelled_future_stops_nobody(model, alone):
    """As `asyncio.wait_for` leaves one behind."""
    engine, finished = build(model), {}
    futures = [send(engine, number, LONG) for number in range(2)]
    run_to_end(engine, finished, steps=2)
    futures[0].cancel()
    run_to_end(engine, finished)
    assert [finished[number].generated_tokens for number in range(2)] == [alone[1]] * 2
    assert futures[1].result().merge().generated_tokens == alone[1]


def in_a_loop(serve: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(serve, timeout=HANG_S))


async def answers_again(engine: Any, expected: list[int]) -> None:
    """A new loop of an engine that was reset."""
    engine.reset()
    future = send(engine, 0, LONG)
    again = asyncio.create_task(engine.run_engine())
    assert (await future).merge().generated_tokens == expected
    again.cancel()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("said", ["a step failed: ZeroDivisionError", "cancelled"])
def test_a_step_that_does_not_end_ends_the_loop_and_resolves_all_futures(model, alone, monkeypatch, said):
    """If it was cancelled, megatron's loop returns as if it had ended well."""

    async def serve() -> None:
        engine = build(model)
        futures = [send(engine, number, LONG) for number in range(6)]  # two of them wait
        if said != "cancelled":
            monkeypatch.setattr(engine, "post_process_requests", lambda *args, **kwargs: 1 / 0)
        running = asyncio.create_task(engine.run_engine())
        if said == "cancelled":
            while engine.step_began_s is None:
                await asyncio.sleep(0)  # up to the point in a step where others may run
            running.cancel()
        for future in futures:
            with pytest.raises(RequestDroppedError, match=said):
                await future
        (error,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(error, ZeroDivisionError) or said == "cancelled"
        monkeypatch.undo()
        await answers_again(engine, alone[1])

    in_a_loop(serve())


def test_a_loop_that_waits_goes_on_after_a_reset_while_suspended(model, alone):
    async def serve() -> None:
        engine = build(model)
        running = asyncio.create_task(engine.run_engine())
        for _ in range(3):
            await asyncio.sleep(0)  # it waits for requests now
        engine.suspend()
        engine.reset()
        engine.resume()
        future = send(engine, 0, LONG)
        async with engine._cond:
            engine._cond.notify_all()  # as megatron does when a request comes from a coordinator
        assert (await future).merge().generated_tokens == alone[1]
        running.cancel()

    in_a_loop(serve())


def test_a_tokenizer_that_cannot_say_what_was_refused_leaves_nothing(model, alone, monkeypatch):
    """Megatron notes a refused request before it looks at its text."""
    engine = build(model)
    first = send(engine, 0, LONG)
    monkeypatch.setattr(engine, "refuse_request", lambda number: (engine.failed_request_ids.append(number), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        send(engine, 1, Asked(random_tokens(LIMIT_TOKENS + 9, seed=1)))
    monkeypatch.undo()
    finished: dict[int, Any] = {}
    run_to_end(engine, finished)
    assert list(finished) == [0] and first.done() and list(finished[0].generated_tokens) == alone[1]


def test_generate_ends_if_the_engine_is_reset_meanwhile(model):
    engine = build(model)
    engine.on_step = engine.reset
    with pytest.raises(RequestDroppedError, match="reset"):
        engine.generate([LONG.prompt], params(LONG.fields))


def test_the_whole_length_may_be_that_of_the_prompt_if_its_log_probs_are_wanted(model):
    engine = build(model, materialize_only_last_token_logits=False)
    fields = {"num_tokens_to_generate": None, "num_tokens_total": 9, "skip_prompt_log_probs": False}
    finished: dict[int, Any] = {}
    send(engine, 0, Asked(list(range(9)), fields))
    run_to_end(engine, finished)
    assert not finished[0].generated_tokens and len(finished[0].prompt_log_probs) == 8
    with pytest.raises(ValueError, match="num_tokens_total=8 leaves nothing"):
        send(engine, 1, Asked(list(range(9)), fields | {"num_tokens_total": 8}))
