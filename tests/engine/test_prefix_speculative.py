"""Speculative decoding with the cache: answers are as without drafts, and no rejected token is ever resumed from.

Drafts are forced, so that the test decides how many of them (0 to k) are accepted, also across a block boundary.
"""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.defect_helpers import WrongAnswer, defect, make_side
from tests.harness.drafts import Drafting, forced_drafts
from tests.harness.engine_helpers import assert_matches, random_tokens, run_to_end
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, known_answer, tokens
from tests.harness.mutants import MUTANTS, mutated_resume
from tests.harness.named_models import YARN, named
from tests.harness.selection import mostly_slow_rows

CASES = [(1, "legacy"), (2, "async"), (3, "legacy"), (3, "async")]
ACCEPTED = [
    *(("tiny-mtp", {}, *case, range(1, 6)) for case in CASES),
    (
        "tiny-gdn-mtp",
        {},
        3,
        "async",
        range(2, 4),
    ),  # beside Mamba2: the states of both go back to the last accepted token
    ("tiny-nemotron-3", {}, 3, "async", range(2, 4)),  # one head of attention and latent experts drafts three tokens
    # Gated attention, YaRN and experts, in the layers that draft, too.
    ("tiny-qwen3-next", {"mtp_num_layers": 2, "mtp_layer_pattern": "*E", **YARN}, 2, "async", range(2, 3)),
    # A Mamba2 layer that drafts keeps no state; the states of the cache are those of the other layers.
    ("tiny", {"mtp_num_layers": 2, "mtp_layer_pattern": "M-"}, 2, "async", range(2, 3)),
]


@pytest.mark.parametrize(
    ("name", "fields", "drafts", "mode", "tokens_before_end"), mostly_slow_rows(ACCEPTED, *ACCEPTED[3:])
)
def test_every_number_of_accepted_drafts_around_a_blocks_end(platform, name, fields, drafts, mode, tokens_before_end):
    model = build_hybrid_model(get_preset(name, **fields) if fields else named(name), seed=0, platform=platform)
    check_accepted_drafts(model, drafts, mode, tokens_before_end)


def check_accepted_drafts(model, drafts, mode, tokens_before_end):
    served = Drafting(model, drafts, lambda *_: 0, async_sched_mode=mode)
    shared = tokens(2, 0, seed=1)
    served.ask(shared + random_tokens(5, seed=2))
    served.run()
    forwards = {}
    for accepted in range(drafts + 1):
        served.accepted, served.drafted = lambda *_, accepted=accepted: accepted, []
        for before_end in tokens_before_end:  # the answer begins so many tokens before a block's end
            number = served.ask(shared + tokens(1, -before_end, seed=before_end))
            served.run()
            assert served.finished[number].num_cached_tokens == len(shared)
        forwards[accepted] = len(served.drafted)
        assert max(served.drafted) == accepted
    # Each forward gives one token more than drafts were right.
    assert all(forwards[more] < forwards[more - 1] for more in range(1, drafts + 1)), forwards
    served.finish()


MIXED = [
    *(("tiny_mtp", "legacy", None), ("tiny_mtp", "async", None), ("tiny_gdn_mtp", "legacy", None)),
    *((name, "async", mutant) for name in ("tiny_mtp", "tiny_gdp_mtp") for mutant in MUTANTS),
    ("tiny_gdp_mtp", "async", None),
]


@pytest.mark.parametrize(("name", "mode", "mutant"), mostly_slow_rows(MIXED, MIXED[2], MIXED[3]))
def test_mixed_acceptance_in_one_batch_and_the_next_turn(request, name, mode, mutant):
    model = request.getfixturevalue(name)
    served = Drafting(model, 3, lambda request_id, position: (request_id * 7 + position) % 4, async_sched_mode=mode)
    served.ask(tokens(6, 1, seed=999), 1)  # a state of another depth, for the mutant
    served.run()
    prompts = [tokens(1, 2 + 17 * number, seed=number) for number in range(4)]
    first = [served.ask(prompt, 70) for prompt in prompts]
    served.run()
    with mutated_resume(served.engine, mutant):
        turns = [
            served.ask(prompt + list(served.finished[number].generated_tokens) + [5, 6, 7])
            for prompt, number in zip(prompts, first, strict=True)
        ]
        served.run()
    served.check(*first)
    for number, prompt in zip(turns, prompts, strict=True):
        request = served.finished[number]
        assert request.num_cached_tokens >= len(prompt) // BLOCK * BLOCK > 0
        if mutant is None:
            served.check(number)
        else:
            with pytest.raises(AssertionError):
                assert_matches(served.reference, request)
    served.check_drained()


FITS = [*((32, *case) for case in CASES), (None, 2, "async")]


