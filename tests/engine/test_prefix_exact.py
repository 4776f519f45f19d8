"""Answers with the cache equal those without it: greedy tokens and log-probs against a float64 recompute.

Every scenario also runs with mutants: the restored SSM state is zeroed, the restored convolution state is zeroed, or a
state of another depth is used. Then each request that resumed must be wrong. So a scenario that compares nothing cannot
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.engine_helpers import assert_matches, greedy, kv_budget, random_tokens, run_to_end
from tests.harness.mutants import MUTANTS, mutated_resume
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.selection import mostly_slow

NEW_TOKENS = 2  # one of the prefill, one of a decode
MODES = ("legacy", "async")


class Session:
    """One engine, its answers, and the right answers.

    Requests that resumed from the cache are kept separately. Under a mutant they must be wrong, and all others right.
    """

    def __init__(self, model: Any, reference: NaiveHybridModel, **fields: Any) -> None:
        values = {"max_sequence_length": 2048, "buffer_size_gb": 0.01} | fields
        self.engine = build_engine(model, HybridPrefixConfig(retention_interval_tokens=0), **values)
        self.block = self.engine.context.block_size_tokens
        self._reference = reference
        self._next_id = 0
        self.finished: dict[int, Any] = {}
        self.send(random_tokens(5 * self.block + 1, seed=999), cache_salt="a state of another depth, for the mutant")

    def send(self, *prompts: list[int], new_tokens: int = NEW_TOKENS, **attributes: Any) -> list[Any]:
        """Adds prompts together and runs to the end. Checks the cache after every step."""
        first = self._next_id
        for prompt in prompts:
            self.add(prompt, new_tokens, **attributes)
        self.run()
        return [self.finished[number] for number in range(first, self._next_id)]

    def add(self, prompt: list[int], new_tokens: int = NEW_TOKENS, **attributes: Any) -> int:
        """Adds one prompt. Returns its id."""
        params = greedy(new_tokens)
        params.add_attributes(attributes)
        self.engine.add_request(self._next_id, prompt, params)
        self._next_id += 1
        return self._next_id - 1

    def run(self, steps: int | None = None) -> None:
        """Steps to the end, or a number of steps."""
        while self.engine.has_unfinished_requests() and steps != 0:
            run_to_end(self.engine, self.finished, steps=1)
            self.engine.context.check_integrity()
            steps = None if steps is None else steps - 1

    def check(self, mutant: str | None) -> None:
        """Checks that all answers are right. Under a mutant, all answers of requests that resumed must be wrong."""
        hits = 0
        for request in self.finished.values():
            resumed = request.num_cached_tokens > 0
            hits += resumed
            if resumed and mutant is not None:
                with pytest.raises(AssertionError):
                    assert_matches(self._reference, request)
            else:
                assert_matches(self._reference, request)
        assert hits, "nothing resumed: the scenario says nothing"


def tails(session: Session) -> None:
    """1 to 8 tokens, and more, after a restored prefix."""
    block = session.block
    prefix = random_tokens(3 * block, seed=1)
    session.send(prefix[: 2 * block + 1])
    for own in (1, 2, 3, 4, 5, 6, 7, 8, 40, block - 1):
        (request,) = session.send(prefix[: 2 * block] + random_tokens(own, seed=100 + own))
        assert request.num_cached_tokens == 2 * block


def lengths_around_blocks(session: Session) -> None:
    """Prompts of n blocks and -1 .. 3 tokens: sent, sent again, and continued."""
    block = session.block
    for own in (-1, 0, 1, 2, 3):
        prompt = random_tokens(2 * block + own, seed=20 + own)
        (first,) = session.send(prompt)
        (again,) = session.send(prompt)
        (turn,) = session.send(prompt + list(first.generated_tokens) + random_tokens(9, seed=own))
        assert again.num_cached_tokens == (2 * block + own - 1) // block * block
        # The answer was computed except for its last token.
        assert turn.num_cached_tokens == (2 * block + own + NEW_TOKENS - 1) // block * block


def junctions(session: Session) -> None:
    """Prompts that share a prefix that is no prompt's tail. The second prompt checkpoints the junction."""
    block = session.block
    shared = random_tokens(2 * block, seed=3)
    for number in range(4):
        session.send(shared + random_tokens(block + 30 + number, seed=30 + number))
    cached = [request.num_cached_tokens for request in list(session.finished.values())[-4:]]
    assert cached == [0, 0, 2 * block, 2 * block]


def mixed_batches(session: Session) -> None:
    """Hits and misses prefilled together, beside running decodes."""
    block = session.block
    prefix = random_tokens(2 * block, seed=4)
    session.send(prefix + random_tokens(5, seed=40))
    for number in range(8):
        own = random_tokens(1 + 3 * number, seed=41 + number)
        session.add((prefix if number % 4 else []) + own, new_tokens=3 + number)
        if number % 3 == 2:
            session.run(steps=2)
    session.run()


