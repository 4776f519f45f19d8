"""The metrics of ``/metrics``: the cache's statistics, the engine's queues, and the server's counters.

Each field of the cache's statistics becomes a metric, so new fields appear without a change here.
"""

from __future__ import annotations

import inspect
import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.metrics import NotReused, PrefixStats, TierStats

PREFIX = "hybrid_prefix"
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_END_TO_END_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_DEPTH_TOKENS = tuple(2**power for power in range(6, 21))

Sample = tuple[str, str, float, dict[str, str]]
"""A figure of ``/metrics``, which JSON keeps: "counter" or "gauge", name, value, labels."""
_KINDS: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

# Fields that share one metric with a label: prefix of their names -> metric, label, help text.
_LABELLED = {
    "reused_tokens_": ("reused_tokens", "tier", "Prompt tokens skipped, by the tier of their state"),
    "lost_tokens_": ("lost_tokens", "reason", "Prompt tokens recomputed though their KV was cached, by reason"),
    "not_reused": ("not_reused", "reason", "Prompts that reused nothing, or less than there was, by reason"),
    "checkpoints_by_": ("checkpoints", "reason", "States published, by reason"),
    "pins": ("pins", "what", "Pins of prefixes, states that they spared, and what these saved, by what is counted"),
    "fallbacks": ("fallbacks", "reason", "Times the cache reused or kept less than planned, by reason"),
}


def _documented(kind: type, prefix: str = "") -> dict[str, str]:
    """First sentences about the attributes of a class, by the names of their metrics."""
    attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.replace("`", "").split()) for name, text in found}
    return {prefix + name.removesuffix("_total"): text.partition(". ")[0].rstrip(".") for name, text in texts.items()}


# Help texts of the other names.
_HELP = {
    **_documented(PrefixStats),
    **_documented(TierStats, "tier_"),
    **{metric: text for metric, _, text in _LABELLED.values()},
    "open_sequences": "Answers that run or wait",
    "engine_failures": "Steps that raised; their requests got an error",
    "step_seconds": "Seconds since the engine began its current step; 0 between steps",
    "replica_up": "Whether the replica generates: 0 once it is lost",
    "running_requests": "Requests in the engine's batch",
    "waiting_requests": "Requests that the engine has not admitted",
    "kv_blocks": "KV blocks of the engine",
    "kv_blocks_available": "KV blocks that are free or can be evicted",
    "bytes_used": "Bytes of the checkpoints",
    "memory_bytes": "Bytes of the memory of KV and states, by owner, on this rank",
    "memory_page_bytes": "Bytes of a page, of one or more states, on this rank",
    "memory_pages_changed": "Pages that changed from KV to states, and from states to KV",
    "memory_blocks_moved": "KV blocks moved to empty a page for a state",
}
# Fields that are the sum of a labelled metric.
_SUMS = ("reused_tokens",)
_TIER_LEVELS = ("kv_blocks", "states", "bytes_budget", "bytes_used")
_LEVELS = ("_total", "_used", "_budget", "_available", "_resident", "_capacity")


class ServerMetrics:
    """The server's counters, and the latest gauges and engine snapshots. Set both before the registry is read.

    Args:
        replicas: Number of replicas. With more than one, their metrics have the label "replica".

    Attributes:
        gauges: Gauges of the server, by name.
        snapshots: Latest `engine_snapshot` of each replica, by name.
        info: The model and `versions`, as labels.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.info = Info(PREFIX, "The model, and the versions of what serves it", registry=self.registry)
        self.gauges: dict[str, float] = {}
        self.snapshots: dict[str, list[Sample]] = {}
        self.http = self._made(Counter, "http_requests", "HTTP requests answered", ["path", "status"])
        self.cancelled = self._made(Counter, "cancelled_requests", "Requests whose client disconnected")
        self.generated = self._made(
            Counter, "generated_tokens", "Tokens generated, by the end of their request", ["status"]
        )
        text = "Calls of tools that did not parse, or were cut off: they came back as text"
        self.unparsed_calls = self._made(Counter, "unparsed_tool_calls", text)
        text = "Seconds from a request's arrival to the end of its response (status 200 only)"
        self.end_to_end = self._made(Histogram, "end_to_end_seconds", text, buckets=_END_TO_END_S)
        text = "Seconds from one token of an answer to the next"
        self._between = self._made(Histogram, "time_between_tokens_seconds", text, buckets=_BETWEEN_S)
        text = "Seconds from a request's arrival to its first token, by cache hit or miss"
        self._first_token = self._made(
            Histogram, "time_to_first_token_seconds", text, ["cache"], buckets=_FIRST_TOKEN_S
        )
        text = "Depth of the state that a hit resumed from, in prompt tokens: those it did not compute"
        self.hit_depth = self._made(Histogram, "hit_depth_tokens", text, buckets=_DEPTH_TOKENS)
        for status in ("finished", "cancelled", "failed"):  # all labels exist from the start
            self.generated.labels(status)
        for cache in ("hit", "miss"):
            self._first_token.labels(cache)
        self.registry.register(self)

    def _made[M: (Counter, Histogram)](
        self, kind: type[M], name: str, text: str, labels: Sequence[str] = (), **options: Any
    ) -> M:
        return kind(f"{PREFIX}_{name}", text, labels, registry=self.registry, **options)

    def first_token(self, seconds: float, hit: bool) -> None:
        """Records a first token. Called in the engine's thread."""
        self._first_token.labels("hit" if hit else "miss").observe(seconds)

    def between_tokens(self, seconds: float, tokens: int) -> None:
        """Records the mean time between tokens that came together."""
        for _ in range(tokens):
            self._between.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Gauges and snapshots as metrics, for the registry."""
        samples: list[Sample] = [("gauge", name, value, {}) for name, value in self.gauges.items()]
        for replica, snapshot in self.snapshots.items():
            where = {"replica": replica} if self._replicas > 1 else {}
            samples += [(kind, name, value, labels | where) for kind, name, value, labels in snapshot]
        return families_of(samples)


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of what it runs on; ``build``: what an image sets as HYBRID_PREFIX_BUILD."""
    import torch

    from megatron_hybrid_prefix.upstream.version import find_megatron

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = {"version": __version__, "build": os.environ.get("HYBRID_PREFIX_BUILD", ""), "device": device}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    return found | {"megatron_core": str(find_megatron() or "").removeprefix("megatron-core ")}


