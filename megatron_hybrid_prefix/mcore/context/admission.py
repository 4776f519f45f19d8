"""`Admissions`: admits prompts to a context with a cache: match, check for room, admit, plan the next step."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.hints import Hints, Pin
from megatron_hybrid_prefix.mcore.context.request import KnownRequests, PrefixRequest, StepState
from megatron_hybrid_prefix.metrics import NotReused
from megatron_hybrid_prefix.requests.matcher import Match
from megatron_hybrid_prefix.upstream.context import AdmittedChunk, ChunkBlocks
from megatron_hybrid_prefix.upstream.names import (
    BlockOverflowError,
    ContextOverflowError,
    DynamicInferenceRequest,
    RequestOverflowError,
    TokenOverflowError,
)

logger = logging.getLogger(__name__)

# Warn if this many first prompts are all shorter than a block.
_SHORT_PROMPTS = 64


class LostLoad(TokenOverflowError):
    """A load found no room, and without it the step has too few tokens: the request starts in a later one, without a load."""


class Admissions:
    """Admits prompts to a `HybridPrefixContext`, whole or chunk by chunk."""

    def __init__(self, context: Any, cache: HybridPrefixCache, requests: KnownRequests, step: StepState) -> None:
        self._context, self._cache, self._requests, self._step = context, cache, requests, step
        self._short_prompts = 0

    def blocks_of_chunk(self, req: DynamicInferenceRequest, chunk_tokens: int) -> ChunkBlocks:
        """Blocks that the next chunk of a prompt shares, and tokens that it skips."""
        if req.finished_chunk_token_count:
            return ChunkBlocks([], 0)
        match, resume_tokens, _ = self._match(req, chunk_tokens)
        return ChunkBlocks(list(match.block_ids), resume_tokens)

    def room_for(self, req: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
        """Whether there is room for the request, its tokens, its KV. Read-only."""
        context, length = self._context, req.remaining_prompt_length
        rows = context.total_request_count < context.max_requests and context.paused_request_count == 0
        if req.finished_chunk_token_count:
            tokens = context.active_token_count + length <= context.max_tokens
            return rows, tokens, context.chunk_needs(req, length)[0] <= self._cache.blocks.available_count
        match, resume_tokens, loads = self._match(req, length)
        tokens = context.active_token_count + length - resume_tokens <= context.max_tokens
        load_of = req.request_id if loads else None
        return rows, tokens, self._cache.can_admit(match, length_tokens=length, load_of=load_of)

    def admit(self, req: DynamicInferenceRequest, length: int) -> None:
        """Admit the next ``length`` tokens of a prompt: allocate blocks, add a row, plan its part of the next step.

        Raises:
            ContextOverflowError: There is no room, or none for a load (`LostLoad`); nothing is taken.
            ValueError: The chunk is empty, or longer than the rest of the prompt.
        """
        if not 0 < length <= req.remaining_prompt_length:
            raise ValueError(
                f"request {req.request_id}: a chunk of {length} of {req.remaining_prompt_length} prompt tokens"
            )
        context, cache, request_id = self._context, self._cache, req.request_id
        known = self._requests.of(req)
        first = not req.finished_chunk_token_count
        chunk = self._admit_first(req, known, length) if first else self._grow(req, length)
        row = context.total_request_count
        try:
            context.add_admitted(req, length, chunk)
            if first:
                context.states.live.bind(int(context.live_indices[row]), cache.live[request_id].live_slot)
        except BaseException:
            # Room was checked, so this is a caller's error. Nothing may leak.
            if first:
                cache.release(request_id, comes_back=True)
            raise
        if first and not known.counted_tokens:
            req.num_cached_tokens = chunk.skip_tokens
        start = int(context.request_kv_length_offsets[row])
        plan = cache.plan(request_id, start, start + int(context.request_query_lengths[row]))
        self._step.parts[request_id] = known, plan
        context.decisions.note(
            lambda: (
                f"request {request_id} shares KV blocks {chunk.shared}, gets {chunk.own}, computes [{start}, "
                f"{plan.end_tokens}) from slot {plan.source_slot}, keeps "
                f"{[(c.position_tokens, c.slot) for c in plan.checkpoints]}"
            )
        )

    def _match(self, req: DynamicInferenceRequest, length: int) -> tuple[Match, int, bool]:
        """What the request reuses if its first ``length`` tokens are admitted now: the match, where it resumes, whether with a load.

        A hit needs a slot more than a miss, the one that it starts from. If nothing runs, no memory
        becomes free: a request that only fits without its load, or without the hit, does without.
        """
        cache, known, request_id = self._cache, self._requests.of(req), req.request_id
        match = known.match(cache, length)
        source = None if known.gave_up_fetch else cache.loads.source(request_id, match)
        alone = not (self._context.total_request_count or cache.live)
        # Megatron asks again for a first chunk, which may be shorter, if all of a prompt did not fit with its load.
        if (
            source is not None
            and source.depth_tokens < length
            and (not alone or cache.can_admit(match, length_tokens=length, load_of=request_id))
        ):
            return match, source.depth_tokens, True
        if alone and match.source_slot is not None and not cache.can_admit(match, length_tokens=length):
            reuse = replace(match.reuse, reason=NotReused.MEMORY, resume_tokens=0)
            match = replace(cache.match(known.chain, read=False), reuse=reuse)
        return match, match.resume_tokens, False

    def _admit_first(self, req: DynamicInferenceRequest, known: PrefixRequest, length: int) -> AdmittedChunk:
        match, resume_tokens, loads = self._match(req, length)
        self._check_room(req, length - resume_tokens)
        admission = self._cache.admit(
            req.request_id,
            match,
            load=loads,
            length_tokens=length,
            write=known.write,
            verify_at_tokens=known.verify_at_tokens,
            breakpoints=(*known.breakpoints, *known.wanted),
            counted_tokens=known.counted_tokens,
            hints=known.hints if self._context.group_of is None else self._with_group(known, match),
        )
        if admission is None:
            raise BlockOverflowError(req.request_id)
        if self._context.active_token_count + length - admission.resume_tokens > self._context.max_tokens:
            self._cache.release(req.request_id, comes_back=True)
            known.gave_up_fetch = True
            raise LostLoad(req.request_id)
        if not known.counted_tokens:
            # A client of the coordinator gets no other field that megatron does not know.
            req.sampling_params.cache_reuse = asdict(admission.reuse)
        if known.top_n is not None:
            self._context.scored.begin(known, req.prompt_tokens, admission.reuse)
            req.prompt_log_probs = req.prompt_top_n_logprobs = None  # the request may have started over
        if admission.load is not None:
            self._context.moves.launch()  # as early as can be
        if admission.reuse.reason is NotReused.BELOW_ONE_BLOCK:
            self._watch_lengths()
        return AdmittedChunk(
            shared=list(admission.block_ids[: admission.shared_blocks]),
            own=list(admission.block_ids[admission.shared_blocks :]),
            skip_tokens=admission.resume_tokens,
            stored_tokens=admission.stored_tokens,
            resumes=admission.source_slot is not None,
        )

    def _with_group(self, known: PrefixRequest, match: Match) -> Hints:
        """What the caller says, and what the queue shows: samples of this prompt that wait for the same state."""
        hints, limit = known.hints, match.chain.tokens - self._cache.settings.min_computed_tokens
        said = known.counted_tokens or any(pin.uses for pin in hints.pins)
        if said or limit - match.resume_tokens < self._cache.block_tokens or not known.write:
            return hints
        others = self._context.group_of(known)
        return replace(hints, pins=(*hints.pins, Pin(uses=others))) if others else hints

    def _watch_lengths(self) -> None:
        """Warn once if all prompts are shorter than a block: such a workload never hits."""
        self._short_prompts += 1
        stats = self._cache.counters
        only_short = stats.not_reused[NotReused.BELOW_ONE_BLOCK] == sum(stats.not_reused.values())
        if self._short_prompts == _SHORT_PROMPTS and only_short and not stats.reused_tokens:
            logger.warning(
                "the first %d prompts have at most %d tokens: none fills a block before its last token, nothing is "
                "reused; use a smaller block_size_tokens",
                _SHORT_PROMPTS,
                self._cache.block_tokens,
            )

    def _grow(self, req: DynamicInferenceRequest, length: int) -> AdmittedChunk:
        self._check_room(req, length)
        grown = self._cache.grow(req.request_id, req.finished_chunk_token_count + length)
        if grown is None:
            raise BlockOverflowError(req.request_id)
        return AdmittedChunk(
            shared=grown.shared, own=grown.own, skip_tokens=0, stored_tokens=grown.stored_tokens, resumes=False
        )

    def _check_room(self, req: DynamicInferenceRequest, computed_tokens: int) -> None:
        """Check first: megatron raises these errors after it has allocated blocks, and leaks them."""
        context = self._context
        if context.total_request_count >= context.max_requests:
            raise RequestOverflowError(req.request_id)
        if context.active_token_count + computed_tokens > context.max_tokens:
            raise TokenOverflowError(req.request_id)
        if not req.finished_chunk_token_count and context.mamba_metadata.mamba_state_free_slot_count == 0:
            raise ContextOverflowError(req.request_id, "no live state slot is free")
