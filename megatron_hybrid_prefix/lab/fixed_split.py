"""Plans a fixed split: what each part holds, what it reuses, and which part to raise first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.memory import GIB, floor_gib, host_options
from megatron_hybrid_prefix.lab.one_budget import advised_split
from megatron_hybrid_prefix.lab.replay import Policy, replay
from megatron_hybrid_prefix.lab.traces import Trace

WORTH_IT = 0.001  # least gain to recommend, as a share of the prompt tokens
KNOBS = {"state_bytes": "--mamba-gb", "host_bytes": "--host-gb", "kv_bytes": "--buffer-gb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes per rank: states on the device, states and KV on the host, and KV with the states of running requests."""

    state_bytes: int
    host_bytes: int
    kv_bytes: int

    @property
    def device_bytes(self) -> int:
        """What one budget for KV and states would have."""
        return self.state_bytes + self.kv_bytes

    @property
    def all_bytes(self) -> int:
        """Sum of all budgets."""
        return self.device_bytes + self.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a budget holds: counts, and bytes of the running requests' states."""

    device_states: int
    host_states: int
    kv_blocks: int
    live_bytes: int
    history_tokens: int


def plan_of(budget: Budget, sizes: Sizes, *, block_tokens: int, max_requests: int, drafts: int) -> Plan:
    """Computes what ``budget`` holds.

    Args:
        budget: Bytes.
        sizes: The model.
        block_tokens: Tokens per KV block.
        max_requests: Most running requests.
        drafts: Draft tokens of speculative decoding.

    Raises:
        InputError: The states of the running requests alone exceed the budget.
    """
    live_bytes = max_requests * sizes.live_bytes(drafts)
    block_bytes = sizes.kv_block_bytes(block_tokens)
    # One block is megatron's dummy.
    blocks = (budget.kv_bytes - live_bytes) // block_bytes - 1
    if blocks < 1:
        raise InputError(
            f"--buffer-gb {budget.kv_bytes / GIB:g}: too small. States of {max_requests} running requests take "
            f"{live_bytes / GIB:.2f} GiB, and one KV block {block_bytes / GIB:.4f} GiB: raise it or lower "
            f"--max-requests"
        )
    return Plan(
        device_states=budget.state_bytes // sizes.state_bytes,
        host_states=budget.host_bytes // sizes.state_bytes,
        kv_blocks=blocks,
        live_bytes=live_bytes,
        history_tokens=blocks * block_tokens,
    )


def expected_reuse(
    trace: Trace, plan: Plan, sizes: Sizes, *, host_bytes: int, eviction: str, on_request: Callable[[int], None]
) -> float:
    """Share of the trace's prompt tokens that a fixed split reuses.

    Args:
        trace: Recorded requests.
        plan: What the split holds.
        sizes: The model.
        host_bytes: Bytes of the host tier.
        eviction: Name of the eviction policy.
        on_request: See `replay`.
    """
    host = host_options(host_bytes, block_bytes=sizes.kv_block_bytes(trace.block_tokens), state_bytes=sizes.state_bytes)
    return replay(
        trace,
        Policy(name=eviction, eviction=eviction, options=host),
        state_slots=plan.device_states,
        kv_blocks=max(1, plan.history_tokens // trace.block_tokens),
        on_request=on_request,
    ).reused_token_fraction


def advice(gains: dict[str, float], reuse: float, ceiling: float, raised_gib: float) -> str:
    """Which budget to raise first, given the gain of each one when raised by ``raised_gib``."""
    name, gain = max(gains.items(), key=lambda item: item[1])
    if gain < WORTH_IT:
        return (
            f"{reuse:.1%} of the prompt tokens are reused, {ceiling:.1%} is the limit: {raised_gib:.1f} GiB more gain "
            "nothing"
        )
    return f"raise {KNOBS[name]} first: {raised_gib:.1f} GiB more reuse {gain:.1%} more of the prompt tokens"


def blind_advice(plan: Plan, sizes: Sizes, budget: Budget) -> str:
    """Which budget to raise first, or how to split both, if nothing is known about the requests."""
    if plan.device_states < 1:
        return f"raise --mamba-gb first: it is less than one checkpoint ({sizes.state_bytes / GIB:.3f} GiB)"
    blocks = plan.kv_blocks / plan.device_states
    if blocks < 1:
        return "raise --buffer-gb first: there are fewer KV blocks than checkpoints, and each checkpoint needs a block"
    both = budget.device_bytes
    return (
        f"one checkpoint per {blocks:.0f} KV blocks, {budget.state_bytes / both:.0%} for states. One budget needs no split: "
        f"--cache-gb {floor_gib(both)}. A good fixed split to start with is {advised_split(both)}; add --trace to learn "
        "which budget to raise"
    )
