"""``exact="bits"``: random requests have the bits that they have alone, and everything that would spoil this is noticed."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.torch_norm import L2Norm

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.layers import invariant
from megatron_hybrid_prefix.layers.invariant import invariant_problem
from megatron_hybrid_prefix.layers.step import ChunkGrid, DecodeStep
from megatron_hybrid_prefix.mcore.context import context as contexts
from megatron_hybrid_prefix.mcore.context.exact import end_on_grid
from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
from megatron_hybrid_prefix.mcore.state import fingerprint
from megatron_hybrid_prefix.models import build_hybrid_model, experts, get_preset
from megatron_hybrid_prefix.ops import mamba_scan
from megatron_hybrid_prefix.upstream.names import KVCacheManagementMode
from tests.harness.bits import LARGE, Alone, BitsTraffic, bits, by_rows, differing, exact_harness
from tests.harness.drafts import forced_drafts
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.named_models import YARN
from tests.harness.selection import mostly_slow, mostly_slow_rows, nightly_rows
from tests.harness.shared_tiers import STORES, written


@pytest.fixture(scope="module")
def both_kinds(platform):
    """Mamba2 and Gated DeltaNet, rotary positions with YaRN, gated attention and norms of its heads."""
    config = get_preset(
        "tiny-gdn",
        layer_pattern="MG*-",
        rotary_base=10_000,
        rotary_fraction=0.5,
        attention_output_gate=True,
        qk_norm=True,
        **YARN,
    )
    return build_hybrid_model(config, seed=0, platform=platform)


@pytest.fixture(scope="module")
def biased(platform):
    """``tiny-nemotron-3``, and its routers' correction biases change what they choose."""
    model = build_hybrid_model("tiny-nemotron-3", seed=0, platform=platform)
    generator = torch.Generator().manual_seed(11)
    for name, bias in model.named_buffers():
        if name.endswith("expert_bias"):
            bias.copy_(torch.rand(bias.shape, generator=generator) - 0.5)
    return model


def everything(model) -> EngineHarness:
    """An engine that has cut a prompt into chunks, skipped tokens, gone on with an answer, and preempted requests.

    Blocks of 96 tokens are no whole chunks of the scan, so computed spans begin inside of a chunk.
    """
    harness = exact_harness(
        model,
        block_size_tokens=96,
        blocks=7,
        slots=6,
        enable_chunked_prefill=True,
        max_tokens=320,
        async_sched_mode="async",
    )
    harness.context.max_tokens = 300
    prompt = tokens(0, 400, seed=1)
    harness.send(prompt, count=2)
    harness.send(prompt + tokens(0, 31, seed=2), count=2)
    answered = harness.send(prompt[:187], count=7)
    harness.send(prompt[:187] + list(answered.generated_tokens) + tokens(0, 9, seed=3), count=2)
    harness.send(*(tokens(0, 187, seed=seed) for seed in range(4, 8)), count=14)
    return harness


@pytest.mark.parametrize("name", mostly_slow(["tiny", "tiny_moe", "biased"], "tiny"))
def test_chunks_hits_turns_batches_and_preempted_requests_have_the_bits_of_a_request_alone(request, name):
    model = request.getfixturevalue(name)
    harness = everything(model)
    assert harness.engine.evicted_request_count > 0
    assert [harness.finished[number].num_cached_tokens for number in (1, 2, 3, 4)] == [0, 384, 0, 192]
    assert differing(harness, Alone(model, block_size_tokens=96)) == []


# -- a decode is the open chunk ------------------------------------------------------------------------------------------


def decoded_otherwise(model, lengths=(63, 100, 128), count=140, block=128, **fields) -> int:
    """Generated tokens whose log-prob is another one than in one forward over prompt and answer, with no cache."""
    harness, plain = (exact_harness(model, slots=slots, block_size_tokens=block, **fields) for slots in (8, 0))
    for seed, length in enumerate(lengths):
        harness.add(tokens(0, length, seed=seed), count)
    harness.run()
    differ = 0
    for request in harness.finished.values():
        prompt, answer = request.prompt_tokens.tolist(), list(request.generated_tokens)
        whole = plain.send(prompt + answer, count=1, params={"skip_prompt_log_probs": False})
        pairs = zip(request.generated_log_probs, whole.prompt_log_probs[len(prompt) - 1 :], strict=True)
        differ += sum(decoded != prefilled for decoded, prefilled in pairs)
    return differ


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        ["tiny 96", "tiny 128", "tiny_gdn 64", "both_kinds 128", "biased 128", "tiny_olmo_hybrid 64"], "tiny 96"
    ),
)
def test_a_decode_has_the_bits_of_one_forward_over_prompt_and_answer(request, case):
    """Prompts that end inside of a chunk, a token before its end, and at it; answers over two ends."""
    name, block = case.split()
    assert decoded_otherwise(request.getfixturevalue(name), block=int(block), async_sched_mode="async") == 0