def preempted(session: Session) -> None:
    """Few KV blocks: requests are preempted in decode, and resume from what is still cached."""
    block = session.block
    prompts = [random_tokens(block + 20 + number, seed=50 + number) for number in range(4)]
    session.send(prompts[0][: block + 1], prompts[1][: block + 1])
    session.send(*prompts, new_tokens=block)
    assert session.engine.evicted_request_count > 0


SCENARIOS = (tails, lengths_around_blocks, junctions, mixed_batches)


@pytest.fixture(scope="module")
def of_width(platform: Any) -> Callable[[int], tuple[Any, NaiveHybridModel]]:
    """``tiny`` with a convolution of this many taps. Its SSM chunk is 128 tokens."""

    @cache
    def build(taps: int) -> tuple[Any, NaiveHybridModel]:
        config = get_preset("tiny", d_conv=taps)
        assert config.chunk_size == 128
        model = build_hybrid_model(config, seed=0, platform=platform)
        return model, NaiveHybridModel(model, config)

    return build


@pytest.fixture(scope="module", params=mostly_slow(["tiny_gdn", "tiny_mixed", "tiny_qwen3_next"], "tiny_mixed"))
def gdn_and_reference(request: Any) -> tuple[Any, NaiveHybridModel]:
    """Gated DeltaNet layers, alone, beside Mamba2, or in a Qwen3-Next; their chunk is 64 tokens."""
    model = request.getfixturevalue(request.param)
    return model, reference_of(model)


@cache
def reference_of(model: Any) -> NaiveHybridModel:
    """The model in float64, made once."""
    return NaiveHybridModel(model, model.hybrid_config)


# KV block, mutant. That a scenario notices wrong states, it shows with one block size.
CASES = {"64": (64, None), "96": (96, None), "256": (256, None)} | {f"96-{name}": (96, name) for name in MUTANTS}
# Taps of the convolution, case. With fewer of them, only the window in a state is another.
RUNS = [*((4, case) for case in CASES), (2, "96"), (2, "96-conv_zeroed")]
GDN_CASES = {"64": (64, None), "192": (192, None)} | {f"64-{name}": (64, name) for name in MUTANTS}
# Each model with each block size, each mutant with one model; zeros beside Mamba2 say nothing of one kind alone. Mutants of a Qwen3-Next: test_qwen3_next.
GDN_RUNS = [
    *(("tiny_gdn", "64"), ("tiny_gdn", "192"), ("tiny_gdn", "64-ssm_zeroed"), ("tiny_gdn", "64-conv_zeroed")),
    *(("tiny_mixed", "64"), ("tiny_mixed", "192"), ("tiny_mixed", "64-ssm_zeroed"), ("tiny_mixed", "64-other_depth")),
    *(("tiny_qwen3_next", "64"), ("tiny_qwen3_next", "192")),
]


