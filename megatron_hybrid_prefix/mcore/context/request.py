"""`PrefixRequest`: what the context knows about a megatron request: its keys, cache options and match. `RequestLoads`: its loads.
`StepState`: what it knows of its next or running forward.

Set cache options as attributes of a request's sampling parameters (``sampling_params.add_attributes({...})``). So they pass
through megatron's data-parallel coordinator:

- ``cache_salt``: requests with different salts share nothing (tenants);
- ``cache_adapter``: name of the adapter that the request runs with; requests with different adapters share nothing;
- ``cache_read``: False: reuse nothing;
- ``cache_write``: False: cache nothing that the request computes;
- ``cache_breakpoints``: a sequence of ints, positions in the prompt up to which other prompts share it (such as the end of a
  system prompt or document). The state there is checkpointed on first sight. Each is rounded down to the end of a block.
  Any order; positions beyond the prompt are ignored.
- ``cache_session``: ``{"id": text, "end": bool}``, the request's session among those of its salt, and whether that is over with it.
  What only sessions used that are over goes first when memory is short;
- ``cache_uses``: how many more times this prompt will come, alone or as the beginning of another. Its state is kept until then;
- ``cache_pin``: ``{"requests": n}`` or ``{"seconds": s}``, for how many requests of its salt, or how long, the prompt is kept; with
  ``"tokens": n`` only its beginning;
- ``cache_ttls``: pairs of a breakpoint and the seconds for which it is kept. They are dropped if they find no room; a ``cache_pin`` is
  an error then;
- ``cache_tenant``: whose share of the memory these take; its salt if it is not set;
- ``cache_now``: the time in seconds, by one clock for all requests. Without it an engine of one rank reads its own;
- ``cache_reuse``: no option, but what comes back the same way: what the request reused, as a dict with the fields of `Reuse`.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import shown
from megatron_hybrid_prefix.index.hints import Hints, Pin
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.mcore.context.scored_prompt import ScoredPrompt
from megatron_hybrid_prefix.requests.book import Load, StepPlan
from megatron_hybrid_prefix.requests.explain import Explanation, Question
from megatron_hybrid_prefix.requests.matcher import Match
from megatron_hybrid_prefix.requests.scores import ScoreTable
from megatron_hybrid_prefix.sampling import check_integer, check_number
from megatron_hybrid_prefix.tiers.units import LoadState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefixRequest:
    """The context's record of one request.

    Attributes:
        prompt: (tokens,) the prompt.
        chain: Its keys.
        scores: Log-probs of cached prompts. With ``top_n`` it resumes only where its own are kept.
        read: Whether the request may reuse cached prefixes.
        write: Whether what it computes may be cached.
        breakpoints: Token positions up to which other prompts share this one.
        hints: What its caller knows of the future.
        wanted: Positions whose state other requests wait for.
        take_sample: Called once, at the first hit: whether to recompute and compare this hit.
        verify_at_tokens: Position to verify; 0: none.
        last: The last match.
        top_n: The request wants the log-probs of its prompt, with so many most likely tokens per position; None: it does not,
            or none are kept.
        scores_version: Version of ``scores`` at the time of the last match.
        scored: Its prompt's log-probs, from its admission on; None without ``top_n``.
        counted_tokens: Tokens that the statistics have: forwards of them, or of the request that it continues, were published.
        gave_up_fetch: Whether a load from below the host was late or missing, or any found no room. The request tries no other.
        deadline_s: Until when it waits for the tier below the host (`time.monotonic` of this rank); None: it does not.
    """

    prompt: NDArray[np.int64]
    chain: KeyChain
    scores: ScoreTable
    read: bool
    write: bool
    hints: Hints
    breakpoints: tuple[int, ...] = ()
    wanted: set[int] = field(default_factory=set)
    take_sample: Callable[[], bool] | None = None
    verify_at_tokens: int = 0
    last: Match | None = None
    top_n: int | None = None
    scores_version: int = 0
    scored: ScoredPrompt | None = None
    counted_tokens: int = 0
    gave_up_fetch: bool = False
    deadline_s: float | None = None

    def match(self, cache: HybridPrefixCache, length_tokens: int) -> Match:
        """Match the first ``length_tokens`` with the cache; at least one token remains to be computed."""
        limit = length_tokens - 1
        last = self.last
        scores_changed = self.top_n is not None and self.scores.version != self.scores_version
        if (
            last is None
            or last.resume_tokens > limit
            or last.limit_tokens < limit
            or scores_changed
            or not cache.is_current(last)
        ):
            resume_at = None
            if self.top_n is not None:
                resume_at = self.scores.positions(self.chain, self.top_n)
                self.scores_version = self.scores.version
            self.last = last = cache.match(self.chain, read=self.read, max_resume_tokens=limit, resume_at=resume_at)
            if last.resume_tokens and self.write and self.take_sample is not None:
                if self.take_sample():
                    self.read, self.verify_at_tokens = False, last.resume_tokens
                    self.last = last = cache.match(self.chain, read=False)
                self.take_sample = None
        return last


@dataclass(slots=True)
class StepState:
    """The next or running forward, and counts of earlier ones.

    Attributes:
        parts: What it computes: requests and their plans, by request id, in the order of their rows.
        restores: Encoded checkpoints that it starts from, by the live slot that gets the state first.
        published_plans: Plans that were published when it was launched.
        failed: Whether a step raised since the last reset.
        failed_plans: Plans that were published when their forward was launched, and whose step failed afterwards.
        preempts: Whether requests that are released now were preempted.
        verified_hits: Hits that were computed again (``verify_hits``); ``verify_mismatches``: those that differed.
    """

    parts: dict[int, tuple[PrefixRequest, StepPlan]] = field(default_factory=dict)
    restores: dict[int, int] = field(default_factory=dict)
    published_plans: int = 0
    failed: bool = False
    failed_plans: int = 0
    preempts: bool = False
    verified_hits: int = 0
    verify_mismatches: int = 0

    def plans(self) -> list[StepPlan]:
        """Plans of the forward."""
        return [plan for _, plan in self.parts.values()]

    def take(self) -> list[tuple[PrefixRequest, StepPlan]]:
        """Remove all parts, as the forward is published or failed; returns them."""
        taken = list(self.parts.values())
        self.parts.clear()
        self.restores.clear()
        return taken

    def fail(self) -> None:
        """The step raised."""
        self.failed = True
        self.failed_plans, self.published_plans = self.failed_plans + self.published_plans, 0


class KnownRequests:
    """One `PrefixRequest` per request. Not stored on the request: its attributes would travel with the reply.

    Args:
        cache: The cache that makes their keys.
        scores: Log-probs of cached prompts.
        verify_hits: Share of the hits to recompute and compare.
        one_rank: Whether no other rank runs the same requests, so that this one may read its clock.
    """

    def __init__(
        self, cache: HybridPrefixCache, scores: ScoreTable, verify_hits: float = 0.0, *, one_rank: bool = True
    ) -> None:
        self._cache, self._scores, self._verify_hits, self._one_rank = cache, scores, verify_hits, one_rank
        self._hits = 0
        self._entries: dict[int, PrefixRequest] = {}  # by id(), while the request lives

    def __len__(self) -> int:
        """Number of known requests: those that are still referenced."""
        return len(self._entries)

    def of(self, req: Any, *, arrives: bool = False) -> PrefixRequest:
        """The `PrefixRequest` of ``req``; made on first use, and again after the weights change.

        Raises:
            ValueError: A cache option is invalid; if it ``arrives``, also if there is no room for its ``cache_pin``.
        """
        old = self._entries.get(id(req))
        if old is not None and old.chain.epoch == self._cache.epoch:
            return old
        known = self._read(req.request_id, req.prompt_tokens, req.sampling_params)
        if arrives and getattr(req.sampling_params, "cache_pin", None) is not None:
            try:
                self._cache.reserve_pin(known.chain, known.hints)
            except ValueError as error:
                raise ValueError(f"request {req.request_id}: cache_pin: {error}") from None
        self._entries[id(req)] = known
        known.take_sample = self._take_sample if self._verify_hits else None
        if old is None:
            weakref.finalize(req, self._entries.pop, id(req)).atexit = False
        else:
            known.counted_tokens = old.counted_tokens
        # Megatron's scheduler reads these: it holds a request back while one that shares a new block is being admitted.
        req.precomputed_block_hashes = [key.hex() for key in known.chain.keys]  # replies carry them as JSON
        return known

    def explain(self, tokens: torch.Tensor, params: Any) -> Explanation:
        """What a request with these tokens and parameters would reuse now. No request becomes known, and nothing changes.

        Raises:
            ValueError: A cache option is invalid.
        """
        known = self._read(0, tokens, params, remember=False)
        refused_by = None
        if not getattr(params, "cache_read", True):
            refused_by = "cache_read"
        elif not known.read:
            refused_by = "prompt_log_probs_gb"
        elif self._verify_hits == 1:
            refused_by = "verify_hits"
        return self._cache.explain(
            Question(
                chain=known.chain,
                refused_by=refused_by,
                write=known.write,
                resume_at=None if known.top_n is None else self._scores.positions(known.chain, known.top_n),
                breakpoints=known.breakpoints,
            )
        )

    def carry_over(self, old: Any, new: Any) -> None:
        """The request ``new`` continues ``old``, which was preempted or starts over."""
        known = self.of(new)
        known.counted_tokens = len(new.prompt_tokens) if old.generated_tokens else self.of(old).counted_tokens

    def _take_sample(self) -> bool:
        # Counted, not random: all ranks choose the same hits.
        self._hits += 1
        return int(self._hits * self._verify_hits) > int((self._hits - 1) * self._verify_hits)

    def _read(self, request_id: int, tokens: torch.Tensor, params: Any, *, remember: bool = True) -> PrefixRequest:
        salt, adapter = (getattr(params, name, None) for name in ("cache_salt", "cache_adapter"))
        # Log-probs of the prompt need the logits of every position. Only what has them in the cache can be skipped.
        wants_prompt = getattr(params, "return_log_probs", False) and not getattr(
            params, "skip_prompt_log_probs", False
        )
        keeps_scores = self._scores.budget_bytes > 0
        write = bool(getattr(params, "cache_write", True))
        hints = self._hints(request_id, params, salt)
        prompt: NDArray[np.int64] = tokens.detach().to("cpu", torch.int64).contiguous().numpy()
        return PrefixRequest(
            prompt=prompt,
            chain=self._cache.chain(
                prompt,
                salt=None if salt is None else str(salt),
                adapter=None if adapter is None else str(adapter),
                remember=write and remember,
            ),
            read=bool(getattr(params, "cache_read", True)) and (keeps_scores or not wants_prompt),
            write=write,
            top_n=int(getattr(params, "top_n_logprobs", 0) or 0) if wants_prompt and keeps_scores else None,
            scores=self._scores,
            breakpoints=(
                *_breakpoints(request_id, getattr(params, "cache_breakpoints", None)),
                *(pin.tokens for pin in hints.pins if pin.tokens is not None),
            ),
            hints=hints,
        )

    def _hints(self, request_id: int, params: Any, salt: Any) -> Hints:
        names = ("cache_session", "cache_uses", "cache_pin", "cache_ttls", "cache_now")
        session, uses, pin, ttls, now_s = (getattr(params, name, None) for name in names)
        tenant = getattr(params, "cache_tenant", salt)
        if now_s is None and self._one_rank:
            now_s = time.time()
        try:
            if now_s is not None:
                check_number("cache_now", now_s, 0, _MOST_SECONDS)
            pins, (name, ends) = _pins(uses, pin, ttls), _session(session)
            if now_s is None and any(each.seconds for each in pins):
                raise ValueError("cache_pin in seconds: ranks need one clock: set cache_now, or count requests")
        except ValueError as error:
            raise ValueError(f"request {request_id}: {error}") from None
        tenant = None if tenant is None else str(tenant)
        return Hints(session=name, ends_session=ends, pins=pins, tenant=tenant, now_s=now_s)


_MOST_USES = 2**20  # and requests
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 2.0**40


def _session(value: Any) -> tuple[str | None, bool]:
    match value:
        case None:
            return None, False
        case {"id": str() as name, **more} if 0 < len(name) <= 256 and more.keys() <= {"end"}:
            if more.get("end") in (None, False, True) and type(more.get("end")) is not int:
                return name, bool(more.get("end"))
    raise ValueError(f'cache_session={shown(value)}: must be {{"id": text, "end": bool}}')


def _pins(uses: Any, pin: Any, ttls: Any) -> tuple[Pin, ...]:
    """The pins that a request asks for: first that of ``cache_pin``."""
    pins = []
    if pin is not None:
        names = pin.keys() if isinstance(pin, dict) else set()
        if names - {"tokens"} not in ({"requests"}, {"seconds"}):
            what = '{"requests": n} or {"seconds": s}, and perhaps "tokens"'
            raise ValueError(f"cache_pin={shown(pin)}: must be {what}")
        requests, seconds, tokens = (pin.get(name) for name in ("requests", "seconds", "tokens"))
        check_integer("cache_pin['requests']", 1 if requests is None else requests, 1, _MOST_USES)
        check_integer("cache_pin['tokens']", 1 if tokens is None else tokens, 1)
        check_number("cache_pin['seconds']", 1 if seconds is None else seconds, _LEAST_SECONDS, _MOST_SECONDS)
        tokens = None if tokens is None else int(tokens)
        pins.append(Pin(tokens=tokens, requests=int(requests or 0), seconds=float(seconds or 0)))
    if uses is not None:
        check_integer("cache_uses", uses, 0, _MOST_USES)
        pins += [Pin(uses=int(uses))] * (uses > 0)
    if ttls is not None:
        try:
            pins += [Pin(tokens=int(tokens), seconds=float(seconds)) for tokens, seconds in ttls]
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"cache_ttls={shown(ttls)}: must be pairs of tokens and seconds") from None
    return tuple(pins)


def _breakpoints(request_id: int, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    if listed and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return tuple(value)
    raise ValueError(f"request {request_id}: cache_breakpoints={shown(value)}: must be a sequence of ints")


class RequestLoads:
    """Has the tier behind the host bring what waiting requests need, and finds loads that failed.

    Args:
        context: The context.
        cache: Its cache, which decides.
        requests: Its requests.
        step: Its next or running forward.
    """

    def __init__(self, context: Any, cache: HybridPrefixCache, requests: KnownRequests, step: StepState) -> None:
        self._context, self._cache, self._requests, self._step = context, cache, requests, step

    def waits(self, req: Any, others_run: bool) -> bool:
        """Have the tier behind the host bring what a waiting request can resume from.

        Args:
            req: A request that is not admitted yet.
            others_run: Whether the next step runs other requests.

        Returns:
            Whether the request waits in this round until that is on the host. If no others run it does not: it is admitted, and the
            CPU waits before it launches the forward.
        """
        cache, known = self._cache, self._requests.of(req)
        fetch = cache.loads.fetches.get(req.request_id)
        if fetch is None:
            if not others_run or known.gave_up_fetch:
                return False
            fetch = cache.loads.fetch(req.request_id, known.match(cache, req.remaining_prompt_length))
            if fetch is None:
                return False
            self._context.moves.begin_fetch(fetch.load_id, [entry.read for entry in fetch.coming])
        state = self._fetch(known, fetch, wait=False)
        if state in (LoadState.MISSING, LoadState.LATE):
            self._context.decisions.note(lambda: f"request {req.request_id} does not wait for its load: {state}")
            known.last, known.gave_up_fetch = None, True
        return others_run and state is LoadState.FETCHING

    def wait(self) -> None:
        """Make the next forward run after the loads that it uses.

        The CPU waits for entries that still come from the tier below: a collective, if there are any.
        """
        for known, plan in self._step.parts.values():
            if plan.load is not None and self._fetch(known, plan.load, wait=True) is LoadState.COPYING:
                self._context.moves.wait_for(plan.load.load_id)

    def _fetch(self, known: PrefixRequest, load: Load, *, wait: bool) -> LoadState:
        """See `Mover.fetch`. A request waits once: its load goes on where its fetch was."""
        if load.state is not LoadState.FETCHING:
            return load.state
        if known.deadline_s is None:
            known.deadline_s = time.monotonic() + self._context.moves.tier.tier.wait_s
        state = self._context.moves.fetch(load.load_id, known.deadline_s, wait=wait)
        if state is not LoadState.FETCHING:
            known.deadline_s = None
            self._cache.loads.end_fetch(load, state)
        return state

    def failed(self) -> set[int]:
        """Requests of the last forward whose loads failed verification, or did not arrive; the same set on all ranks.

        All ranks call it after each forward, before one with loads is published. The requests must be recomputed.
        """
        loads = [(known, plan.load) for known, plan in self._step.parts.values() if plan.load is not None]
        if not loads:
            return set()
        copied = {load.load_id: load for _, load in loads if load.state is LoadState.COPYING}
        for load_id, state in self._context.moves.verdicts(copied).items():
            load = copied[load_id]
            load.state = state
            if state is LoadState.FAILED:
                logger.error("the load of request %d failed verification: the request is recomputed", load.request_id)
        for known, load in loads:
            if load.state in (LoadState.MISSING, LoadState.LATE):
                known.last, known.gave_up_fetch = None, True
        return {load.request_id for _, load in loads if load.state is not LoadState.ARRIVED}
