"""Defects of megatron-core's prefix cache for hybrid models: wrong answers, and crashes.

Each test is one scenario on both engines. On megatron's it has to fail (a strict xfail) if the installed version has the
defect (``tests/harness/defects.py``), else to pass; on this package's it has to pass. Lost reuse is in
``test_upstream_defects_reuse.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import TensorStateDeallocatedError
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.defect_helpers import BLOCK, WrongAnswer, defect, make_side
from tests.harness.engine_helpers import assert_matches, greedy, random_tokens, run_to_end

pytestmark = pytest.mark.slow


@pytest.fixture
def side(request, tiny):
    yield from make_side(request, tiny)


# -- wrong answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["itself", "next"])
@defect(1, raises=WrongAnswer)
def test_01_continuation_chunk_skips_without_state(side, victim):
    """The rule that skipping needs a state is asked for a prompt's first chunk only.

    The second chunk of a chunked prefill skips whatever KV matches, and the scan goes on from the state of 1024 tokens
    earlier. Its snapshot is then cached, so that the next request, which does restore a state, is wrong as well.
    """
    engine = side.build(max_tokens=2048, enable_chunked_prefill=True)
    shared = random_tokens(6 * BLOCK, seed=1)
    first, _ = side.serve(engine, shared + random_tokens(BLOCK + 40, seed=2))  # its only state: after 7 blocks
    assert_matches(side.reference, first)
    finished: dict[int, Any] = {}
    own = random_tokens(300, seed=4)
    side.add(engine, random_tokens(1500, seed=3))
    chunked = side.add(engine, shared + own)  # beside the other one it gets 548 tokens: two chunks
    run_to_end(engine, finished)
    if victim == "itself":
        side.check(finished[chunked])
    else:
        request, _ = side.serve(engine, shared + own + random_tokens(20, seed=5))
        side.check(request)
    side.check_drained(engine)


@defect(2, raises=WrongAnswer)
def test_02_prompt_of_whole_blocks_and_one_token(side):
    """A prompt of n blocks and one token, with a state after block n only, would leave one token to compute.

    Megatron then skips a block less, where no state is kept: restoring fails, the state is zeroed, and the tokens stay
    skipped.
    """
    engine = side.build()
    shared = random_tokens(5 * BLOCK + 40, seed=1)
    side.serve(engine, shared)
    request, computed = side.serve(engine, shared[: 5 * BLOCK + 1])
    side.check(request)
    assert computed == 1
    side.check_drained(engine)


@defect(3, raises=WrongAnswer)
def test_03_reset_metadata_forgets_kv_and_states_together(side):
    """Recompute-on-resume with unified memory calls ``reset_metadata()``, which clears the KV allocator alone.

    The map of states still names the old block ids. Once the same prefix is cached again, in other blocks, its hash
    finds a state, the new block has none, and the request runs from zeros with its tokens skipped.
    """
    engine = side.build()
    shared = random_tokens(5 * BLOCK, seed=1)
    side.serve(engine, shared + random_tokens(20, seed=2))
    engine.context.reset_metadata()
    side.serve(engine, random_tokens(300, seed=3))  # block ids are handed out in another order than before
    side.serve(engine, shared + random_tokens(3 * BLOCK, seed=4))  # its own state is after 8 blocks
    request, _ = side.serve(engine, shared + random_tokens(300, seed=5))
    side.check(request)
    side.check_drained(engine)


@pytest.mark.parametrize("before", ["restored prefix", "earlier chunk"])
@defect(4, raises=WrongAnswer)
def test_04_short_tail(side, before):
    """The convolution window left for decode is made of the computed span alone.

    After a restored prefix, or in the last chunk of a chunked prefill, that span may be shorter than the window; its
    rest is in the state that the span started from, and megatron puts zeros there. (Two tokens here: with d_conv 4 the
    decode kernel needs the last three.)
    """
    shared = random_tokens(2 * BLOCK + 40, seed=1)
    if before == "restored prefix":
        engine = side.build()
        side.serve(engine, shared)  # keeps the state after two blocks
    else:
        engine = side.build(max_tokens=2 * BLOCK, enable_chunked_prefill=True)
    request, computed = side.serve(engine, shared[: 2 * BLOCK + 2], 8)
    assert computed == (2 if before == "restored prefix" else 2 * BLOCK + 2)
    side.check(request)
    side.check_drained(engine)


def change_weights(model):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "in_proj" in name or "linear_qkv" in name:
                weight.mul_(1.25)


@defect(5, raises=WrongAnswer)
def test_05_weights_change(side, platform):
    """A trainer announces new weights by a generation epoch; KV and states of the old ones stay matchable."""
    side.model = build_hybrid_model("tiny", seed=5, platform=platform)
    engine = side.build()
    shared = random_tokens(3 * BLOCK, seed=1)
    side.serve(engine, shared + random_tokens(30, seed=2))
    change_weights(side.model)
    engine._generation_epoch = 1  # what the coordinator's SET_GENERATION_EPOCH does
    unrelated, _ = side.serve(engine, random_tokens(300, seed=3))
    assert_matches(side.reference, unrelated)  # the new weights are in use
    request, _ = side.serve(engine, shared + random_tokens(40, seed=4))
    side.check(request)
    side.check_drained(engine)


@defect(34, raises=WrongAnswer)
def test_34_weights_change_while_suspended(side, platform):
    """As trainers do: nothing is announced, and the engine resumes with other weights."""
    side.model = build_hybrid_model("tiny", seed=5, platform=platform)
    engine = side.build()
    shared = random_tokens(3 * BLOCK, seed=1)
    side.serve(engine, shared + random_tokens(30, seed=2))
    engine.suspend()
    change_weights(side.model)
    engine.resume()
    request, _ = side.serve(engine, shared + random_tokens(40, seed=4))
    side.check(request)
    side.check_drained(engine)


@defect(35, raises=WrongAnswer)
def test_35_a_replayed_decode_with_new_weights(side, platform, monkeypatch):
    """Megatron computes A again in the next eager decode after ``train()``. The replay of a graph runs no Python."""
    side.model = build_hybrid_model("tiny", seed=5, platform=platform)
    engine = side.build()
    side.serve(engine, random_tokens(300, seed=1), 8)

    def replayed(self: MambaMixer) -> torch.Tensor:
        return self._A_neg_exp_cache.view(-1, 1, 1).expand(-1, self.headdim, self.d_state)

    monkeypatch.setattr(MambaMixer, "_get_decode_A_neg_exp", replayed)
    side.model.train()
    with torch.no_grad():
        for name, weight in side.model.named_parameters():
            if name.endswith("A_log"):
                weight.add_(0.4)
    side.model.eval()
    engine._generation_epoch = 1
    request, _ = side.serve(engine, random_tokens(300, seed=2), 8)
    side.check(request)


# -- crashes -----------------------------------------------------------------------------------------------------------


@defect(6, raises=RuntimeError)
def test_06_live_requests_own_all_slots(side):
    """With the states of all slots belonging to live requests, the commit after a forward raises, and leaks slots."""
    engine = side.build(slots=2)
    finished: dict[int, Any] = {}
    for number in range(3):
        side.add(engine, random_tokens(300, seed=number))
    run_to_end(engine, finished)
    assert len(finished) == 3
    side.check(*finished.values())
    if side.ours:
        assert engine.context.prefix_stats().checkpoints_skipped == 1
    side.check_drained(engine)


@defect(7)
def test_07_decode_crosses_a_block_boundary_in_a_pool_of_cached_blocks(side):
    """Resuming a request that needs its next block counts raw free blocks, not those that could be evicted.

    With a pool full of cached blocks the only request is paused for good, and an assertion on active requests fails.
    """
    engine = side.build(slots=8, blocks=8)
    for number in range(7):  # each leaves one block cached
        side.serve(engine, random_tokens(BLOCK + 1, seed=number), 1)
    request, _ = side.serve(engine, random_tokens(BLOCK - 2, seed=10), 8)
    side.check(request)
    side.check_drained(engine)


@defect(8)
def test_08_matched_block_that_straddles_two_chunks(side):
    """Chunks that end inside a block: the block that a chunk began in a matched one is registered again by the next.

    Its parent then counts a child too many and never becomes a leaf, and evicting everything fails an assertion. (With
    no memory for states megatron does not align chunks to blocks.)
    """
    engine = side.build(slots=0, blocks=8, max_tokens=320, enable_chunked_prefill=True)
    prompt = random_tokens(900, seed=1)
    requests = [side.serve(engine, prompt)[0] for _ in range(2)]
    requests.append(side.serve(engine, random_tokens(7 * BLOCK + 10, seed=2))[0])  # needs every block
    side.check(*requests)
    side.check_drained(engine)


@pytest.mark.parametrize("full", ["requests", "tokens"])
@defect(10)
def test_10_overflow_takes_nothing(side, full):
    """``add_request`` pins and allocates blocks, and only then finds that there is no room for the request.

    It raises, and the blocks belong to nobody from then on: live requests do not hold them, eviction does not see them.
    """
    from megatron.core.inference.contexts.dynamic_context import RequestOverflowError, TokenOverflowError
    from megatron.core.inference.inference_request import DynamicInferenceRequest

    engine = side.build(max_requests=2, max_tokens=1024)
    shared = random_tokens(2 * BLOCK, seed=1)
    side.serve(engine, shared + random_tokens(10, seed=2))
    finished: dict[int, Any] = {}
    for number in range(2 if full == "requests" else 1):
        side.add(engine, random_tokens(300, seed=10 + number), 6)
    run_to_end(engine, finished, steps=2)
    request = DynamicInferenceRequest(
        request_id=1000,
        prompt_tokens=torch.tensor(shared + random_tokens(600 if full == "requests" else 1500, seed=3)),
        sampling_params=greedy(4),
        block_size_tokens=BLOCK,
        enable_prefix_caching=True,
    )
    before = side.available_blocks(engine)
    with pytest.raises(RequestOverflowError if full == "requests" else TokenOverflowError):
        engine.context.add_request(request)
    assert side.available_blocks(engine) == before
    run_to_end(engine, finished)
    side.check(*finished.values())
    side.check_drained(engine)


@defect(11, raises=ValueError)
def test_11_small_budget(side):
    """States on their way into the cache have a scratch buffer inside the budget, sized by ``max_tokens``.

    A budget of eight states at 4,096 tokens a step (16 slots of scratch) is a ValueError at start-up.
    """
    engine = side.build(gb=8.5 * side.slot_bytes / 2**30, max_tokens=4096)
    prompt = random_tokens(2 * BLOCK + 40, seed=1)
    side.serve(engine, prompt)
    request, computed = side.serve(engine, prompt)
    assert computed == 40
    side.check(request)
    side.check_drained(engine)


@defect(31, raises=RuntimeError)
def test_31_evicting_after_a_capture(side):
    """Capturing ends with a reset in inference mode, which makes the list of free state slots anew, as an inference tensor.

    Requests are scheduled in whatever mode the caller is in. Megatron's older scripts enter inference mode for good;
    ``MegatronLLM`` and its thread do not, and there the first eviction of a block with a state raises.
    """
    engine = side.build(slots=8, blocks=8)
    with torch.inference_mode():
        engine.context.reset()  # as `create_cuda_graphs` does, which needs a GPU
    requests = [side.serve(engine, random_tokens(3 * BLOCK + 10, seed=number), 1)[0] for number in range(4)]
    side.check(*requests)
    side.check_drained(engine)


@pytest.mark.parametrize("management", ["persist", "offload", "recompute"])
@defect(36, raises=(TensorStateDeallocatedError, AttributeError))
def test_36_reset_while_suspended(side, management):
    """It says that it runs, and the next forward finds no buffers; with RECOMPUTE the reset itself fails."""
    engine = side.build(kv_cache_management_mode=KVCacheManagementMode(management))
    side.serve(engine, random_tokens(300, seed=1))
    engine.suspend()
    engine.reset()
    engine.resume()
    request, _ = side.serve(engine, random_tokens(300, seed=1))
    side.check(request)
    side.check_drained(engine)
