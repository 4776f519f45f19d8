"""Answers with the cache equal those without it: greedy tokens and log-probs against a float64 recompute.

Every scenario also runs with mutants: the restored SSM state is zeroed, the restored convolution state is zeroed, or a
state of another depth is used. Then each request that resumed must be wrong. So a scenario that compares nothing cannot
pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.engine_helpers import assert_matches, random_tokens
from tests.harness.gpt_model import as_gpt_model
from tests.harness.lifecycle_helpers import MODES, EngineHarness
from tests.harness.mutants import MUTANTS, mutated_resume
from tests.harness.selection import mostly_slow

NEW_TOKENS = 2  # one of the prefill, one of a decode


class Session(EngineHarness):
    """An engine with a state of another depth, for the mutant.

    Requests that resumed from the cache must be wrong under a mutant, and all others right.
    """

    def __init__(self, model: Any, block_size_tokens: int, **fields: Any) -> None:
        fields = {"max_sequence_length": 2048, "max_tokens": 2048, "max_requests": 8} | fields
        super().__init__(model, block_size_tokens=block_size_tokens, **fields)
        self.block = block_size_tokens
        self.send(random_tokens(5 * self.block + 1, seed=999), cache_salt="a state of another depth, for the mutant")

    def send(self, *prompts: list[int], count: int = NEW_TOKENS, **attributes: Any) -> Any:
        return super().send(*prompts, count=count, **attributes)

    def check_mutant(self, mutant: str | None) -> None:
        """Checks that all answers are right. Under a mutant, all answers of requests that resumed must be wrong."""
        resumed = {number for number, request in self.finished.items() if request.num_cached_tokens}
        assert resumed, "nothing resumed: the scenario says nothing"
        reference = self.reference
        for number in resumed if mutant is not None else ():
            with pytest.raises(AssertionError):
                assert_matches(reference, self.finished[number])
        self.check(*(self.finished.keys() - resumed if mutant is not None else ()))


def tails(session: Session) -> None:
    """1 to 8 tokens, and more, after a restored prefix."""
    block = session.block
    prefix = random_tokens(3 * block, seed=1)
    session.send(prefix[: 2 * block + 1])
    for own in (1, 2, 3, 4, 5, 6, 7, 8, 40, block - 1):
        request = session.send(prefix[: 2 * block] + random_tokens(own, seed=100 + own))
        assert request.num_cached_tokens == 2 * block


def lengths_around_blocks(session: Session) -> None:
    """Prompts of n blocks and -1 .. 3 tokens: sent, sent again, and continued."""
    block = session.block
    for own in (-1, 0, 1, 2, 3):
        prompt = random_tokens(2 * block + own, seed=20 + own)
        first, again = session.send(prompt), session.send(prompt)
        turn = session.send(prompt + list(first.generated_tokens) + random_tokens(9, seed=own))
        assert again.num_cached_tokens == (2 * block + own - 1) // block * block
        # The answer was computed except for its last token.
        assert turn.num_cached_tokens == (2 * block + own + NEW_TOKENS - 1) // block * block


def junctions(session: Session) -> None:
    """Prompts that share a prefix that is no prompt's tail. The second prompt checkpoints the junction."""
    block = session.block
    shared = random_tokens(2 * block, seed=3)
    sent = [session.send(shared + random_tokens(block + 30 + number, seed=30 + number)) for number in range(4)]
    assert [request.num_cached_tokens for request in sent] == [0, 0, 2 * block, 2 * block]


def mixed_batches(session: Session) -> None:
    """Hits and misses prefilled together, beside running decodes."""
    block = session.block
    prefix = random_tokens(2 * block, seed=4)
    session.send(prefix + random_tokens(5, seed=40))
    for number in range(8):
        own = random_tokens(1 + 3 * number, seed=41 + number)
        session.add((prefix if number % 4 else []) + own, 3 + number)
        if number % 3 == 2:
            session.step(2)
    session.run()