@pytest.mark.parametrize(
    "run",
    mostly_slow(RUNS, *((4, case) for case in ("96", "96-ssm_zeroed", "96-conv_zeroed"))),
    ids=lambda run: f"d_conv{run[0]}-{run[1]}",
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_legacy_scheduling(of_width, scenario: Callable[[Session], None], run):
    taps, (block_size_tokens, mutant) = run[0], CASES[run[1]]
    _run(of_width(taps), scenario, mutant, block_size_tokens=block_size_tokens)


@pytest.mark.parametrize(
    "run", mostly_slow(GDN_RUNS, ("tiny_mixed", "64"), ("tiny_mixed", "64-ssm_zeroed")), ids="-".join
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gated_delta_net(request, scenario: Callable[[Session], None], run):
    model, (block_size_tokens, mutant) = request.getfixturevalue(run[0]), GDN_CASES[run[1]]
    both = model, reference_of(model)
    _run(both, scenario, mutant, block_size_tokens=block_size_tokens, async_sched_mode="async")


@pytest.mark.parametrize("mutant", [None, "other_depth"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_async_scheduling(tiny, tiny_reference, scenario, mutant):
    _run((tiny, tiny_reference), scenario, mutant, block_size_tokens=64, async_sched_mode="async")


@pytest.mark.parametrize("mutant", [None, "conv_zeroed"])
@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests(tiny, tiny_reference, mode, mutant):
    _preempted((tiny, tiny_reference), mode, mutant, blocks=11)


@pytest.mark.parametrize("mutant", [None, "ssm_zeroed", "conv_zeroed"])
def test_qwen3_next(tiny_qwen3_next, mutant):
    """The slow cases above run it through all scenarios."""
    _run((tiny_qwen3_next, reference_of(tiny_qwen3_next)), junctions, mutant, block_size_tokens=64)


def test_preempted_requests_of_gated_delta_net(gdn_and_reference):
    _preempted(gdn_and_reference, "async", None, blocks=9)


def _preempted(model_and_reference, mode, mutant, *, blocks) -> None:
    budget = kv_budget(model_and_reference[0], blocks, block_tokens=64, max_requests=4)
    fields = {"max_requests": 4, "max_sequence_length": 1024, "block_size_tokens": 64, "async_sched_mode": mode}
    _run(model_and_reference, preempted, mutant, **budget, **fields)


def _run(model_and_reference, scenario, mutant, **fields) -> None:
    session = Session(*model_and_reference, **fields)
    with mutated_resume(session.engine, mutant):
        scenario(session)
    session.check(mutant)


# -- chunked prefill, cut everywhere ------------------------------------------------------------------------------------


def chunked_session(model: Any, reference: NaiveHybridModel, block_size_tokens: int, mode: str) -> Session:
    """Prompts are cut into chunks of the size set by `set_cut`."""
    return Session(
        model,
        reference,
        block_size_tokens=block_size_tokens,
        enable_chunked_prefill=True,
        max_tokens=512,
        max_requests=4,
        async_sched_mode=mode,
    )


SHARED = 256  # tokens that prompts of one cut share
PREFIXES = 5


def cut_prompts(session: Session, cut_tokens: int) -> Iterator[Any]:
    """A prompt computed in chunks of ``cut_tokens``, then others that resume from the states of its chunks."""
    session.engine.context.max_tokens = cut_tokens  # the scheduler's budget; the buffers are for 512
    salt = str(cut_tokens)
    # Few prefixes, for few answers to compute without the cache; never that of the cut before, whose states are still there.
    prefix = random_tokens(SHARED, seed=len(session.finished) // 3 % PREFIXES)
    yield from session.send(prefix[: session.block + 1], new_tokens=1, cache_salt=salt)
    for own in (3, 37):
        yield from session.send(prefix + random_tokens(own, seed=own), new_tokens=2, cache_salt=salt)


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
    f"{block}-{mode}": (block, mode, cuts_everywhere(block, quantum)[first::2])
    for block, quantum in ((64, 64), (96, 128))
    for first, mode in enumerate(MODES)
}


@pytest.mark.parametrize("case", mostly_slow(CUT_CASES, "64-legacy"))
def test_chunked_prefill_with_cuts_at_every_residue(tiny, tiny_reference, case, monkeypatch):
    block_size_tokens, mode, cuts = CUT_CASES[case]
    session = chunked_session(tiny, tiny_reference, block_size_tokens, mode)
    context, ends = session.engine.context, set()
    add = context.add_admitted

    def noted(request: Any, chunk_tokens: int, chunk: Any) -> None:
        ends.add(request.finished_chunk_token_count + chunk_tokens)
        add(request, chunk_tokens, chunk)

    monkeypatch.setattr(context, "add_admitted", noted)
    for cut_tokens in cuts:
        ends.clear()
        requests = list(cut_prompts(session, cut_tokens))
        assert ends == chunk_ends(block_size_tokens, cut_tokens) | {block_size_tokens + 1, SHARED + 3, SHARED + 37}
        assert [request.num_cached_tokens for request in requests] == [
            0,
            block_size_tokens,
            SHARED // block_size_tokens * block_size_tokens,
        ]
    session.check(None)


def test_chunked_prefill_of_gated_delta_net(gdn_and_reference):
    _gdn_cuts(gdn_and_reference, (5, 63, 97))


@pytest.mark.slow
def test_more_chunks_of_gated_delta_net(tiny_mixed):
    """Around multiples of 64, and budgets of one and two chunks and a bit; beside Mamba2, whose chunks are of 128 tokens."""
    cuts = (4, 9, 31, *range(35, 163, 13), 64, 65, 127, 128, 129)
    _gdn_cuts((tiny_mixed, reference_of(tiny_mixed)), cuts)


def _gdn_cuts(model_and_reference, cuts: Iterable[int]) -> None:
    session = chunked_session(*model_and_reference, 64, "async")
    for cut_tokens in cuts:
        requests = list(cut_prompts(session, cut_tokens))
        assert [request.num_cached_tokens for request in requests] == [0, 64, 256]
    session.check(None)


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("mode", mostly_slow(MODES, "legacy"))
def test_chunked_prefill_notices_wrong_states(tiny, tiny_reference, mode, mutant):
    session = chunked_session(tiny, tiny_reference, 96, mode)
    with mutated_resume(session.engine, mutant):
        for cut_tokens in (5, 63, 64, 97, 128, 130):
            for _ in cut_prompts(session, cut_tokens):
                pass
    session.check(mutant)


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
@pytest.mark.parametrize("mode", mostly_slow(MODES, "async"))
def test_chunked_prefill_beside_decodes_and_other_prompts(tiny, tiny_reference, mode, mutant):
    """Decodes leave a varying token budget, so chunks end anywhere. A later chunk finds KV that another request cached."""
    session = chunked_session(tiny, tiny_reference, 64, mode)
    session.engine.context.max_tokens = 192
    prefix = random_tokens(448, seed=9)
    session.send(random_tokens(449, seed=998), cache_salt="deeper than any that is resumed from")
    with mutated_resume(session.engine, mutant):
        session.send(prefix[:385])
        for number in range(6):
            session.add(prefix[: 64 * (number + 2)] + random_tokens(100 + number, seed=60 + number), new_tokens=9)
            session.run(steps=1 + number % 2)
        session.run()
    session.check(mutant)