def families_of(samples: Iterable[Sample]) -> Iterable[Metric]:
    """Samples by name. All of one name have the same label names."""
    found: dict[str, Any] = {}
    for kind, name, value, labels in samples:
        if name not in found:
            text = _HELP.get(name) or name.replace("_", " ")
            found[name] = _KINDS[kind](f"{PREFIX}_{name}", text, labels=list(labels))
        found[name].add_metric(list(labels.values()), value)
    return found.values()


def prefix_samples(stats: dict[str, Any]) -> Iterator[Sample]:
    """Samples of ``prefix_stats().as_dict()``: numbers, and dicts of numbers by reason or tier."""
    for name, value in stats.items():
        start = next((start for start in _LABELLED if name.startswith(start)), None)
        if start is not None and not name.endswith(_LEVELS):
            metric, label, _ = _LABELLED[start]
            values = dict(value) if isinstance(value, dict) else {name.removeprefix(start): value}
            if NotReused.OTHER_SALT in values:  # a client must not learn of others, and may read the metrics
                values[NotReused.NO_SUCH_PREFIX] += values.pop(NotReused.OTHER_SALT)
            yield from (("counter", metric, count, {label: str(key)}) for key, count in values.items())
        elif name == "tiers":
            for tier, figures in value.items():
                for figure, count in figures.items():
                    if isinstance(count, dict):
                        for reason, times in count.items():
                            yield "counter", f"tier_{figure}", times, {"tier": tier, "reason": str(reason)}
                    else:
                        kind = "gauge" if figure in _TIER_LEVELS else "counter"
                        yield kind, f"tier_{figure}", count, {"tier": tier}
        elif isinstance(value, dict):
            yield from (("counter", name, count, {"kind": str(key)}) for key, count in value.items())
        elif isinstance(value, bool) or not isinstance(value, int | float) or name in _SUMS:
            continue
        elif name.endswith(_LEVELS) or name.startswith("bytes_"):
            yield "gauge", name.removesuffix("_total"), value, {}
        else:
            yield "counter", name, value, {}


def memory_samples(context: Any) -> Iterator[Sample]:
    """Who uses the memory that KV and states share, in bytes of this rank. O(blocks)."""
    use, layout = context.prefix_cache.memory_use(), context.layout
    owners = {
        "kv_running": use.held_blocks * layout.block_bytes,
        "kv_cached": use.cached_blocks * layout.block_bytes,
        "free": use.free_blocks * layout.block_bytes,
        "states_running": use.live_slots * (layout.live_bytes or layout.state_bytes),
        "checkpoints": context.prefix_cache.stats().slots_used * layout.state_bytes,
    }
    owners["unused"] = use.total_blocks * layout.block_bytes - sum(owners.values())  # free slots and padding of pages
    yield from (("gauge", "memory_bytes", count_bytes, {"owner": owner}) for owner, count_bytes in owners.items())
    yield "gauge", "memory_page_bytes", layout.page_bytes, {}
    yield "counter", "memory_pages_changed", use.pages_to_states, {"to": "states"}
    yield "counter", "memory_pages_changed", use.pages_to_kv, {"to": "kv"}
    yield "counter", "memory_blocks_moved", use.moved_blocks, {}


def engine_snapshot(engine: Any) -> list[Sample]:
    """Statistics and gauges of an engine, for `ServerMetrics`. Call it in the engine's thread."""
    from megatron_hybrid_prefix.upstream.blocks import available_blocks, block_counts  # imports megatron

    context = engine.context
    stats = context.prefix_stats().as_dict()
    allocator = context.kv_block_allocator
    gauges = {
        "running_requests": int(context.total_request_count),
        "waiting_requests": len(engine.waiting_request_ids),
        "kv_blocks": block_counts(allocator).total - 1,  # without megatron's dummy block
        "kv_blocks_available": available_blocks(allocator),
        "bytes_used": stats["slots_used"] * context.layout.state_bytes,
    }
    own: list[Sample] = [("gauge", name, value, {}) for name, value in gauges.items()]
    return [*own, *prefix_samples(stats), *memory_samples(context)]