def flushed_off_the_grid(self, grid, own, positions, slots, unspoiled=DecodeStep._open):
    """At the middle of chunks, too: these begin there."""
    unspoiled(self, HalfGrid(chunk_tokens=grid.chunk_tokens, block_tokens=grid.block_tokens), own, positions, slots)


class HalfGrid(ChunkGrid):
    def begin(self, position_tokens):
        return position_tokens - position_tokens % (self.chunk_tokens // 2)


def other_order(*args, out, last=False, outputs=mamba_scan.chunk_outputs, **fields):
    """Of decodes, as if a large term were added first, and taken away last."""
    outputs(*args, out=out, last=last, **fields)
    if last:
        out.copy_(out + LARGE - LARGE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        (DecodeStep, "_open", flushed_off_the_grid),
        (mamba_scan, "chunk_outputs", other_order),
        (HybridPrefixConfig, "states_are", "bfloat16"),
    ],
    ids=["a ring flushed off the grid", "a tile with another order", "states in bfloat16"],
)
def test_a_decode_with_other_bits_than_a_prefill_is_noticed(tiny, monkeypatch, mutant):
    assert decoded_otherwise(tiny, lengths=[128]) == 0
    monkeypatch.setattr(*mutant)
    assert decoded_otherwise(tiny, lengths=[128]) > 0


@pytest.mark.parametrize("name", mostly_slow(["tiny", "tiny_gdn"], "tiny"))
def test_the_next_turn_resumes_at_the_last_block_of_the_answer(request, name):
    """With the bits that it has alone."""
    model = request.getfixturevalue(name)
    harness = exact_harness(model, block_size_tokens=256)
    history, computed = tokens(0, 600, seed=1), []
    for turn, count in enumerate((180, 50)):
        answered = harness.send(history, count=count)
        computed.append(len(history) - answered.num_cached_tokens)
        history = history + list(answered.generated_tokens) + tokens(0, 50, seed=2 + turn)
    assert computed == [600, 830 - 768]
    assert computed[1] <= 306
    assert differing(harness, Alone(model, block_size_tokens=256)) == []


@pytest.mark.parametrize("name", mostly_slow(["tiny", "both_kinds"], "tiny"))
def test_states_and_kv_of_an_answer_are_those_of_a_prefill(request, name):
    """A hit on an answer is computed without the cache, and compared."""
    harness = exact_harness(request.getfixturevalue(name), verify_hits=1.0, block_size_tokens=128)
    answered = harness.send(tokens(0, 50, seed=1), count=230)
    harness.send(tokens(0, 50, seed=1) + list(answered.generated_tokens) + [7], count=1)
    stats = harness.context.prefix_stats()
    assert (stats.verified_hits, stats.verify_mismatches) == (1, 0)


@pytest.mark.parametrize("name", mostly_slow(["both_kinds", "tiny_qwen3_next"], "both_kinds"))
def test_a_score_has_the_bits_of_what_was_generated(request, name):
    """Whose answers were decoded in a batch. Only blocks whose log-probs are not kept are computed: those of the answer, the first time."""
    model = request.getfixturevalue(name)
    harness, plain = (exact_harness(model, slots=slots, block_size_tokens=128) for slots in (8, 0))
    harness.send(tokens(0, 200, seed=1), tokens(0, 37, seed=2), count=100, params={"skip_prompt_log_probs": False})
    computed = [harness.context.prefix_stats().computed_prompt_tokens]
    for request in 2 * [harness.finished[number] for number in (1, 2)]:
        sequence = request.prompt_tokens.tolist() + list(request.generated_tokens)
        generated = [*request.prompt_log_probs, *request.generated_log_probs]
        assert harness.engine.score(sequence) == generated == plain.engine.score(sequence)
        computed.append(harness.context.prefix_stats().computed_prompt_tokens)
    assert np.diff(computed).tolist() == [300 - 128, 137, 300 - 256, 137 - 128]
    harness.check_drained()