@pytest.mark.parametrize(("slots", "drafts", "mode"), mostly_slow_rows(FITS, FITS[1]))
def test_requests_that_just_fit(tiny_mtp, slots, drafts, mode):
    """Their last drafts lie past their end, and past all blocks. Every number of them is right once in short answers."""
    served = Drafting(tiny_mtp, drafts, slots=slots, async_sched_mode=mode, blocks=2)
    for count in (1, 4, 40, 2 * BLOCK - 1):
        for accepted in range(drafts + 1) if count <= 40 else (0, drafts):
            served.accepted = lambda *_, accepted=accepted: accepted
            number = served.ask(random_tokens(2 * BLOCK - count, seed=count), count, cache_salt=str(accepted))
            served.run()
            served.check(number)
            served.check_drained()


def test_several_requests_that_just_fit(tiny_mtp):
    """Together they have no block to spare; one is preempted, another one still computes its prompt."""
    fields = {"blocks": 4, "enable_chunked_prefill": True, "max_tokens": 70}
    served = Drafting(tiny_mtp, 3, lambda request_id, position: (position + request_id) % 4, **fields)
    for count in (40, 30, 9, 3):
        served.ask(random_tokens(2 * BLOCK - count, seed=count), count)
    served.finish()


def test_rejected_tokens_are_never_matched(tiny_mtp):
    """A prompt that continues with rejected drafts only shares what was really computed."""
    served = Drafting(tiny_mtp, 3, lambda *_: 0)
    prompt = tokens(2, -2, seed=3)
    number = served.ask(prompt)
    served.run()
    wrong = [(token + 1) % 512 for token in served.truth[number][len(prompt) + 1 :]]
    base = served.truth[number][: len(prompt) + 1]
    again = served.ask(base + wrong + [1], 4)
    served.run()
    assert served.finished[again].num_cached_tokens == BLOCK
    served.check()


@pytest.fixture
def side(request, tiny_mtp):
    yield from make_side(request, tiny_mtp)


@defect(29, raises=WrongAnswer)
def test_29_prefill_in_a_row_whose_drafts_were_accepted(side):
    """Also with caching off: only legacy scheduling clears the rows of accepted drafts."""
    plain = EngineHarness(side.model, slots=None)
    prompts = {number: random_tokens(40 + number, seed=number) for number in (1, 2, 3)}
    counts = {1: 60, 2: 8, 3: 8}
    truth = {n: prompt + list(plain.send(prompt, count=counts[n]).generated_tokens) for n, prompt in prompts.items()}
    engine = side.build(num_speculative_tokens=3, async_sched_mode="async")
    finished: dict = {}
    with forced_drafts(engine, truth, lambda request_id, position: 3):
        for number in (1, 2):
            side.add(engine, prompts[number], counts[number])
        while 2 not in finished:
            run_to_end(engine, finished, steps=1)
        assert side.add(engine, prompts[3], counts[3]) == 3  # beside the first one, in the second one's row
        run_to_end(engine, finished)
    check_tokens(side, finished, truth)


@defect(30, raises=WrongAnswer)
def test_30_resumed_where_another_one_is_evicted(side):
    """Also with caching off. Both requests need a block in the same step, and one block is left.

    Megatron remembers the last block of each row, for tokens before a block boundary. Then it evicts the first row, and
    the second request moves into that row. Its tokens are written into the first request's block.
    """
    plain = EngineHarness(side.model, slots=None)
    prompts = {number: random_tokens(BLOCK - 2, seed=number) for number in (1, 2)}
    truth = {n: prompt + list(plain.send(prompt, count=40).generated_tokens) for n, prompt in prompts.items()}
    engine = side.build(
        slots=0, num_speculative_tokens=2, async_sched_mode="async", blocks=3, block_size_tokens=BLOCK, max_requests=2
    )
    finished: dict = {}
    with forced_drafts(engine, truth, lambda request_id, position: 0):
        for prompt in prompts.values():
            side.add(engine, prompt, 40)
        run_to_end(engine, finished)
    assert side.ours or engine.evicted_request_count > 0  # ours has room for both: it keeps no states of drafts
    check_tokens(side, finished, truth)


@defect(33)
def test_33_drafts_past_the_end_of_a_request_that_just_fits(side):
    """Also with caching off: with two blocks of 64 tokens, a prompt of 124 and 4 tokens to generate.

    Megatron-core 0.19 fails in a step; later ones refuse the request.
    """
    prompt = random_tokens(2 * BLOCK - 4, seed=1)
    truth = {1: prompt + known_answer(EngineHarness(side.model, slots=None), prompt, 4)}
    engine = side.build(
        slots=0, num_speculative_tokens=2, async_sched_mode="async", blocks=2, block_size_tokens=BLOCK, max_requests=2
    )
    finished: dict = {}
    with forced_drafts(engine, truth, lambda request_id, position: 0):
        side.add(engine, prompt, 4)
        run_to_end(engine, finished)
    check_tokens(side, finished, truth)


def check_tokens(side, finished, truth):
    """Checks that all requests are answered, as without drafts, with the reference's log-probs."""
    assert finished.keys() == truth.keys()
    for number, request in finished.items():
        if [int(token) for token in request.prompt_tokens] + list(request.generated_tokens) != truth[number]:
            raise WrongAnswer(f"request {number}")
    side.check(*finished.values())
