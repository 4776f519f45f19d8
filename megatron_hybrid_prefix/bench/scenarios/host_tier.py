"""The scenario `host_tier`: prompts that come back after they were evicted from the device."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.bench.engines import Contestant, synchronize
from megatron_hybrid_prefix.bench.scenario import MS, Machine, Scenario, size, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, ratio

_COPIES = 10  # timed copies; the median is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier(Scenario):
    """Prompts that come back after eviction. The device has room for only a few of them.

    First, each prompt is sent once, cold. Then each one is sent twice more, with new tokens at its end: the first time
    it loads back from the host, the second time it is still on the device. This package's cache gets enough host memory
    for all prompts; the other engines have no host tier. The first round generates one token only, which needs no
    decode step, because megatron-core's engine stops if decoding needs a block and the device is full of cached blocks.
    """

    name: ClassVar[str] = "host_tier"
    crash_is_a_result: ClassVar[bool] = True
    prompts: int = size(8, 8, "prompts")
    shared_tokens: int = size(512, 8192, "tokens of each prompt")
    own_tokens: int = size(60, 300, "new tokens each time a prompt comes back")
    generate: int = size(4, 4, "tokens to generate when a prompt comes back")
    on_device: int = size(2, 2, "prompts that fit on the device")
    states: int = size(16, 32, "states that fit on the device, per such prompt")

    @property
    def longest_tokens(self) -> int:
        """See Scenario."""
        return self.shared_tokens + self.own_tokens

    @property
    def _request_blocks(self) -> int:
        return ceil_div(self.longest_tokens + self.generate, self.block_tokens)

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        """See Scenario."""
        if self.on_device >= self.prompts:
            return f"--on-device {self.on_device} must be less than --prompts {self.prompts}, or nothing is evicted"
        return None

    def budgets(self, machine: Machine) -> dict[str, float]:
        """See Scenario."""
        blocks = self.on_device * self._request_blocks + 1  # and megatron's dummy block
        live_bytes = machine.max_requests * machine.state_bytes
        prompt_bytes = self._request_blocks * machine.block_bytes + 20 * machine.state_bytes
        return {
            "buffer_gb": (live_bytes + (blocks + 0.5) * machine.block_bytes) / 2**30,
            "mamba_gb": (self.on_device * self.states + 0.5) * machine.state_bytes / 2**30,
            "host_gb": 1.2 * self.prompts * prompt_bytes / 2**30,
        }

    def describe(self) -> str:
        """See Scenario."""
        return (
            f"{self.prompts} prompts of {self.shared_tokens} + {self.own_tokens} tokens in turn, room for {self.on_device} on "
            "the device"
        )

    def metrics(self) -> list[Metric]:
        """See Scenario."""
        plain = partial(Metric, ratios=False)
        return [
            Metric(name="cold_ms", label="cold: first token, ms", digits=2),
            Metric(name="back_ms", label="when it comes back: first token, ms", digits=2),
            Metric(name="again_ms", label="at once again: first token, ms", digits=2),
            plain(name="back_over_cold", label="comes back / cold", digits=3, goal="<= 0.2"),
            plain(name="excess", label="(back - again) / (bytes / plain copy)", digits=3, goal="<= 1.5"),
            plain(name="reused_share", label="reused of what was sent before", digits=3, goal=">= 0.95"),
            plain(name="loaded_mb", label="MB loaded for each", digits=1),
            plain(name="load_gb_s", label="loads, GB/s", digits=1),
            plain(name="store_gb_s", label="stores, GB/s", digits=1),
            plain(name="plain_gb_s", label="plain pinned copy to the device, GB/s", digits=1),
            plain(name="load_share", label="loads / plain copy", digits=3, goal=">= 0.8"),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> Any:
        """See Scenario: the prompts, and the new tokens of both times that each comes back."""
        shared = [tokens(rng, vocab_size, self.shared_tokens) for _ in range(self.prompts)]
        return shared, [[tokens(rng, vocab_size, self.own_tokens) for _ in range(2)] for _ in shared]

    def play(self, contestant: Contestant, workload: Any) -> Sample:
        """See Scenario."""
        shared, own = workload

        def send(prompt: list[int], generate: int = self.generate) -> Any:
            return contestant.send([prompt], generate)[0][0]

        cold = [send(prompt, 1) for prompt in shared]
        before = contestant.counters()
        back, again = [], []
        for number in range(self.prompts):
            back.append(send(shared[number] + own[number][0]))
            again.append(send(shared[number] + own[number][1]))
        after = contestant.counters()
        first_ms: dict[str, float] = {}
        for name, results in (("cold", cold), ("back", back), ("again", again)):
            first_ms[f"{name}_ms"] = MS * statistics.median(result.time_to_first_token_s for result in results)
        sample: Sample = {**first_ms, "back_over_cold": first_ms["back_ms"] / first_ms["cold_ms"]}
        sample["reused_share"] = ratio(
            sum(result.reused_tokens for result in (*back, *again)), 2 * self.prompts * self.shared_tokens
        )
        moves = getattr(contestant.engine.context, "host_moves", None)
        if moves is None:
            return sample
        at_first, at_last = (counters["tiers"]["host"]["bytes_loaded"] for counters in (before, after))
        loaded_bytes = (at_last - at_first) / self.prompts
        speeds = _speeds(contestant.engine.context)
        sample |= speeds | {"loaded_mb": loaded_bytes / 1e6}
        if speeds:
            sample["load_share"] = speeds["load_gb_s"] / speeds["plain_gb_s"]
            copy_ms = loaded_bytes / speeds["plain_gb_s"] / 1e6
            sample["excess"] = ratio(first_ms["back_ms"] - first_ms["again_ms"], copy_ms)
        return sample


def _speeds(context: Any) -> dict[str, float]:
    """GB/s of loads and stores of blocks that are on both tiers (so nothing changes), and of a plain copy."""
    import torch

    from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind

    tier, arena = context.prefix_cache._store.host, context.host_moves.arena  # a benchmark looks inside
    nodes = [node for node in context.prefix_cache.nodes() if node.block_id >= 0 and node.host_block >= 0]
    units = {
        to_host: [
            BlockTransfer(
                source=DEVICE if to_host else HOST,
                target=HOST if to_host else DEVICE,
                device_id=node.block_id,
                pages=tier.entries.pages(node.host_block),
                tag=tier.entries.tag(node.host_block),
                load_id=None if to_host else 0,
            )
            for node in nodes
        ]
        for to_host in (False, True)
    }
    if not nodes:
        return {}
    moved_bytes = len(nodes) * arena.bytes_of(EntryKind.KV)
    source = torch.empty(moved_bytes, dtype=torch.uint8, pin_memory=context.memory_buffer.is_cuda)
    target = torch.empty_like(source, device=context.memory_buffer.device)

    def move(units: Sequence[BlockTransfer]) -> None:
        arena.carry_out(units)
        arena.finish()

    return {
        "load_gb_s": _gb_s(moved_bytes, lambda: move(units[False])),
        "store_gb_s": _gb_s(moved_bytes, lambda: move(units[True])),
        "plain_gb_s": _gb_s(moved_bytes, lambda: target.copy_(source, non_blocking=True)),
    }


def _gb_s(moved_bytes: int, move: Callable[[], Any]) -> float:
    times = []
    for _ in range(_COPIES + 2):
        synchronize()
        started_s = time.perf_counter()
        move()
        synchronize()
        times.append(time.perf_counter() - started_s)
    return moved_bytes / statistics.median(times[2:]) / 1e9