@pytest.mark.parametrize(
    ("given", "fields", "why"),
    [
        ([5], {}, "two tokens or more, not 1"),
        (tokens(0, 400, seed=1), {"max_tokens": 288}, "400 tokens have no score here: TokenOverflowError"),
        ([5, 6], {"materialize_only_last_token_logits": True}, "set materialize_only_last_token_logits=False"),
    ],
)
def test_what_has_no_score_is_one_line(tiny, given, fields, why):
    harness = exact_harness(tiny, **fields)
    with pytest.raises(ValueError, match=f"^.*{why}.*$"):
        harness.engine.score(given)


def test_a_preempted_request_does_not_decode_again(tiny):
    """It prefills what it had decoded after its last cached block, however often."""
    harness = exact_harness(tiny, blocks=15)
    decoded = []
    harness.engine.on_step = lambda: decoded.append(harness.context.num_decode_requests)
    for seed in range(4):
        harness.add(tokens(0, 100, seed=seed), 150)
    harness.run()
    assert harness.engine.evicted_request_count > 0
    assert sum(decoded) <= 4 * 150
    assert differing(harness, Alone(tiny)) == []


# Many settings rather than many requests: between them they evict from the device and from the host, load, and preempt.
TRAFFIC = [
    *(("tiny", 0), ("tiny", 6), ("both_kinds", 3), ("tiny_gdn", 2)),
    *(("tiny_granite_dense", 1), ("tiny_mtp", 1)),  # heads that draft nothing
    *((name, 0) for name in ("tiny_moe", "tiny_qwen3_next", "biased")),
    *nightly_rows([("tiny", 1), ("tiny", 4), ("both_kinds", 0), ("both_kinds", 4)]),
    *nightly_rows((name, seed) for name in ("tiny_moe", "tiny_qwen3_next", "biased") for seed in (1, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), TRAFFIC)
def test_random_requests(request, name, seed):
    model = request.getfixturevalue(name)
    traffic = BitsTraffic(model, seed, requests=25)
    traffic.run()
    assert traffic.harness.context.prefix_stats().reused_tokens > 0
    assert traffic.differing() == []


def test_multipliers_are_applied(tiny_granite_dense):
    """The model has the bits of a request alone also if both leave out a multiplier."""
    harness = exact_harness(tiny_granite_dense, block_size_tokens=96)
    prompt = tokens(0, 200, seed=1)
    harness.send(prompt, prompt + tokens(0, 9, seed=2))
    harness.finish()


# -- drafts --------------------------------------------------------------------------------------------------------------


class Drafted(BitsTraffic):
    """Traffic in which 0 to all drafts of a step are right: made from the answer alone, without drafts."""

    def send(self):
        super().send()
        number = max(self.harness.engine.requests)
        asked = self.harness.engine.requests[number].record[0]
        self.truth[number] = asked.prompt_tokens.tolist() + self.answers.answer(asked)[0]

    def run(self):
        self.answers, self.truth = self.alone(), {}
        with forced_drafts(self.harness.engine, self.truth, lambda *_: self.dice.randint(0, 3)) as self.drafted:
            super().run()


def a_draft_fills_a_chunk(self, grid, own, positions, slots, unspoiled=DecodeStep._open):
    self.most_drafts[own] += grid.begin(positions + 1) != positions + 1
    unspoiled(self, grid, own, positions, slots)


# Between them they preempt, load from the host, and hit answers; and what must be noticed.
DRAFTED = [("tiny_mtp", 0, 3, "legacy", None), ("tiny_mtp", 1, 2, "async", None), ("tiny_mtp", 4, 3, "async", None)]
DRAFTED += [("tiny_gdn_mtp", 2, 3, "async", None), ("tiny_gdn_mtp", 3, 1, "legacy", None)]
DRAFTED += [("tiny_mtp", 0, 3, "async", (DecodeStep, "_open", a_draft_fills_a_chunk))]
DRAFTED += [("tiny_mtp", 0, 3, "async", (HybridPrefixController, "before_verification", lambda self, drafts: None))]


MORE = nightly_rows([DRAFTED.pop(4), DRAFTED.pop(1)])


@pytest.mark.parametrize(("name", "seed", "drafts", "mode", "mutant"), [*mostly_slow_rows(DRAFTED, DRAFTED[0]), *MORE])
def test_random_requests_with_drafts(request, monkeypatch, name, seed, drafts, mode, mutant):
    """They have the tokens and log-probs of a request alone without drafts, in fewer steps."""
    if mutant is not None:
        monkeypatch.setattr(*mutant)
    fields = {"num_speculative_tokens": drafts, "async_sched_mode": mode}
    traffic = Drafted(request.getfixturevalue(name), seed, 16, counts=(2, 20, 130), **fields)
    traffic.run()
    assert bool(traffic.differing(traffic.answers)) == (mutant is not None)
    assert traffic.harness.context.prefix_stats().reused_tokens > 0
    assert sum(len(each.generated_tokens) for each in traffic.harness.finished.values()) > 1.2 * len(traffic.drafted)


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_log_probs_of_drafted_tokens_do_not_depend_on_other_rows(tiny_mtp, mode, monkeypatch):
    """PyTorch's on a GPU do."""
    monkeypatch.setattr(contexts, "log_softmax", torch.ones_like)
    harness = exact_harness(tiny_mtp, num_speculative_tokens=2, async_sched_mode=mode)
    assert set(harness.send(tokens(0, 30, seed=1), count=6).generated_log_probs) == {1.0}


# -- tiers that engines share --------------------------------------------------------------------------------------------

CONDITIONS = [  # what an entry's name has
    lambda patch: patch.setattr(torch, "__version__", "2.0"),
    lambda patch: patch.setattr(fingerprint, "distributions", lambda name: [SimpleNamespace(version=1)]),
    lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO"),
    lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    lambda patch: torch.set_num_threads(torch.get_num_threads() + 1),
]


@pytest.mark.parametrize("name", mostly_slow(STORES, "folder"))
def test_engines_share_entries_under_the_same_conditions_alone(both_kinds, name, tmp_path, monkeypatch):
    """Entries of the default mode, and of other versions and machines, are never found."""
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    shared = STORES[name](tmp_path / "cache", monkeypatch).url()
    prompt, threads = tokens(0, 300, seed=1), torch.get_num_threads()

    def engine(count=1, **other) -> tuple[EngineHarness, int]:
        harness = exact_harness(both_kinds, shared=shared, host_gb=0.02, block_size_tokens=128, slots=12, **other)
        cached = harness.send(prompt, count=count).num_cached_tokens
        return written(harness), cached

    (first, *_), default, (second, cached) = engine(count=90), engine(exact=None), engine(count=90)
    assert (default[1], cached, engine(exact=None)[1]) == (0, 256, 256)
    history = prompt + list(first.finished[1].generated_tokens)
    assert second.send(history, count=3).num_cached_tokens == 384  # of the other engine's answer
    alone = Alone(both_kinds, block_size_tokens=128)
    assert differing(first, alone) == differing(second, alone) == []
    for change in CONDITIONS:
        with monkeypatch.context() as patch:
            change(patch)
            found = engine()[1]
            torch.set_num_threads(threads)
        assert found == 0


# -- what would spoil it -------------------------------------------------------------------------------------------------


@pytest.fixture
def marked(tiny, monkeypatch):
    """A model that has other values, not only other rounding, if chunks start elsewhere."""

    def with_marks(function, at):
        def marked_function(x, *given, **fields):
            bounds = given[at]
            x = x.clone()
            x[bounds[bounds < len(x)].long().unique()] *= 2
            return function(x, *given, **fields)

        return marked_function

    for name, at in (("pass_states", 3), ("chunk_outputs", 5)):  # of prefills and of decodes
        monkeypatch.setattr(mamba_scan, name, with_marks(getattr(mamba_scan, name), at))
    return tiny


def a_grid_that_starts_at_the_span(self, start, end):
    found = [start]
    while found[-1] < end:
        next_block = found[-1] - found[-1] % self.block_tokens + self.block_tokens
        found.append(min(found[-1] + self.chunk_tokens, next_block, end))
    return found[1:]


# What is replaced, and requests of `everything` that it changes, whatever the processor rounds.
SPOILED = {
    # Rounded states are some 1e-3 off, thousands of times what the order of a sum makes.
    "states in bfloat16": (HybridPrefixConfig, "states_are", "bfloat16", {2}),
    "a grid that starts at the span": (ChunkGrid, "ends", a_grid_that_starts_at_the_span, {1}),
    # The second goes on from what the first left.
    "chunks that end anywhere": (HybridPrefixEngine, "tokens_of_chunk", lambda self, request: None, {1, 2}),
}


@pytest.mark.slow
def test_marks_of_chunks_and_decodes_spoil_nothing(marked):
    assert differing(everything(marked), Alone(marked, block_size_tokens=96)) == []


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILED)
def test_what_spoils_bits_is_noticed(marked, monkeypatch, spoil):
    alone, (*replaced, changed) = Alone(marked, block_size_tokens=96), SPOILED[spoil]
    monkeypatch.setattr(*replaced)
    assert changed.issubset(differing(everything(marked), alone))


