"""KV of tokens that are computed again, because no state was kept: it is shared, read, and not written again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.requests.book import is_prefilling
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens


def most_held(served: EngineHarness) -> int:
    """Runs to the end. Returns the most blocks that requests held after a step."""
    most = 0
    while served.engine.has_unfinished_requests():
        served.step()
        most = max(most, served.held_blocks)
    return most


@pytest.mark.parametrize(
    ("prompt", "slots", "held"),
    [(tokens(1, 0, seed=1), 32, 5), (tokens(2, 32, seed=2), 0, 6)],  # megatron's own cache holds as many
    ids=["one block", "no state budget"],
)
def test_equal_prompts_hold_their_kv_once(tiny, prompt, slots, held):
    served = EngineHarness(tiny, slots=slots)
    for _ in range(4):
        served.add(prompt, 4)
    assert most_held(served) == held
    served.add(prompt, 4)
    assert most_held(served) == held - 3
    stats = served.context.prefix_stats()
    assert stats.computed_prompt_tokens == stats.prompt_tokens == 5 * len(prompt)  # no token was skipped
    served.finish()


class Junction:
    """A prompt whose only state is after 5 blocks decodes; two others, which share 3 and 4 of its blocks, come beside it."""

    def __init__(self, model: Any, **fields: Any) -> None:
        self.served = served = EngineHarness(model, **fields)
        prompt = random_tokens(5 * BLOCK + 20, seed=1)
        first = served.add(prompt, 30)
        while first not in served.cache.live or [i for i, live in served.cache.live.items() if is_prefilling(live)]:
            served.step()
        self.blocks = list(tuple(served.cache.live[first].block_ids)[:5])
        self.before = self.content()
        self.tables: dict[int, list[int]] = {}
        for blocks, own in ((3, 70), (4, 5)):
            number = served.add(prompt[: blocks * BLOCK] + random_tokens(own, seed=own), 4)
            self.tables[number] = self.blocks[:blocks]

    def content(self) -> torch.Tensor:
        """KV of the prompt's blocks, a copy."""
        return self.served.context.memory_buffer[:, :, self.blocks].clone()

    def run(self) -> None:
        """Runs to the end, and checks that the two read the blocks and that nobody wrote them."""
        served, requests = self.served, self.served.cache.live
        while served.engine.has_unfinished_requests():
            served.step()
            for number, shared in self.tables.items():
                if number in requests and not is_prefilling(requests[number]):
                    assert requests[number].block_ids[: len(shared)] == shared
        assert torch.equal(self.content(), self.before)
        assert served.context.prefix_stats().lost_tokens_no_state >= 3 * BLOCK


CASES = {
    "whole": {},
    # The running request takes a token of each step, so chunks end inside blocks.
    "chunks": {"enable_chunked_prefill": True, "max_tokens": 128},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_shared_blocks_are_read_and_not_written(tiny, fields):
    case = Junction(tiny, **fields)
    case.run()
    case.served.finish()


# -- mutants -----------------------------------------------------------------------------------------------------------


def reads_the_dummy_block(context: Any, row: int, shared: slice, stored: torch.Tensor) -> None:
    context.request_to_kv_block_ids[row, shared] = context.kv_block_allocator.dummy_block_idx


def reads_other_blocks(context: Any, row: int, shared: slice, stored: torch.Tensor) -> None:
    context.request_to_kv_block_ids[row, shared] = context.request_to_kv_block_ids[row, shared].roll(1)


def writes_other_blocks(context: Any, row: int, shared: slice, stored: torch.Tensor) -> None:
    blocks = context.request_to_kv_block_ids[row, shared].roll(1).long()
    context.token_to_block_idx[stored] = blocks[context.token_to_pos_ids[stored] // BLOCK - shared.start]


@pytest.mark.parametrize(
    "mutant",
    [None, reads_the_dummy_block, pytest.param(reads_other_blocks, marks=pytest.mark.slow), writes_other_blocks],
)
def test_mutants_change_answers(tiny, mutant: Callable[..., None] | None, monkeypatch):
    served = Junction(tiny).served
    context, add = served.context, served.context.add_admitted
    sharers = 0

    def damaged(req: Any, chunk_tokens: int, chunk: Any) -> None:
        nonlocal sharers
        row, first = context.total_request_count, context.active_token_count
        add(req, chunk_tokens, chunk)
        computed = torch.arange(first, context.active_token_count)
        stored = computed[context.token_to_pos_ids[computed] < chunk.stored_tokens]
        sharers += len(stored) > 0
        if len(stored) and mutant is not None:
            mutant(context, row, slice(chunk.skip_tokens // BLOCK, chunk.stored_tokens // BLOCK), stored)

    monkeypatch.setattr(context, "add_admitted", damaged)
    monkeypatch.setattr(served, "check_integrity", lambda: None)  # answers alone must show it
    served.run()
    assert sharers == 2
    if mutant is None:
        served.check()
    else:
        with pytest.raises(AssertionError):
            served.check()