def preempted(session: Session) -> None:
    """Few KV blocks: requests are preempted in decode, and resume from what is still cached."""
    block = session.block
    prompts = [random_tokens(block + 20 + number, seed=50 + number) for number in range(4)]
    session.send(prompts[0][: block + 1], prompts[1][: block + 1])
    session.send(*prompts, count=block)
    assert session.engine.evicted_request_count > 0


@pytest.fixture(scope="module")
def tiny_two_taps(platform: Any) -> Any:
    """``tiny`` with a convolution of two taps, not four: only the window in a state is another."""
    return build_hybrid_model(get_preset("tiny", d_conv=2), seed=0, platform=platform)


# Of either every layer of a GPTModel is a pair of symbols. Attention is not every second or fourth layer of the first.
GPT_DIMENSIONS = {
    "dense": get_preset("tiny-gdn", layer_pattern="G-*-G-G-*-"),
    "experts": get_preset("tiny-qwen3-next"),  # and gated attention with normalised queries and keys, partial rotary
}


@pytest.fixture(scope="module")
def gpt_dense(platform: Any) -> Any:
    return as_gpt_model(build_hybrid_model(GPT_DIMENSIONS["dense"], seed=0, platform=platform))


@pytest.fixture(scope="module")
def gpt_experts(platform: Any) -> Any:
    return as_gpt_model(build_hybrid_model(GPT_DIMENSIONS["experts"], seed=0, platform=platform))


SCENARIOS = (tails, lengths_around_blocks, junctions, mixed_batches)
# Model, KV block, scheduling: one of each model and of each relation to the SSM chunk, which is of 128 tokens with Mamba2
# and of 64 with Gated DeltaNet. test_prefix_fuzz.py has the other combinations.
MODELS = [
    *(("tiny", 96, "legacy"), ("tiny", 256, "async"), ("tiny_two_taps", 96, "legacy")),
    *(("tiny_gdn", 192, "async"), ("tiny_mixed", 64, "async"), ("tiny_qwen3_next", 64, "async")),
    ("tiny_nemotron_3", 96, "async"),
    *(("tiny_granite", 64, "async"), ("tiny_olmo_hybrid", 64, "async")),
    *(("tiny_gdp", 192, "async"), ("tiny_gdp_mixed", 64, "async")),
]
# Zeros beside Mamba2 say nothing of one kind alone.
GDN_MUTANTS = [
    *((tails, "tiny_gdn", "conv_zeroed"), (junctions, "tiny_gdn", "ssm_zeroed"), (tails, "tiny_mixed", "ssm_zeroed")),
    *((lengths_around_blocks, "tiny_mixed", "ssm_zeroed"), (mixed_batches, "tiny_mixed", "other_depth")),
    *((junctions, "tiny_qwen3_next", "ssm_zeroed"), (junctions, "tiny_qwen3_next", "conv_zeroed")),
    *((tails, "tiny_granite", "ssm_zeroed"), (tails, "tiny_olmo_hybrid", "ssm_zeroed")),
    (junctions, "tiny_olmo_hybrid", "conv_zeroed"),
    *(
        (tails, "tiny_gdp", "conv_zeroed"),
        (junctions, "tiny_gdp", "ssm_zeroed"),
        (mixed_batches, "tiny_gdp", "other_depth"),
    ),
    *((tails, "tiny_gdp_mixed", mutant) for mutant in MUTANTS),
]
PREEMPTED = "tiny_mixed", "tiny_qwen3_next", "tiny_nemotron_3", "tiny_granite", "tiny_olmo_hybrid", "tiny_gdp_mixed"
GPT = "gpt_dense", "gpt_experts"
RUNS = [
    *((scenario, *model, None) for scenario in SCENARIOS for model in MODELS),
    *((scenario, "tiny", 96, "legacy", mutant) for scenario in SCENARIOS for mutant in MUTANTS),
    (tails, "tiny_two_taps", 96, "legacy", "conv_zeroed"),
    *((tails, "tiny_nemotron_3", 96, "async", mutant) for mutant in MUTANTS),
    *((scenario, name, 64, "async", mutant) for scenario, name, mutant in GDN_MUTANTS),
    *((preempted, "tiny", 64, "legacy", None), (preempted, "tiny", 64, "async", "conv_zeroed")),
    *((preempted, name, 64, "async", None) for name in PREEMPTED),
    *((tails, "tiny_qwen3_5", 64, "async", mutant) for mutant in (None, "ssm_zeroed")),
    *((scenario, name, 64, "async", None) for scenario in (*SCENARIOS, preempted) for name in GPT),
    *((tails, name, 64, "async", mutant) for name in GPT for mutant in MUTANTS),
]
FAST = [
    *((tails, "gpt_dense", 64, "async", mutant) for mutant in (None, "ssm_zeroed")),
    *((preempted, "gpt_dense", 64, "async", None), (junctions, "gpt_experts", 64, "async", None)),
    *((scenario, *model, None) for scenario in SCENARIOS for model in (MODELS[0], MODELS[4])),
    *(
        (scenario, "tiny", 96, "legacy", mutant)
        for scenario, mutant in zip(SCENARIOS, (*MUTANTS, "ssm_zeroed"), strict=True)
    ),
    *((tails, "tiny_mixed", 64, "async", "ssm_zeroed"), (junctions, "tiny_qwen3_next", 64, "async", "ssm_zeroed")),
    (tails, "tiny_olmo_hybrid", 64, "async", None),
    *((tails, "tiny_granite", 64, "async", None), (tails, "tiny_granite", 64, "async", "ssm_zeroed")),
    *((tails, "tiny_gdp", 192, "async", None), (junctions, "tiny_gdp", 64, "async", "ssm_zeroed")),
    *((preempted, "tiny", 64, "legacy", None), (preempted, "tiny_mixed", 64, "async", None)),
]


