"""`PrefixRequest`: what the context knows of a megatron request: its keys, what it allows, its match, its part in a step.

Set on a request's sampling parameters, as plain attributes (``sampling_params.add_attributes({...})``), so that they pass
through megatron's data-parallel coordinator:

- ``cache_salt``: requests with different salts share nothing (tenants);
- ``cache_adapter``: likewise, name of the adapter that the request runs with;
- ``cache_read``: False: reuse nothing;
- ``cache_write``: False: keep nothing of what the request computes;
- ``cache_breakpoints``: token positions in the prompt, a sequence of ints, up to which other prompts will share it (the end
  of a system prompt, of a document): the state there is kept on first sight. Each is rounded down to the end of a block;
  their order does not matter, and those beyond the prompt mean nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.matcher import Match
from megatron_hybrid_prefix.index.requests import StepPlan


@dataclass(slots=True)
class PrefixRequest:
    """See the module.

    Attributes:
        chain: The prompt's keys.
        read: Whether the request may resume from what is cached.
        write: Whether what it computes may be cached.
        breakpoints: Token positions up to which others share the prompt.
        wanted: Positions whose state other requests wait for.
        take_sample: Asked once, at the first hit: whether this hit shall be computed and compared.
        verify_at_tokens: Where then; 0: nowhere.
        last: The last match.
        lost_tokens: Tokens whose KV was there at admission, and that were computed because no state was kept there.
        resumes: Whether the request was preempted, and may have left on the host what it had computed.
        plan: Its part in the forward that comes or runs.
    """

    chain: KeyChain
    read: bool
    write: bool
    breakpoints: tuple[int, ...] = ()
    wanted: set[int] = field(default_factory=set)
    take_sample: Callable[[], bool] | None = None
    verify_at_tokens: int = 0
    last: Match | None = None
    lost_tokens: int = 0
    resumes: bool = False
    plan: StepPlan | None = None

    def match(self, cache: HybridPrefixCache, length_tokens: int) -> Match:
        """What of the first ``length_tokens`` is cached; at least one of them stays to be computed."""
        limit = length_tokens - 1
        last = self.last
        if last is None or last.resume_tokens > limit or last.limit_tokens < limit or not cache.is_current(last):
            self.last = last = cache.match(self.chain, read=self.read, max_resume_tokens=limit)
            if last.resume_tokens and self.write and self.take_sample is not None:
                if self.take_sample():
                    self.read, self.verify_at_tokens = False, last.resume_tokens
                    self.last = last = cache.match(self.chain, read=False)
                self.take_sample = None
        return last


class RequestBook:
    """One `PrefixRequest` a request. Kept beside them: what is set on a request would travel with its reply.

    Args:
        verify_hits: Share of the hits that are computed and compared.
    """

    def __init__(self, verify_hits: float = 0.0) -> None:
        self._verify_hits = verify_hits
        self._hits = 0
        self._entries: dict[int, tuple[weakref.ref[Any], PrefixRequest]] = {}  # by id(), while the request lives
        self._in_step: dict[int, PrefixRequest] = {}  # by request id, in the order of their rows

    def __len__(self) -> int:
        """Requests that are known: those that somebody still holds."""
        return len(self._entries)

    def of(self, req: Any, cache: HybridPrefixCache) -> PrefixRequest:
        """What is known of ``req``; made when first asked for, and again when the weights changed since.

        Raises:
            ValueError: An attribute is not what it should be.
        """
        ref, known = self._entries.get(id(req), (None, None))
        if ref is None or known is None or ref() is not req or known.chain.epoch != cache.epoch:
            known = _read_request(req, cache)
            known.take_sample = self._take_sample if self._verify_hits else None
            number, entries = id(req), self._entries
            self._entries[number] = weakref.ref(req, lambda _: entries.pop(number, None)), known
            # Megatron's scheduler holds back a request while another that shares a new block is being admitted.
            req.precomputed_block_hashes = [key.hex() for key in known.chain.keys]  # replies carry them as JSON
        return known

    # -- the forward that comes or runs --------------------------------------------------------------------------------

    def put_in_step(self, request: PrefixRequest, plan: StepPlan) -> None:
        """The request has this part in the coming forward."""
        request.plan = plan
        self._in_step[plan.request_id] = request

    def plan_of(self, request_id: int) -> StepPlan | None:
        """Part of a request in that forward, if it has one."""
        request = self._in_step.get(request_id)
        return None if request is None else request.plan

    def plans(self) -> Iterator[StepPlan]:
        """Parts of all requests in that forward."""
        return (request.plan for request in self._in_step.values() if request.plan is not None)

    def take_plan(self, request_id: int) -> StepPlan | None:
        """`plan_of`, for the last time: the request leaves the forward."""
        request = self._in_step.pop(request_id, None)
        if request is None:
            return None
        plan, request.plan = request.plan, None
        return plan

    def take_plans(self) -> list[StepPlan]:
        """`plans`, for the last time: the forward is over."""
        plans = list(self.plans())
        for request in self._in_step.values():
            request.plan = None
        self._in_step.clear()
        return plans

    def _take_sample(self) -> bool:
        # Every so-manyth hit, not a random one: all ranks take the same.
        self._hits += 1
        return int(self._hits * self._verify_hits) > int((self._hits - 1) * self._verify_hits)


def _read_request(req: Any, cache: HybridPrefixCache) -> PrefixRequest:
    params = req.sampling_params
    salt, adapter = (getattr(params, name, None) for name in ("cache_salt", "cache_adapter"))
    # Log-probs of the prompt need the logits of every position: nothing can be skipped.
    wants_prompt = getattr(params, "return_log_probs", False) and not getattr(params, "skip_prompt_log_probs", False)
    return PrefixRequest(
        chain=cache.chain(
            req.prompt_tokens.detach().to("cpu", torch.int64).contiguous().numpy(),
            salt=None if salt is None else str(salt),
            adapter=None if adapter is None else str(adapter),
        ),
        read=bool(getattr(params, "cache_read", True)) and not wants_prompt,
        write=bool(getattr(params, "cache_write", True)),
        breakpoints=_breakpoints(req.request_id, getattr(params, "cache_breakpoints", None)),
    )


def _breakpoints(request_id: int, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    if listed and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return tuple(value)
    raise ValueError(f"request {request_id}: cache_breakpoints={_short(value)}: must be a sequence of ints")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
