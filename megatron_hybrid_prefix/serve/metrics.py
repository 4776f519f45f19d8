"""The metrics of ``/metrics``: the cache's statistics, the engine's queues, and the server's counters.

Each field of the cache's statistics becomes a metric, so new fields appear without a change here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from megatron_hybrid_prefix.metrics import PrefixStats, TierStats

PREFIX = "hybrid_prefix"
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_END_TO_END_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_DEPTH_TOKENS = tuple(2**power for power in range(6, 21))

# Fields that share one metric with a label: prefix of their names -> metric, label, help text.
_LABELLED = {
    "reused_tokens_": ("reused_tokens", "tier", "Prompt tokens skipped, by the tier of their state"),
    "lost_tokens_": ("lost_tokens", "reason", "Prompt tokens recomputed though their KV was cached, by reason"),
    "checkpoints_by_": ("checkpoints", "reason", "States published, by reason"),
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
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self.registry = CollectorRegistry()
        self.gauges: dict[str, float] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.http = self._made(Counter, "http_requests", "HTTP requests answered", ["path", "status"])
        self.cancelled = self._made(Counter, "cancelled_requests", "Requests whose client disconnected")
        self.generated = self._made(
            Counter, "generated_tokens", "Tokens generated, by the end of their request", ["status"]
        )
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

    def collect(self) -> Iterator[Metric]:
        """Gauges and snapshots as metrics, for the registry."""
        families = Families()
        for name, value in self.gauges.items():
            families.add(GaugeMetricFamily, name, value)
        for replica, snapshot in self.snapshots.items():
            labels = {"replica": replica} if self._replicas > 1 else {}
            for name, value in snapshot["gauges"].items():
                families.add(GaugeMetricFamily, name, value, labels)
            add_prefix_metrics(families, snapshot["prefix_stats"], labels)
            if memory := snapshot["memory"]:  # empty: the replica was lost before its first snapshot
                add_memory_metrics(families, memory, labels)
        yield from families


class Families:
    """Metric families by name, with their samples."""

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}

    def add(
        self, kind: type[Metric], name: str, value: float, labels: dict[str, str] | None = None, text: str | None = None
    ) -> None:
        """Adds a sample. All samples of one name have the same label names."""
        labels = labels or {}
        if name not in self._by_name:
            family: Any = kind
            self._by_name[name] = family(
                f"{PREFIX}_{name}", text or _HELP.get(name) or name.replace("_", " "), labels=list(labels)
            )
        self._by_name[name].add_metric(list(labels.values()), value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._by_name.values())


def add_prefix_metrics(families: Families, stats: dict[str, Any], labels: dict[str, str] | None = None) -> None:
    """Adds the metrics of ``prefix_stats().as_dict()``.

    Args:
        families: Receives the metrics.
        stats: Numbers, and dicts of numbers by reason or tier.
        labels: Labels of every sample.
    """
    labels = labels or {}
    for name, value in stats.items():
        start = next((start for start in _LABELLED if name.startswith(start)), None)
        if start is not None and not name.endswith(_LEVELS):
            metric, label, text = _LABELLED[start]
            values = value if isinstance(value, dict) else {name.removeprefix(start): value}
            for key, count in values.items():
                families.add(CounterMetricFamily, metric, count, {label: str(key)} | labels, text)
        elif name == "tiers":
            for tier, figures in value.items():
                for figure, count in figures.items():
                    if isinstance(count, dict):
                        for reason, times in count.items():
                            of_reason = {"tier": tier, "reason": str(reason)} | labels
                            families.add(CounterMetricFamily, f"tier_{figure}", times, of_reason)
                        continue
                    kind = GaugeMetricFamily if figure in _TIER_LEVELS else CounterMetricFamily
                    families.add(kind, f"tier_{figure}", count, {"tier": tier} | labels)
        elif isinstance(value, dict):
            for key, count in value.items():
                families.add(CounterMetricFamily, name, count, {"kind": str(key)} | labels)
        elif isinstance(value, bool) or not isinstance(value, int | float) or name in _SUMS:
            continue
        elif name.endswith(_LEVELS) or name.startswith("bytes_"):
            families.add(GaugeMetricFamily, name.removesuffix("_total"), value, labels)
        else:
            families.add(CounterMetricFamily, name, value, labels)


def add_memory_metrics(families: Families, memory: dict[str, Any], labels: dict[str, str]) -> None:
    """Adds the metrics of `memory_snapshot`. Arguments as in `add_prefix_metrics`."""
    for owner, count_bytes in memory["bytes"].items():
        families.add(GaugeMetricFamily, "memory_bytes", count_bytes, {"owner": owner} | labels)
    families.add(GaugeMetricFamily, "memory_page_bytes", memory["page_bytes"], labels)
    for owner, pages in memory["pages_changed"].items():
        families.add(CounterMetricFamily, "memory_pages_changed", pages, {"to": owner} | labels)
    families.add(CounterMetricFamily, "memory_blocks_moved", memory["blocks_moved"], labels)


def memory_snapshot(context: Any) -> dict[str, Any]:
    """Who uses the memory that KV and states share, in bytes of this rank. O(blocks)."""
    use, layout = context.prefix_cache.memory_use(), context.layout
    checkpoints = context.prefix_cache.stats().slots_used
    owners = {
        name: count * layout.block_bytes
        for name, count in (
            ("kv_running", use.held_blocks),
            ("kv_cached", use.cached_blocks),
            ("free", use.free_blocks),
        )
    }
    owners |= {"states_running": use.live_slots * layout.state_bytes, "checkpoints": checkpoints * layout.state_bytes}
    owners["unused"] = use.total_blocks * layout.block_bytes - sum(owners.values())  # free slots and padding of pages
    return {
        "bytes": owners,
        "page_bytes": layout.page_bytes,
        "pages_changed": {"states": use.pages_to_states, "kv": use.pages_to_kv},
        "blocks_moved": use.moved_blocks,
    }


def engine_snapshot(engine: Any) -> dict[str, Any]:
    """Statistics and gauges of an engine, for `ServerMetrics`. Call it in the engine's thread."""
    from megatron_hybrid_prefix.upstream.blocks import available_blocks, block_counts  # imports megatron

    context = engine.context
    stats = context.prefix_stats().as_dict()
    allocator = context.kv_block_allocator
    return {
        "prefix_stats": stats,
        "memory": memory_snapshot(context),
        "gauges": {
            "running_requests": int(context.total_request_count),
            "waiting_requests": len(engine.waiting_request_ids),
            "kv_blocks": block_counts(allocator).total - 1,  # without megatron's dummy block
            "kv_blocks_available": available_blocks(allocator),
            "bytes_used": stats["slots_used"] * context.layout.state_bytes,
        },
    }