@pytest.mark.parametrize(
    "run", mostly_slow(RUNS, *FAST), ids=lambda run: "-".join(map(str, (run[0].__name__, *run[1:])))
)
def test_scenarios(request, run):
    scenario, name, block_size_tokens, mode, mutant = run
    few = {"blocks": 11 if name == "tiny" else 9, "max_requests": 4} if scenario is preempted else {}
    session = Session(request.getfixturevalue(name), block_size_tokens, async_sched_mode=mode, **few)
    with mutated_resume(session.engine, mutant):
        scenario(session)
    session.check_mutant(mutant)


# -- chunked prefill, cut everywhere ------------------------------------------------------------------------------------


def chunked_session(model: Any, block_size_tokens: int, mode: str) -> Session:
    """`cut_prompts` sets the size of its chunks."""
    fields = {"enable_chunked_prefill": True, "max_tokens": 512, "max_requests": 4, "async_sched_mode": mode}
    return Session(model, block_size_tokens, **fields)


SHARED = 256  # tokens that prompts of one cut share
PREFIXES = 5


def cut_prompts(session: Session, cut_tokens: int) -> Iterator[Any]:
    """A prompt computed in chunks of ``cut_tokens``, then others that resume from the states of its chunks."""
    session.context.max_tokens = cut_tokens  # the scheduler's budget; the buffers are for 512
    salt = str(cut_tokens)
    # Few prefixes, for few answers to compute without the cache; never that of the cut before, whose states are still there.
    prefix = random_tokens(SHARED, seed=len(session.finished) // 3 % PREFIXES)
    yield session.send(prefix[: session.block + 1], count=1, cache_salt=salt)
    for own in (3, 37):
        yield session.send(prefix + random_tokens(own, seed=own), cache_salt=salt)


def chunk_ends(block: int, cut_tokens: int) -> set[int]:
    """Where the chunks of `cut_prompts` end, but for ends of prompts."""
    ends = set()
    for first, last in ((0, block + 1), (block, SHARED + 3), (SHARED // block * block, SHARED + 37)):
        for end in range(first + cut_tokens, last, cut_tokens):
            ends.add(end - (end == last - 1))  # megatron leaves two tokens at least
    return ends


def cuts_everywhere(block: int, quantum: int) -> list[int]:
    """Sizes of chunks: many small ones, around edges, and as many others as it takes to end at every residue of ``quantum``."""
    cuts, ends = [], set()
    edges = (5, 9, 16, 31, 63, 64, 65, 95, 96, 97, 127, 128, 129, 162)
    for cut_tokens in dict.fromkeys((*edges, *range(35, 99))):
        found = {end % quantum for end in chunk_ends(block, cut_tokens)}
        if cut_tokens in edges or found - ends:
            cuts.append(cut_tokens)
            ends |= found
    assert ends == set(range(quantum))
    return cuts


# Where a chunk begins and ends decides how it is split: at multiples of the SSM chunk (128) and of the block. With blocks of 64
# those are the multiples of 64. Each cut in one scheduling mode: both cut the same.
CUT_CASES = {
    f"{name} {block}-{mode}": (name, block, mode, cuts_everywhere(block, quantum)[first::2])
    for name, block, quantum in (("tiny", 64, 64), ("tiny", 96, 128), ("tiny_gdp", 64, 64))
    for first, mode in enumerate(MODES)
}


@pytest.mark.parametrize("case", mostly_slow(CUT_CASES, "tiny 64-legacy"))
def test_chunked_prefill_with_cuts_at_every_residue(request, case, monkeypatch):
    name, block_size_tokens, mode, cuts = CUT_CASES[case]
    session = chunked_session(request.getfixturevalue(name), block_size_tokens, mode)
    context, ends = session.context, set()
    add = context.add_admitted

    def noted(request: Any, chunk_tokens: int, chunk: Any) -> None:
        ends.add(request.finished_chunk_token_count + chunk_tokens)
        add(request, chunk_tokens, chunk)

    monkeypatch.setattr(context, "add_admitted", noted)
    for cut_tokens in cuts:
        ends.clear()
        requests = list(cut_prompts(session, cut_tokens))
        assert ends == chunk_ends(block_size_tokens, cut_tokens) | {block_size_tokens + 1, SHARED + 3, SHARED + 37}
        cached = [0, block_size_tokens, SHARED // block_size_tokens * block_size_tokens]
        assert [request.num_cached_tokens for request in requests] == cached
    session.check_mutant(None)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [*("tiny_mixed", "tiny_gdn", "tiny_qwen3_next", "tiny_nemotron_3", "tiny_granite"), "gpt_dense", "gpt_experts"],
        *("tiny_mixed", "gpt_dense"),
    ),
)
def test_chunked_prefill_of_other_layers(request, name):
    session = chunked_session(request.getfixturevalue(name), 64, "async")
    for cut_tokens in (5, 63, 97):
        assert [request.num_cached_tokens for request in cut_prompts(session, cut_tokens)] == [0, 64, 256]
    session.check_mutant(None)


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_chunked_prefill_beside_decodes_and_other_prompts(tiny, mutant):
    """Decodes leave a varying token budget, so chunks end anywhere. A later chunk finds KV that another request cached."""
    session = chunked_session(tiny, 64, "async")
    session.context.max_tokens = 192
    prefix = random_tokens(448, seed=9)
    session.send(random_tokens(449, seed=998), cache_salt="deeper than any that is resumed from")
    with mutated_resume(session.engine, mutant):
        session.send(prefix[:385])
        for number in range(6):
            session.add(prefix[: 64 * (number + 2)] + random_tokens(100 + number, seed=60 + number), 9)
            session.step(1 + number % 2)
        session.run()
    session.check_mutant(mutant)
