"""An engine with this package's cache that is checked after every step, and the right answers of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.upstream.blocks import available_blocks, block_counts
from tests.harness.engine_helpers import assert_matches, greedy, kv_budget, random_tokens, state_bytes
from tests.harness.naive_model import NaiveHybridModel

BLOCK = 64  # tokens of a KV block
MODES = ("legacy", "async")
MANY = 32  # checkpoints


class IdTokenizer:
    """Token ids as decimal numbers; so any token can be a stop word."""

    vocab_size = 512
    bos = eod = None

    def tokenize(self, text: str) -> list[int]:
        """Ids of "5 17"."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The reverse."""
        return " ".join(map(str, tokens))


_ANSWERS: dict[tuple[Any, tuple[int, ...], int], list[int]] = {}


def known_answer(plain: EngineHarness, prompt: list[int], count: int) -> list[int]:
    """The greedy answer of an engine without a cache, computed once: many tests draft from the same answer."""
    key = plain.model, tuple(prompt), count
    if key not in _ANSWERS:
        _ANSWERS[key] = list(plain.send(prompt, count=count).generated_tokens)
    return _ANSWERS[key]


class EngineHarness:
    """An engine, its finished requests, and their right answers.

    There is room for ``slots`` checkpoints (None: caching off) beside ``blocks`` KV blocks (by default many), of which
    ``paused_blocks`` are for paused requests. Without ``slots`` checkpoints are in these blocks. ``fields`` are those of megatron's
    ``InferenceConfig`` and of `HybridPrefixConfig` (no interval checkpoints by default), and ``tokenizer``.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int | None = MANY,
        blocks: int | None = None,
        paused_blocks: int = 0,
        build: Callable[..., Any] = build_engine,
        **fields: Any,
    ) -> None:
        self.model = model
        fields = {
            "max_sequence_length": 1024,
            "max_requests": 4,
            "max_tokens": 1024,
            "buffer_size_gb": 0.01,
            "block_size_tokens": BLOCK,
            "async_sched_mode": "legacy",  # tests count its steps, on a GPU, too
        } | fields
        sizes = {
            "block_tokens": fields["block_size_tokens"],
            "max_requests": fields["max_requests"],
            "speculative_tokens": fields.get("num_speculative_tokens", 0),
        }
        own = {name: fields.pop(name) for name in HybridPrefixConfig.__dataclass_fields__ if name in fields}
        capped = slots is not None and "cache_gb" not in own and (blocks is None or slots != MANY)
        memory = {"mamba_gb": slots * state_bytes(model) / 2**30} if capped else {}
        if blocks is not None:
            fields |= kv_budget(model, blocks, paused_blocks=paused_blocks, **sizes)
        # Checkpoints that no test expects would have to be counted in each.
        own = memory | {"retention_interval_tokens": 0} | own
        prefix = None if slots is None else HybridPrefixConfig(**own)
        self.engine = build(model, prefix, **fields)
        self.context = self.engine.context
        if blocks is not None and slots is None:
            assert block_counts(self.context.kv_block_allocator)[:2] == (blocks + 1, paused_blocks)
        self.caching = prefix is not None
        self.finished: dict[int, Any] = {}
        self.records: dict[int, Any] = {}
        self.next_id = 0

    @property
    def cache(self) -> Any:
        """The `HybridPrefixCache`."""
        return self.context.prefix_cache

    @property
    def reference(self) -> NaiveHybridModel:
        """The model with its current weights, in float64."""
        return NaiveHybridModel(self.model, self.model.hybrid_config)

    def add(self, prompt: list[int], count: int = 4, *, params: dict[str, Any] | None = None, **attributes: Any) -> int:
        """Queues a greedy request of ``count`` tokens. ``attributes`` are set on its sampling parameters."""
        self.next_id += 1
        sampling = greedy(count, **(params or {}))
        sampling.add_attributes(attributes)
        self.engine.add_request(self.next_id, prompt, sampling)
        return self.next_id

    def step(self, count: int = 1) -> list[int]:
        """Runs a number of steps. Returns the ids of requests that finished."""
        ids = []
        for _ in range(count):
            records = self.engine.step_modern()["finished_request_records"]
            ids += [record.request_id for record in records]
            self.records |= {record.request_id: record for record in records}
            self.finished |= {record.request_id: record.merge() for record in records}
            self.check_integrity()
        return ids

    def run(self) -> None:
        """Steps to the end."""
        self.step_until(lambda: not self.engine.has_unfinished_requests())

    def step_until(self, holds: Callable[[], object]) -> None:
        """Steps until something holds."""
        for _ in range(2000):
            if holds():
                return
            self.step()
        raise AssertionError("2,000 steps were not enough")

    def send(self, *prompts: list[int], count: int = 4, **attributes: Any) -> Any:
        """Adds prompts together and runs them to the end. Returns the last one's request."""
        ids = [self.add(prompt, count, **attributes) for prompt in prompts]
        self.run()
        return self.finished[ids[-1]]

    def suspend_and_resume(self) -> None:
        """Suspends and resumes, as a trainer does between two phases."""
        self.engine.suspend()
        self.engine.resume()
        self.check_integrity()

    def check(self, *ids: int, tolerance: float = 1e-5) -> None:
        """Checks that finished requests (default: all) are complete, with the answers of the current weights."""
        reference = self.reference
        requests = [self.finished[number] for number in ids] or self.finished.values()
        # The longest first: the reference of what begins it is known then.
        for request in sorted(requests, key=lambda request: -request.prompt_tokens.numel()):
            assert len(request.generated_tokens) == request.sampling_params.num_tokens_to_generate
            if self.caching:
                assert request.sampling_params.cache_reuse["resume_tokens"] == request.num_cached_tokens
            assert_matches(reference, request, tolerance)

    def check_integrity(self) -> None:
        """The cache's own check."""
        if self.caching:
            self.context.check_integrity()

    def check_drained(self) -> None:
        """Checks that nothing runs, and that no block, slot or entry is held."""
        engine, context = self.engine, self.context
        assert not engine.has_unfinished_requests()
        assert not engine.requests
        assert not engine.stop_word_finished_request_ids
        assert context.mamba_metadata.mamba_state_free_slot_count == context.max_requests
        allocator = context.kv_block_allocator
        assert available_blocks(allocator) == block_counts(allocator).total - 1
        if self.caching:
            assert self.kept_states == self.cache.stats().slots_used
            self.check_integrity()

    def finish(self) -> None:
        """Runs to the end. Checks all answers, and that nothing is held."""
        self.run()
        self.check()
        self.check_drained()

    @property
    def kept_states(self) -> int:
        """Checkpoints that can be resumed from."""
        return len(list([node for node in self.cache.nodes() if node.slot >= 0]))

    @property
    def held_blocks(self) -> int:
        """KV blocks that live requests hold."""
        if self.caching:
            return self.cache.memory_use().held_blocks
        allocator = self.context.kv_block_allocator
        return block_counts(allocator).total - 1 - available_blocks(allocator)

    @property
    def live_slots(self) -> int:
        """State slots of live requests."""
        return self.context.max_requests - self.context.mamba_metadata.mamba_state_free_slot_count


def raising(error: BaseException | type[BaseException], before: Callable[[], object] = lambda: None) -> Any:
    """A function that raises, whatever its arguments are; first it calls ``before``."""

    def raises(*args: Any, **kwargs: Any) -> Any:
        before()
        raise error

    return raises


def tokens(blocks: int, own: int, seed: int) -> list[int]:
    """A prompt of this many blocks and ``own`` more tokens."""
    return random_tokens(blocks * BLOCK + own, seed=seed)