def test_a_product_that_depends_on_the_number_of_rows_is_noticed(tiny, monkeypatch):
    alone, harness = Alone(tiny), exact_harness(tiny)
    product = next(module for name, module in tiny.named_modules() if name.endswith("linear_fc2"))
    monkeypatch.setattr(product, "forward", lambda x: (by_rows(F.linear(x, product.weight)), None))
    harness.send(tokens(0, 30, seed=1), tokens(0, 41, seed=2), count=3)
    assert differing(harness, alone) == [1, 2]  # 64 rows alone, 128 together


def in_the_order_of_arrival(self, hidden_states, combine=experts.ExpertDispatcher.combine_postprocess):
    """Which of a token's experts is added first depends on how many tokens there are."""
    top_k = self.config.moe_router_topk
    first = len(self._order) // top_k // 64
    self._order = self._order - self._order % top_k + (self._order + first) % top_k
    return combine(self, hidden_states)


def left_to_blas(self, rows, counts, probs):
    """Products of an expert, whose sums depend on how many rows it gets."""
    ends = counts.cumsum(0).to(torch.int32)
    inner = by_rows(F.grouped_mm(rows, self.linear_fc1_weight.transpose(1, 2), offs=ends)).relu().square()
    return F.grouped_mm(inner * probs[:, None], self.linear_fc2_weight.transpose(1, 2), offs=ends)


