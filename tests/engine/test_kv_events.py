"""Megatron's events of cached KV, which a router listens to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_hybrid_prefix.upstream.capabilities import form_of
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, tokens
from tests.harness.selection import mostly_slow
from tests.harness.shared_tiers import Folder, written

pytestmark = pytest.mark.skipif(
    form_of("events of cached KV") == "no", reason="nobody can listen to megatron's prefix cache before #5860"
)


class Router:
    """Knows what is cached from events alone: of each block's hash all tokens up to its end."""

    def __init__(self, served: EngineHarness) -> None:
        self.prompts: dict[int, list[int]] = {}
        self.kinds: list[str] = []
        self.observed: set[int] = set()
        served.context.dynamo_helper.add_kv_event_listener(self)
        served.context.kv_block_allocator.add_blocks_deregistered_observer(
            lambda _, hashes: self.observed.update(hashes)
        )

    def __call__(self, kind: str, event: dict[str, Any]) -> None:
        self.kinds.append(kind)
        if kind == "cleared":
            self.prompts.clear()
        for number in event.get("block_hashes", ()) if kind == "removed" else ():
            del self.prompts[number]
        if kind == "stored":
            before = [] if event["parent_hash"] is None else self.prompts[event["parent_hash"]]
            ends = np.cumsum(event["num_block_tokens"])
            assert ends[-1] == len(event["token_ids"])
            for number, end in zip(event["block_hashes"], ends, strict=True):
                self.prompts[number] = before + event["token_ids"][:end]


def cached(served: EngineHarness) -> set[int]:
    """Hashes of all cached blocks."""
    return {int.from_bytes(node.key[:8]) >> 1 for node in served.cache.nodes()}


@pytest.mark.parametrize("mode", mostly_slow(MODES, "async"))
@pytest.mark.parametrize("chunked", [False, True])
def test_a_router_knows_what_is_cached(model, mode, chunked):
    """Prompts in chunks, blocks that decoding fills, a second turn, and what another request had cached before."""
    fields = {"enable_chunked_prefill": True, "max_tokens": 2 * BLOCK} if chunked else {}
    served = EngineHarness(model, async_sched_mode=mode, **fields)
    router = Router(served)
    first = served.send(tokens(4, 40, seed=1), count=BLOCK)
    said = [*first.prompt_tokens.tolist(), *first.generated_tokens]
    served.send(said + tokens(1, 9, seed=2))
    served.send(tokens(2, 40, seed=1) + tokens(1, 0, seed=3))
    served.send(tokens(2, 3, seed=4), cache_write=False)
    assert router.prompts.keys() == cached(served)
    assert said[: 5 * BLOCK] in router.prompts.values()
    assert {len(prompt) % BLOCK for prompt in router.prompts.values()} == {0}
    served.engine.invalidate()
    assert router.kinds[-1] == "cleared" and not cached(served) and not router.prompts
    served.send(tokens(2, 3, seed=1))
    assert len(router.prompts) == 2 and router.prompts.keys() == cached(served)
    served.check(served.next_id)


@pytest.mark.parametrize("host_gb", [0.0, 0.001])
def test_a_router_knows_what_is_evicted(model, host_gb):
    """What the host still has counts as cached."""
    served = EngineHarness(model, blocks=9, host_gb=host_gb)
    router, all_hashes = Router(served), set()
    for seed in [*range(6), 0, 3]:
        served.send(tokens(2, 9, seed=seed), count=BLOCK)
        assert router.prompts.keys() == cached(served)
        all_hashes |= cached(served)
    stats = served.cache.stats()
    assert stats.kv_evictions > 3 and "removed" in router.kinds
    assert len(router.prompts) > served.cache.memory_use().total_blocks or not host_gb
    assert router.observed >= all_hashes - cached(served) and router.observed


@pytest.mark.parametrize("cache_write", [True, False])
def test_a_router_knows_what_another_engine_computed(model, cache_write, monkeypatch, tmp_path):
    """Blocks that are fetched from a shared folder are cached here, too."""
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    prompt, shared = tokens(4, 9, seed=1), Folder(tmp_path / "cache", monkeypatch).url()
    first = EngineHarness(model, host_gb=0.01, shared=shared)
    first.send(prompt)
    written(first)
    served = EngineHarness(model, host_gb=0.01, shared=shared)
    router = Router(served)
    assert served.send(prompt + tokens(2, 0, seed=2), cache_write=cache_write).num_cached_tokens == 4 * BLOCK
    assert router.prompts.keys() == cached(served) and prompt[: 4 * BLOCK] in router.prompts.values()
    first.finish()
    served.finish()


def test_what_is_removed_in_the_step_that_stored_it_was_stored_first(model):
    """Megatron tells what is stored at the end of a step, and what is removed at once."""
    served = EngineHarness(model)
    router, key = Router(served), bytes(16)
    served.context.kv_stored([key], list(range(BLOCK)), None)
    served.context.kv_removed(key)
    assert router.kinds == ["stored", "removed"] and not router.prompts and router.observed == {0}


def test_events_of_a_step_that_raised_are_not_told(model, monkeypatch):
    served = EngineHarness(model)
    router = Router(served)
    served.add(tokens(2, 9, seed=1))
    monkeypatch.setattr(served.engine.controller, "_dynamic_step_sample_logits", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served.engine.step_modern()
    monkeypatch.undo()
    served.engine.reset()
    served.send(tokens(2, 9, seed=2))
    assert router.prompts.keys() == cached(served) and "cleared" in router.kinds


def test_a_listener_that_raises_stops_nothing(model):
    served = EngineHarness(model)
    served.context.dynamo_helper.add_kv_event_listener(lambda kind, event: 1 / 0)
    served.send(tokens(2, 9, seed=1))
    served.check()
