"""An answer ends at its first end token: ``termination_id`` or one of ``stop_token_ids``, sampled or an accepted draft."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.mcore.engine.sampling import end_tokens_of, reject_ends
from megatron_hybrid_prefix.sampling import SamplingOptions
from tests.harness.defect_helpers import WrongAnswer, defect, make_side
from tests.harness.drafts import Drafting, forced_drafts
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end
from tests.harness.lifecycle_helpers import MODES, EngineHarness, IdTokenizer, known_answer, tokens
from tests.harness.selection import mostly_slow_rows

COUNT = 10
NEVER = 511  # an end token that hardly any answer here has


def ways(token: int) -> list[dict]:
    """Sampling parameters and attributes of a request that ends at this token."""
    return [
        {"params": {"termination_id": token}},
        {"stop_token_ids": [token]},
        {"params": {"termination_id": NEVER}, "stop_token_ids": [NEVER - 1, token]},
        {"params": {"termination_id": token}, "stop_token_ids": [NEVER]},
    ]


def cut(answer: list[int], ends: set[int]) -> list[int]:
    """The answer up to its first end token."""
    places = [place for place, token in enumerate(answer) if token in ends]
    return answer[: places[0] + 1] if places else answer


def different(answer: list[int]) -> list[int]:
    """Its tokens, without repetition: an answer ends at the first place of each."""
    return list(dict.fromkeys(answer))


class Ending(Drafting):
    """An engine that is asked for answers with end tokens; all drafts are right."""

    def __init__(self, model, drafts: int, **fields) -> None:
        super().__init__(model, drafts, **fields)
        self.ends: dict[int, set[int]] = {}

    def ask(self, prompt: list[int], count: int = COUNT, **way) -> int:
        number = super().ask(prompt, count, **way)
        self.ends[number] = {way.get("params", {}).get("termination_id", -1), *way.get("stop_token_ids", [])}
        return number

    def check_ends(self, *numbers: int) -> None:
        for number in numbers:
            request = self.finished[number]
            right = cut(self.truth[number][len(request.prompt_tokens) :], self.ends[number])
            assert list(request.generated_tokens) == right
            assert request.generated_length == len(right) == len(request.generated_log_probs)
            request.sampling_params.num_tokens_to_generate = len(right)
            self.check(number)


CASES = [(0, "legacy"), (0, "async"), (1, "async"), (2, "legacy"), (3, "legacy"), (3, "async")]
EXACT = (0, "async", {"exact": "bits"})


@pytest.mark.parametrize(
    ("drafts", "mode", "fields"),
    mostly_slow_rows([*((*case, {}) for case in CASES), EXACT], (0, "legacy", {}), (3, "async", {}), EXACT),
)
def test_every_position_of_the_end(tiny_mtp, drafts, mode, fields):
    served = Ending(tiny_mtp, drafts, async_sched_mode=mode, **fields)
    prompt = tokens(1, -3, seed=drafts)  # the end lies before, at and after the end of a block
    firsts = different(known_answer(served.plain, prompt, COUNT))
    assert len(firsts) > 5
    for token in firsts:
        numbers = [served.ask(prompt, **way) for way in ways(token)]
        served.run()
        served.check_ends(*numbers)
    served.check_drained()


def test_nothing_after_the_end_is_cached(tiny_mtp):
    """The end is in the middle of accepted drafts, and they reach into the next block."""
    served = Ending(tiny_mtp, 3, async_sched_mode="async", decode_checkpoints=True)
    for before in (1, 2, 3):
        prompt = tokens(1, -8, seed=before)
        answer = known_answer(served.plain, prompt, 20)
        end = answer[8 - before]  # its position in the block: BLOCK - before
        assert end not in answer[: 8 - before]
        number = served.ask(prompt, 20, **ways(end)[0])
        served.run()
        served.check_ends(number)
        # Its state was never computed, or lies in the middle of the block.
        again = served.ask(prompt + answer + [1, 2, 3], 2)
        served.run()
        assert served.finished[again].num_cached_tokens == 0
        served.check(again)


def test_top_log_probs_end_with_the_answer(tiny_mtp):
    served = Ending(tiny_mtp, 3)
    prompt = tokens(0, 30, seed=4)
    end = different(known_answer(served.plain, prompt, COUNT))[3]
    fields = {"termination_id": end, "top_n_logprobs": 2, "return_prompt_top_n_logprobs": False}
    number = served.ask(prompt, params=fields)
    served.run()
    served.check_ends(number)
    assert len(served.finished[number].generated_top_n_logprobs) == len(served.finished[number].generated_tokens)


@pytest.mark.parametrize("mode", MODES)
def test_no_step_shows_a_token_after_the_end(tiny_mtp, mode):
    """A stream sends what a request has after each step."""
    served = Ending(tiny_mtp, 3, async_sched_mode=mode)
    prompt = tokens(0, 30, seed=4)
    answer = known_answer(served.plain, prompt, COUNT)
    end = different(answer)[5]
    number = served.ask(prompt, **ways(end)[1])
    shown: list[list[int]] = []

    def stream() -> None:
        entry = served.engine.requests.get(number)
        shown.append(list(entry.record[-1].generated_tokens) if entry is not None else [])

    served.engine.on_step = stream
    served.run()
    right = cut(answer, {end})
    assert any(shown) and all(tokens == right[: len(tokens)] for tokens in shown)
    served.check_ends(number)


def test_a_request_with_an_id_of_before_has_its_own_end_tokens(tiny_mtp):
    served = Ending(tiny_mtp, 2)
    prompt = tokens(0, 20, seed=1)
    first, second = different(known_answer(served.plain, prompt, COUNT))[1:3]
    for token in (first, second, NEVER):
        served.next_id = 0
        number = served.ask(prompt, stop_token_ids=[token])
        served.run()
        served.check_ends(number)


@pytest.mark.parametrize(("drafts", "mode"), mostly_slow_rows(CASES, (0, "async"), (3, "async")))
def test_no_end_before_min_tokens(tiny_mtp, drafts, mode):
    """Drafts are right but for what is barred; each token is the likeliest of those that are not barred."""
    served = Ending(tiny_mtp, drafts, async_sched_mode=mode)
    prompt = tokens(1, -3, seed=drafts)
    plain = known_answer(served.plain, prompt, COUNT)
    ends = plain[4:9:2]
    numbers = {
        served.ask(prompt, sampling_options={"temperature": 0.0, "min_tokens": least}, stop_token_ids=ends): least
        for least in range(COUNT + 1)
    }
    served.run()
    for number, least in numbers.items():
        answer = list(served.finished[number].generated_tokens)
        assert len(served.finished[number].generated_log_probs) == len(answer)
        logits = served.reference.logits(prompt + answer)[len(prompt) - 1 :]
        for place, (token, scores) in enumerate(zip(answer, logits, strict=False)):
            if place < least:
                scores[ends] = float("-inf")
            assert scores[token] >= scores.max() - 1e-4
            assert token not in ends or (place >= least and place == len(answer) - 1)
    assert not drafts or served.engine._spec_tokens_accepted_per_pos.sum() > 0
    served.check_drained()


@pytest.mark.parametrize("mode", MODES)
def test_processed_log_probs_know_what_is_barred(tiny, mode):
    """They are those of the distribution that is sampled from; the end tokens in the prompt keep theirs."""
    served = EngineHarness(
        tiny, async_sched_mode=mode, logprobs_mode="processed_logprobs", materialize_only_last_token_logits=False
    )
    prompt, ends = tokens(1, 5, seed=3), [7, 9]
    prompt[5:7] = ends
    options = {"seed": 1, "min_tokens": 3, "logit_bias": [[7, 90.0], [9, 90.0]]}
    fields = {"skip_prompt_log_probs": False}
    number = served.add(prompt, 8, params=fields, stop_token_ids=ends, sampling_options=options)
    served.run()
    request = served.finished[number]
    answer = list(request.generated_tokens)
    assert len(answer) == 4 and answer[3] in ends and not {*ends} & {*answer[:3]}
    logits = served.reference.logits(prompt + answer)
    logits[:, ends] += 90
    logits[len(prompt) - 1 : len(prompt) + 2, ends] = float("-inf")
    right = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt + answer)[1:, None]).squeeze(1)
    found = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs], dtype=torch.float64)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=0)


def test_min_tokens_and_stop_words_exclude_each_other(tiny):
    served = EngineHarness(tiny, tokenizer=IdTokenizer())
    with pytest.raises(ValueError, match="min_tokens does not go with stop_words"):
        served.add([1, 2], params={"stop_words": ["5"]}, sampling_options={"min_tokens": 1})
    with pytest.raises(ValueError, match="no token is left to sample"):
        served.add([1, 2], stop_token_ids=list(range(512)), sampling_options={"min_tokens": 1})
    assert SamplingOptions(top_k=5, min_tokens=2).as_fields()["top_k"] == 5, "megatron's, for what comes later"


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({"termination_id": -1}, ()), ({"termination_id": 5}, (5,)), ({"stop_token_ids": [7, 5, 7]}, (5, 7)), ({}, (5,))],
)
def test_end_tokens_of_a_request(fields, ends):
    params = greedy(1, termination_id=fields.pop("termination_id", 5))
    params.add_attributes(fields)
    assert end_tokens_of(params) == ends


def test_rejected_drafts_at_random():
    """Against a loop over rows and drafts."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        rows, width = (int(torch.randint(1, high, (1,), generator=generator)) for high in (5, 6))
        drafts = torch.randint(0, 6, (rows, width), generator=generator)
        most = int(torch.randint(0, 4, (1,), generator=generator))
        ends = [
            tuple(torch.randint(0, 9, (row % (most + 1),), generator=generator).tolist()) for row in range(1, rows + 1)
        ]
        right = [
            [-1 if token in own else token for token in row] for row, own in zip(drafts.tolist(), ends, strict=True)
        ]
        reject_ends(drafts, ends)
        assert drafts.tolist() == right


@pytest.fixture
def side(request, tiny_mtp):
    yield from make_side(request, tiny_mtp)


@defect(32, raises=WrongAnswer)
def test_32_end_token_among_accepted_drafts(side):
    prompt = random_tokens(20, seed=1)
    answer = known_answer(EngineHarness(side.model, slots=None), prompt, COUNT)
    engine = side.build(num_speculative_tokens=3, async_sched_mode="async")
    for place, token in enumerate(answer):
        if token in answer[:place]:
            continue
        finished: dict = {}
        number = side.add(engine, prompt, COUNT, termination_id=token)
        with forced_drafts(engine, {number: prompt + answer}, lambda request_id, position: 3):
            run_to_end(engine, finished)
        if list(finished[number].generated_tokens) != answer[: place + 1]:
            raise WrongAnswer(f"end at {place}: {finished[number].generated_tokens} in place of {answer[: place + 1]}")