MIXED_UP = {
    "arrival": (experts.ExpertDispatcher, "combine_postprocess", in_the_order_of_arrival),
    "BLAS": (experts.GroupedExperts, "_each", left_to_blas),
}


@pytest.mark.parametrize("mutant", MIXED_UP.values(), ids=MIXED_UP)
def test_experts_that_depend_on_other_tokens_are_noticed(biased, monkeypatch, mutant):
    alone, harness = Alone(biased), exact_harness(biased)
    monkeypatch.setattr(*mutant)
    harness.send(tokens(0, 30, seed=1), tokens(0, 41, seed=2), count=3)
    assert differing(harness, alone) == [1, 2]  # 64 rows alone, 128 together


OTHER_ROUTERS = {"moe_input_jitter_eps": 0.1, "moe_router_load_balancing_type": "sinkhorn", "moe_router_dtype": "fp64"}


def test_other_routers_and_experts_are_refused(tiny_moe, platform, monkeypatch):
    assert invariant_problem(tiny_moe) is None
    for field, value in OTHER_ROUTERS.items():
        with monkeypatch.context() as patch:
            patch.setattr(tiny_moe.config, field, value)
            assert invariant_problem(tiny_moe) == f"{field}={value!r} is not covered"
    one_by_one = build_hybrid_model(get_preset("tiny-moe", moe_ffn_hidden_size=30), platform=platform)
    assert "layers.2.mlp: SequentialMLP is not covered; of experts, GroupedExperts" in invariant_problem(one_by_one)


def test_routes_come_back_with_the_same_bits(platform):
    """Recorded, and replayed: of those, rows are sorted by expert."""
    model = build_hybrid_model("tiny-nemotron-3", seed=0, moe_enable_routing_replay=True)
    harness, plain = (exact_harness(model, slots=slots) for slots in (8, 0))
    prompt = tokens(2, 9, seed=1)
    for _ in range(2):
        found, own = harness.send(prompt), plain.send(prompt)
        assert bits(found) == bits(own) and np.array_equal(found.routing_indices, own.routing_indices)
    assert found.num_cached_tokens == 128


