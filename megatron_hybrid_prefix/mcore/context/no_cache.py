"""`NoCache`: what an engine asks of its context because there may be a cache, and the answers where there is none."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from megatron_hybrid_prefix.metrics import PrefixStats


class _NoScores:
    """No prompt's log-probs are kept: has what an engine uses of `ScoredPrompts`."""

    of_step: Mapping[int, Any] = MappingProxyType({})

    def collect(self, request_id: int, log_probs: Any, tops: Any) -> None:
        """Keeps nothing."""


class NoCache:
    """Answers for megatron's own context. `SlotContext` derives from it, and `HybridPrefixContext` answers for its cache.

    Attributes:
        states: The recurrent states, or None.
        scored: Prompts whose log-probs are wanted.
        finished_routes: Routes of the requests that the last step finished, by id.
        is_exact: Whether steps are exact bit for bit.
        prompts_on_host: Whether the tokens of prompts stay on the host, and megatron does not hash them.
        samples_weights: Whether weights are looked at, in case they change and nobody says so.
        keeps_on_resume: Whether what is cached stays when a suspended engine resumes with equal weights.
    """

    __slots__ = ()  # `install` makes megatron's contexts ours: the layout of the objects must be the same

    states: Any = None
    scored: Any = _NoScores()
    finished_routes: Mapping[int, Any] = MappingProxyType({})
    is_exact = prompts_on_host = samples_weights = keeps_on_resume = False

    def serve(self, model: Any) -> None:
        """An engine is made around this context.

        Args:
            model: This rank's part of its model.
        """

    @property
    def loads_wait(self) -> bool:
        """Whether requests wait for the tier behind the host."""
        return False

    def room_for(self, requests: int) -> int:
        """Most KV blocks that so many requests can have; without a cache, megatron's allocator alone limits them."""
        return sys.maxsize

    def prefix_request(self, req: Any, *, arrives: bool = False) -> Any:
        """Keys and cache options of a request; None: there are none."""

    def continue_request(self, old: Any, new: Any) -> None:
        """A preempted request, or one that starts over, goes on as ``new``: its prompt is counted once."""

    def explain(self, tokens: Any, params: Any) -> Any:
        """What a request with these tokens (tokens,) and sampling parameters would reuse now, and why not more."""
        raise ValueError(
            "this engine has no prefix cache to explain: build it with build_engine(model, HybridPrefixConfig(...))"
        )

    def forget_request(self, request_id: int) -> None:
        """Drop what a request without a row holds on the host: it ended."""

    def remove_waiting_row(self, request_id: int) -> bool:
        """Remove a paused request, or a prompt between two chunks; False: with megatron's context it ends in a later step."""
        return False

    def failed_requests(self, wrong_ids: Collection[int], active_ids: Collection[int]) -> set[int]:
        """Active requests that must start over. What ``wrong_ids`` computed in the last forward is not finite: nobody may use it."""
        return set(wrong_ids)

    def fail_step(self) -> None:
        """A step raised."""

    def flush(self) -> None:
        """No forward follows soon: launch the copies that wait for one."""

    def invalidate(self, why: str = "") -> None:
        """The weights changed: what is cached no longer matches. ``why``: log what is dropped, and this."""

    def prefix_stats(self) -> PrefixStats:
        """Statistics of the cache since the start, and its fill; all zero without a cache."""
        return PrefixStats()
