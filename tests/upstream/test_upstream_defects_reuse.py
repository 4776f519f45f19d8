"""Defects of megatron-core's prefix cache for hybrid models: reuse that is lost, and reuse that must not be.

Each test is one scenario on both engines, as in ``test_upstream_defects.py``, which has wrong answers and crashes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.defect_helpers import BLOCK, Side, Work, computed_tokens, defect, make_side
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end

pytestmark = pytest.mark.slow


@pytest.fixture
def side(request, tiny):
    yield from make_side(request, tiny)


# -- what is kept ------------------------------------------------------------------------------------------------------


@defect(15)
def test_15_preempted_request_resumes_from_its_own_prefix(side):
    """Two requests need a fifth block in a pool of nine: one is preempted, and waits to be computed again.

    Its prompt is cached, but the request that megatron makes of it has neither keys nor the flag.
    """
    engine = side.build(slots=8, blocks=9)
    finished: dict[int, Any] = {}
    prompts = [random_tokens(3 * BLOCK + 240, seed=number) for number in range(2)]
    for prompt in prompts:
        side.add(engine, prompt, 24)
    run_to_end(engine, finished)
    assert engine.evicted_request_count == 1
    again = computed_tokens(engine) - sum(map(len, prompts))
    assert again <= 240 + 24
    side.check(*finished.values())
    side.check_drained(engine)


@defect(16)
def test_16_boundary_at_the_end_of_a_chunk(side):
    """A chunk of a chunked prefill that ends at the prompt's last block boundary has that state in its live slot.

    Megatron keeps states from strictly inside a chunk, or from the end of the whole prompt.
    """
    engine = side.build(max_tokens=2 * BLOCK, enable_chunked_prefill=True)
    prompt = random_tokens(4 * BLOCK + 40, seed=1)  # chunks of 512, 512 and 40 tokens
    side.serve(engine, prompt)
    request, computed = side.serve(engine, prompt + random_tokens(20, seed=2))
    assert computed == 60
    side.check(request)
    side.check_drained(engine)


@defect(17)
def test_17_state_of_a_running_request_can_go(side):
    """A running request's state is needed for its first forward alone, but its block's references pin it to the end.

    So the states of idle prefixes go in its place, however recently they were used.
    """
    engine = side.build(slots=2, eviction_policy="lru")  # another policy may rank it higher: its KV is held anyway
    finished: dict[int, Any] = {}
    side.add(engine, random_tokens(BLOCK + 40, seed=1), 40)  # decodes all the time; its state is the oldest
    run_to_end(engine, finished, steps=2)
    idle = random_tokens(BLOCK + 40, seed=2)
    for prompt in (idle, random_tokens(BLOCK + 40, seed=3), idle):
        before = computed_tokens(engine)
        side.add(engine, prompt, 1)
        run_to_end(engine, finished, steps=2)
    assert computed_tokens(engine) - before == 40
    assert engine.has_unfinished_requests()
    run_to_end(engine, finished)
    side.check(*finished.values())
    side.check_drained(engine)


@defect(17)
def test_17_ancestors_of_a_used_state_are_not_used(side):
    """A request that resumes from a deep state makes the states before it look as fresh, though they served nobody.

    Under pressure a state of another prefix goes that was used later than any of them.
    """
    engine = side.build(slots=3, eviction_policy="lru")  # the default's values are per byte that eviction frees
    short = random_tokens(BLOCK, seed=1)
    long = short + random_tokens(3 * BLOCK + 40, seed=2)
    other = random_tokens(BLOCK + 40, seed=3)
    side.serve(engine, short + random_tokens(40, seed=4))  # a state after block 1
    side.serve(engine, long)  # one after block 4
    side.serve(engine, other)  # another state: the slots are full
    _, computed = side.serve(engine, long)  # uses the one after block 4
    assert computed == 40
    side.serve(engine, random_tokens(BLOCK + 40, seed=5))  # needs a slot
    request, computed = side.serve(engine, other)
    assert computed == 40
    side.check(request)
    side.check_drained(engine)


@defect(18)
def test_18_whole_budget_keeps_states(side):
    """The scratch buffer for states on their way into the cache comes out of the budget before the cache does.

    Of 24 states paid for, at 4,096 tokens a step, 8 can be kept.
    """
    engine = side.build(gb=24.5 * side.slot_bytes / 2**30, max_tokens=4096)
    prompts = [random_tokens(BLOCK + 20, seed=number) for number in range(24)]
    for prompt in prompts:
        side.serve(engine, prompt, 1)
    replayed = [side.serve(engine, prompt, 1) for prompt in prompts]
    assert [computed for _, computed in replayed] == [20] * len(prompts)
    side.check(*(request for request, _ in replayed[:3]))
    side.check_drained(engine)


@defect(23)
def test_23_default_policy_keeps_something(side):
    """``prefix_caching_eviction_policy`` is REF_ZERO by default: blocks are forgotten with their last reference.

    A conversation's next turn finds nothing of the turn before. The other tests of this file ask for LRU.
    """
    from megatron.core.inference.config import InferenceConfig

    engine = side.build(prefix_caching_eviction_policy=InferenceConfig().prefix_caching_eviction_policy)
    prompt = random_tokens(2 * BLOCK + 40, seed=1)
    first, _ = side.serve(engine, prompt)
    turn = prompt + list(first.generated_tokens) + random_tokens(50, seed=2)
    request, computed = side.serve(engine, turn)
    assert computed == len(turn) - 2 * BLOCK
    side.check(first, request)
    side.check_drained(engine)


@defect(26)
def test_26_blocks_smaller_than_scan_chunks(side):
    """Blocks of 64 tokens, a scan in chunks of 128: every other block boundary lies inside a chunk.

    Megatron can extract states at the ends of chunks only, and says nothing where a boundary is not one.
    """
    engine = side.build(block_size_tokens=64)
    prompt = random_tokens(3 * 64 + 20, seed=1)
    side.serve(engine, prompt)
    request, computed = side.serve(engine, prompt + random_tokens(10, seed=2))
    assert computed == 30
    side.check(request)
    side.check_drained(engine)


# -- what it costs, and what is said about it --------------------------------------------------------------------------


def _admit_and_finish(side: Side, engine: Any, request_id: int) -> None:
    """All bookkeeping of a request of 136 tokens that generates one, without a forward."""
    from megatron.core.inference.inference_request import DynamicInferenceRequest

    context = engine.context
    context.add_request(
        DynamicInferenceRequest(
            request_id=request_id,
            prompt_tokens=torch.tensor(random_tokens(136, seed=request_id)),
            sampling_params=greedy(1),
            block_size_tokens=context.block_size_tokens,
            enable_prefix_caching=True,
        )
    )
    context.initialize_attention_state()
    if not side.ours:
        context.mamba_slot_allocator.commit_intermediate_states()
    context.update_requests(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.long))
    context.prefix_cache_lru_clock += 1


@defect(20)
def test_20_eviction_does_not_scan_the_cache(side):
    """To evict one block or one state, megatron goes through all blocks, in tensors and in Python lists.

    Counted is what the bookkeeping of one more request does (Python lines, elements of tensors) in a full cache of 64
    blocks, and in one of 2,048. No forward is run.
    """
    amounts = []
    for prompts in (8, 256):
        engine = side.build(
            slots=prompts // 2,
            blocks=8 * prompts + 1,
            block_size_tokens=16,
            max_requests=2,
            max_tokens=256,
            max_sequence_length=256,
        )
        for number in range(prompts):  # eight cached blocks and a state each
            _admit_and_finish(side, engine, number)
        with Work() as work:
            _admit_and_finish(side, engine, prompts)
        amounts.append(work.amount)
        side.check_drained(engine)
    assert amounts[1] <= 1.1 * amounts[0]


@defect(21)
def test_21_blocks_of_a_live_request_are_not_written(side):
    """Where KV matches deeper than a state, megatron shares the blocks and computes their tokens again, into them.

    A running request reads them meanwhile, so nobody may write them, not even the same values.
    """
    engine = side.build()
    context = engine.context
    finished: dict[int, Any] = {}
    shared = random_tokens(3 * BLOCK, seed=1)
    side.add(engine, shared + random_tokens(2 * BLOCK + 40, seed=2), 40)  # its only state: after 5 blocks
    run_to_end(engine, finished, steps=2)
    block_id = int(context.request_to_kv_block_ids[0, 0])
    written: set[int] = set()
    append = context.append_key_value_cache

    def recorded(*args: Any) -> None:
        written.update(context.gpu_view.token_to_block_idx[: context.active_token_count].tolist())
        append(*args)

    context.append_key_value_cache = recorded
    other, computed = side.add(engine, shared + random_tokens(40, seed=3)), computed_tokens(engine)
    run_to_end(engine, finished, steps=1)
    assert computed_tokens(engine) - computed == 3 * BLOCK + 40
    assert written and block_id not in written
    run_to_end(engine, finished)
    side.check(finished[other])
    side.check_drained(engine)


@defect(22)
def test_22_num_cached_tokens_are_skipped_tokens(side):
    """A prompt whose KV matches for three blocks where no state is kept computes all its tokens, and reports 768."""
    engine = side.build()
    shared = random_tokens(3 * BLOCK, seed=1)
    side.serve(engine, shared + random_tokens(2 * BLOCK + 40, seed=2))
    for tail in (3, 4):  # the second one resumes after three blocks
        request, computed = side.serve(engine, shared + random_tokens(40, seed=tail))
        side.check(request)
        assert request.num_cached_tokens == len(request.prompt_tokens) - computed
    side.check_drained(engine)


@defect(25)
def test_25_requests_with_different_salts_do_not_share(side):
    """A tenant who times requests learns what others sent; there is nothing to keep their prefixes apart."""
    engine = side.build()
    prompt = random_tokens(2 * BLOCK + 40, seed=1)
    salts = ["one", "other", None, "one"]
    served = []
    for salt in salts:
        served.append(side.serve(engine, prompt, **({} if salt is None else {"cache_salt": salt})))
    assert [computed for _, computed in served] == [len(prompt)] * 3 + [40]
    side.check(*(request for request, _ in served))
    side.check_drained(engine)


@defect(25)
def test_25_keys_cannot_be_computed_by_others(side):
    """A block's key is 63 bits of an unkeyed SHA-256: two prompts with one key can be searched for offline.

    Finding them takes about 2^31.5 hashes, and the second is then answered from the KV of the first. Finding a pair
    is no test; that all engines, and all who know the rule, have the same short key for a prompt is the premise.
    """
    prompt = random_tokens(BLOCK, seed=1)
    keys = []
    for _ in range(2):
        engine = side.build()
        keys.append(engine.get_request(side.add(engine, prompt)).precomputed_block_hashes)
    assert len(keys[0]) == len(keys[1]) == 1
    assert keys[0] != keys[1]
    assert all(len(bytes.fromhex(str(key))) >= 16 for (key,) in keys)


# -- what is kept, exactly ---------------------------------------------------------------------------------------------


@defect(28)
def test_28_restored_state_is_the_state_of_the_uninterrupted_scan(side, platform):
    """States have the parameters' type, bfloat16: the scan carries float32, and going on from a kept state does not.

    Compared is the first layer's SSM state after a prompt, computed at once and from a state two blocks in. Megatron's
    cache has no setting for it. This package's has ``state_dtype``, which this test sets; its default is megatron's.
    """
    config = get_preset("tiny", dtype="bfloat16")
    side.model = build_hybrid_model(config, seed=0, platform=platform)
    prompt = random_tokens(2 * BLOCK + 300, seed=1)
    states = []
    for prefix in ([], prompt[: 2 * BLOCK + 20]):
        engine = side.build(state_dtype="float32")
        if prefix:
            side.serve(engine, prefix)
        before = computed_tokens(engine)
        side.add(engine, prompt)
        engine.step_modern()
        assert computed_tokens(engine) - before == (300 if prefix else len(prompt))
        slot = int(engine.context.mamba_metadata.request_to_mamba_state_idx[0])
        states.append(engine.context.mamba_ssm_states[0, slot].double())
        run_to_end(engine, {})
        side.check_drained(engine)
    whole, resumed = states
    assert (resumed - whole).norm() <= 1e-4 * whole.norm()
