"""Runs one scenario on two engines: megatron-core's own prefix cache, which may have a defect, and this package's cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY
from tests.harness.defects import expected
from tests.harness.engine_helpers import assert_matches, greedy, kv_budget, run_to_end, state_bytes
from tests.harness.limits import THREADS
from tests.harness.naive_model import NaiveHybridModel

BLOCK = 256  # tokens of a KV block, megatron's default


class WrongAnswer(Exception):
    """An answer differs from the model's. Not an AssertionError, so that other failures cannot count as the defect."""


def defect(number: int, raises: type[Exception] | tuple[type[Exception], ...] = AssertionError) -> pytest.MarkDecorator:
    """Runs a test with a ``side`` of each kind: ours has to pass, megatron's does what `expected` says."""
    upstream = pytest.param("upstream", marks=expected(number, raises))
    return pytest.mark.parametrize("side", [upstream, "ours"], indirect=True)


def make_side(request: pytest.FixtureRequest, model: Any) -> Iterator[Side]:
    """The body of a test module's fixture ``side``: a `Side` of the kind that `defect` sets."""
    from megatron_hybrid_prefix.mcore import restore_mixers

    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)  # a model this small is slower with more, and far slower beside other processes
    yield Side(request.param, model)
    torch.set_num_threads(threads)
    restore_mixers(model)  # shared with tests of other modules


class Side:
    """Builds engines of one kind, "upstream" or "ours", for a model, and knows the right answers."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind = kind
        self.model = model
        self._next_id = 0

    @property
    def ours(self) -> bool:
        """Whether the engines have this package's cache."""
        return self.kind == "ours"

    @property
    def slot_bytes(self) -> int:
        """Bytes of one recurrent state."""
        return state_bytes(self.model)

    @property
    def reference(self) -> NaiveHybridModel:
        """The model in float64, token by token."""
        return NaiveHybridModel(self.model, self.model.hybrid_config)

    def build(
        self,
        slots: int = 32,
        *,
        gb: float | None = None,
        blocks: int | None = None,
        state_dtype: str | None = None,
        eviction_policy: str = DEFAULT_EVICTION_POLICY,
        **fields: Any,
    ) -> Any:
        """An engine with room for ``slots`` states, or for ``gb`` of them. Megatron's gets its scratch in addition.

        ``state_dtype`` and ``eviction_policy`` are for this package's engine only.
        """
        from megatron_hybrid_prefix.mcore import restore_mixers
        from megatron_hybrid_prefix.upstream.blocks import block_counts

        fields = {"max_sequence_length": 4096, "max_requests": 8, "max_tokens": 4096} | fields
        block_tokens = fields.get("block_size_tokens", BLOCK)
        sizes = {
            "block_tokens": block_tokens,
            "max_requests": fields["max_requests"],
            "speculative_tokens": fields.get("num_speculative_tokens", 0),
        }
        if blocks is not None:
            fields |= kv_budget(self.model, blocks, **sizes)
        if self.ours:
            gb = slots * self.slot_bytes / 2**30 if gb is None else gb
            prefix = HybridPrefixConfig(
                mamba_gb=gb, state_dtype=state_dtype, eviction_policy=eviction_policy, retention_interval_tokens=0
            )
            engine = build_engine(self.model, prefix, **fields)
        else:
            restore_mixers(self.model)
            if gb is None:
                scratch = min(math.ceil(fields["max_tokens"] / block_tokens), 3 * fields["max_requests"])
                gb = (slots + scratch + 0.5) * self.slot_bytes / 2**30 if slots else None
            engine = build_engine(self.model, enable_prefix_caching=True, prefix_caching_mamba_gb=gb, **fields)
            assert blocks is None or block_counts(engine.context.kv_block_allocator).total == blocks + 1
        return engine

    def add(self, engine: Any, prompt: list[int], count: int = 4, **attributes: Any) -> int:
        """Queues a greedy request; ``attributes`` are set on its sampling parameters. Returns its id."""
        self._next_id += 1
        params = greedy(count)
        params.add_attributes(attributes)
        engine.add_request(self._next_id, prompt, params)
        return self._next_id

    def serve(self, engine: Any, prompt: list[int], count: int = 4, **attributes: Any) -> tuple[Any, int]:
        """Runs one request alone, to its end. Returns it, and how many tokens of its prompt were computed."""
        before = computed_tokens(engine)
        request_id = self.add(engine, prompt, count, **attributes)
        finished: dict[int, Any] = {}
        run_to_end(engine, finished)
        return finished[request_id], computed_tokens(engine) - before

    def check(self, *requests: Any) -> None:
        """Raises `WrongAnswer` if an answer differs from the reference's, with 1e-5 for log-probs."""
        reference = self.reference
        for request in requests:
            try:
                assert_matches(reference, request)
            except AssertionError as error:
                raise WrongAnswer(f"request {request.request_id}: {error}") from None

    def check_drained(self, engine: Any) -> None:
        """Checks that all requests are gone and nothing leaked."""
        from megatron_hybrid_prefix.upstream.blocks import block_counts

        context = engine.context
        assert not engine.has_unfinished_requests()
        assert self.available_blocks(engine) == block_counts(context.kv_block_allocator).total - 1
        assert context.mamba_metadata.mamba_state_free_slot_count == context.max_requests
        if self.ours:
            context.check_integrity()

    def available_blocks(self, engine: Any) -> int:
        """KV blocks that are free or can be evicted."""
        from megatron_hybrid_prefix.upstream.blocks import available_blocks

        allocator = engine.context.kv_block_allocator
        return available_blocks(allocator) + (0 if self.ours else int(allocator.get_evictable_block_count()))


def computed_tokens(engine: Any) -> int:
    """Prompt tokens computed since the engine was built or reset."""
    return engine.context.lifetime_prefill_token_count


class Work(TorchFunctionMode):
    """Counts the work inside: Python lines that run, and elements of the tensors and lists that torch returns.

    This measures growth independently of the machine. Loops inside built-in functions are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.amount = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.amount += result.numel()
        elif isinstance(result, list):
            self.amount += len(result)
        return result

    def __enter__(self) -> Work:
        self._trace_before = sys.gettrace()
        super().__enter__()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(self._trace_before)
        super().__exit__(*error)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        self.amount += event == "line"
        return self._trace