# -- verify_hits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", mostly_slow((2, 100), 2))
def test_verify_hits_finds_every_flipped_bit(tiny, places, caplog):
    """One bit of one value of a stored state or of its KV, anywhere."""
    harness = exact_harness(tiny, verify_hits=1.0, slots=8)
    prompt, dice = tokens(2, 5, seed=1), random.Random(0)
    harness.send(prompt, count=1)
    harness.send(prompt, count=1)  # right
    stats = harness.context.prefix_stats
    assert (stats().verified_hits, stats().verify_mismatches) == (1, 0)
    for flipped in range(1, places + 1):
        (node,) = [node for node in harness.cache.nodes() if node.slot >= 0]
        stored = list(harness.context.shared_memory.state(node.slot).values())
        stored.append(
            harness.context.memory_buffer[:, :, node.block_id]
        )  # the cache takes the KV that was computed last
        values = stored[flipped % len(stored)].view(torch.int32)
        place = tuple(dice.randrange(size) for size in values.shape)
        bit = 1 << dice.randrange(31)
        values[place] ^= bit
        harness.send(prompt, count=1)
        values[place] ^= bit
        assert (stats().verified_hits, stats().verify_mismatches) == (1 + flipped, flipped)
    assert "share of values with other bits" in caplog.text


# -- settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantum", "start", "budget", "end", "expected"),
    [
        (128, 0, 500, 400, 400),  # the rest fits
        (128, 0, 300, 400, 256),
        (128, 64, 300, 1000, 256),  # 364 is inside of a chunk
        (128, 256, 100, 1000, 256),  # no room for a chunk
        (128, 0, 256, 257, 128),  # megatron leaves no single token
        (64, 96, 64, 1000, 128),
    ],
)
def test_where_a_chunk_of_a_prompt_ends(quantum, start, budget, end, expected):
    assert end_on_grid(start=start, budget=budget, end=end, quantum=quantum) == expected


def test_layer_norms_are_refused(tiny, monkeypatch):
    assert invariant_problem(tiny) is None
    monkeypatch.setattr(tiny.config, "normalization", "LayerNorm")
    assert invariant_problem(tiny) == "normalization='LayerNorm' is not covered"


def test_norms_that_torch_compiles_are_refused(tiny, monkeypatch):
    attention = next(module for module in tiny.modules() if hasattr(module, "q_layernorm"))
    monkeypatch.setitem(attention._modules, "q_layernorm", L2Norm(16))
    assert "q_layernorm is an L2 norm" in invariant_problem(tiny)


def test_the_report_at_the_start_says_which_guarantee_holds(tiny, caplog):
    with caplog.at_level(logging.INFO, logger="megatron_hybrid_prefix"):
        exact_harness(tiny)
        EngineHarness(tiny)
    first, second = (record.message for record in caplog.records if "eviction" in record.message)
    assert "hits equal misses bit for bit" in first
    assert "hits equal misses up to rounding" in second


def test_the_default_computes_as_without_the_mixins(platform, monkeypatch):
    """A model that an exact engine ran on gives a default engine the bits that it had before."""
    linear = invariant.linear
    monkeypatch.setattr(invariant, "linear", lambda x, weight: 2 * linear(x, weight))  # of the exact engine alone
    model = build_hybrid_model("tiny", seed=0, platform=platform)
    prompts = tokens(1, 30, seed=1), tokens(0, 41, seed=2)
    answers = []
    for exact in (None, "bits", None):
        harness = EngineHarness(model, exact=exact)
        harness.send(*prompts, count=3)
        answers.append([bits(harness.finished[number]) for number in sorted(harness.finished)])
    assert answers[0] == answers[2] != answers[1]


def test_an_unseeded_sample_survives_a_suspension(tiny):
    recompute = {"kv_cache_management_mode": KVCacheManagementMode.RECOMPUTE, "static_kv_memory_pointers": False}
    harness = exact_harness(tiny, **recompute)
    number = harness.add(tokens(0, 20, seed=1), 6, sampling_options={"temperature": 1.5})
    harness.step(4)
    before = list(harness.engine.requests[number].record[-1].generated_tokens)
    harness.suspend_and_resume()
    harness.run()
    assert before and harness.finished[number].generated_tokens[: len(before)] == before
