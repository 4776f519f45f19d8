"""The scenario `changing`: the traffic changes its nature, so memory moves between KV and states while requests decode."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.bench.engines import Contestant, greedy, synchronize, timed_round
from megatron_hybrid_prefix.bench.scenario import MS, Machine, Scenario, size, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, median, percentile
from megatron_hybrid_prefix.bench.steps import RoomTimes, Step, compared_sample, room_sample, step_metrics
from megatron_hybrid_prefix.console.engine_options import step_tokens
from megatron_hybrid_prefix.console.terminal import Stopped

BASELINE = "split"
STATE_SHARE = 0.25  # of the fixed split: the advice of the user guide
_TURN_AFTER = 3  # prompts from a conversation's first turn to its second


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing(Scenario):
    """Chats, then long documents, then agents, while other requests decode. Memory moves between KV and states.

    Chats leave mostly states, documents mostly KV, agents something between. Each phase alone fills the memory, so most of
    it changes its owner. Each conversation has two turns, the second a few prompts later.

    Some requests decode all the time. The time between two of their tokens is the time of a step. Engines with and without a
    fixed split reuse the same, so each of their steps does the same work; steps with other work are not compared.
    ``bench/steps.py`` says how the cost of a change of owner is measured.
    """

    name: ClassVar[str] = "changing"
    engines: ClassVar[Sequence[str]] = ("off", BASELINE, "ours")
    crash_is_a_result: ClassVar[bool] = True
    repeats: ClassVar[Mapping[str, int]] = {"cpu": 3, "cuda": 4}
    chats: int = size(30, 130, "conversations of the phase of chats")
    chat_tokens: int = size(300, 300, "tokens of a chat's first prompt")
    documents: int = size(6, 42, "conversations of the phase of documents")
    document_tokens: int = size(3000, 10000, "tokens of a document")
    agents: int = size(20, 90, "conversations of the phase of agents")
    agent_tokens: int = size(600, 2000, "tokens of an agent's first prompt")
    turn_tokens: int = size(300, 300, "new tokens of a second turn")
    cycles: int = size(1, 2, "times that all phases come")
    fill: float = size(0.6, 0.6, "memory, as a share of what the smallest phase leaves in the cache")
    generate: int = size(4, 4, "tokens to generate per prompt")
    steps: int = size(2, 2, "steps from one prompt to the next")
    decoding: int = size(2, 8, "requests that decode all the time")

    @property
    def _phases(self) -> tuple[tuple[int, int], ...]:
        return (
            (self.chats, self.chat_tokens),
            (self.documents, self.document_tokens),
            (self.agents, self.agent_tokens),
        )

    @property
    def longest_tokens(self) -> int:
        """See Scenario."""
        return max(length for _, length in self._phases) + self.turn_tokens

    @property
    def generated_tokens(self) -> int:
        """See Scenario: those of a request that decodes all the time."""
        return 2 * self.cycles * self.steps * sum(count for count, _ in self._phases) + self.generate

    @property
    def max_requests(self) -> int:
        """See Scenario."""
        return max(16, self.decoding + ceil_div(self.generate, self.steps) + 1)

    @property
    def max_tokens(self) -> int:
        """See Scenario: each prompt is computed in one step."""
        return step_tokens(self.longest_tokens + self.max_requests)

    def budgets(self, machine: Machine) -> dict[str, float]:
        """See Scenario."""
        block_tokens, block_bytes = machine.block_tokens, machine.block_bytes
        left_bytes = min(
            count * ((length + self.turn_tokens) // block_tokens * block_bytes + 2 * machine.state_bytes)
            for count, length in self._phases
        )
        running_blocks = self.decoding * ceil_div(block_tokens + self.generated_tokens, block_tokens)
        running_blocks += ceil_div(self.longest_tokens + self.generate, block_tokens) + 2
        running_bytes = running_blocks * block_bytes + machine.max_requests * machine.state_bytes
        states_bytes = STATE_SHARE * self.fill * left_bytes
        return {
            "buffer_gb": (self.fill * left_bytes - states_bytes + running_bytes) / 2**30,
            "mamba_gb": states_bytes / 2**30,
        }

    def describe(self) -> str:
        """See Scenario."""
        return (
            f"{self.cycles} x ({self.chats} conversations of {self.chat_tokens} tokens, {self.documents} of "
            f"{self.document_tokens}, {self.agents} of {self.agent_tokens}), two turns each, a prompt every {self.steps} steps "
            f"beside {self.decoding} requests that decode"
        )

    def metrics(self) -> list[Metric]:
        """See Scenario."""
        plain = partial(Metric, ratios=False)
        return [
            plain(name="to_states_gib", label="GiB that changed from KV to states", digits=3),
            plain(name="to_kv_gib", label="GiB that changed from states to KV", digits=3),
            plain(name="moved_gib", label="GiB of KV blocks moved for it", digits=3),
            plain(name="evicted_states", label="states evicted", digits=0),
            plain(name="evicted_blocks", label="KV blocks evicted", digits=0),
            Metric(name="gap_median_ms", label="between two tokens: median, ms", digits=2),
            Metric(name="gap_p99_ms", label="between two tokens: p99, ms", digits=2),
            Metric(name="gap_max_ms", label="between two tokens: longest, ms", digits=2),
            *step_metrics(),
            plain(name="failed_requests", label="failed requests", digits=0, goal="0"),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
        """See Scenario: prompts of the requests that decode all the time, and of the traffic."""
        prompts: list[list[int]] = []
        for count, length in self._phases * self.cycles:
            first = [tokens(rng, vocab_size, length) for _ in range(count)]
            second = [prompt + tokens(rng, vocab_size, self.turn_tokens) for prompt in first]
            waiting: list[list[int]] = [[]] * _TURN_AFTER
            for pair in zip_longest(first, waiting + second):
                prompts += [prompt for prompt in pair if prompt]
        return [tokens(rng, vocab_size, self.block_tokens) for _ in range(self.decoding)], prompts

    def repeat(self, order: Sequence[Contestant], workload: Any) -> dict[str, Sample]:
        """See Scenario. Keeps the steps of each engine."""
        samples: dict[str, Sample] = {}
        for contestant in order:
            with contestant.attempt(), timed_round():
                before = _memory(contestant)
                steps, failed_requests = self._traffic(contestant, *workload)
                gaps = [step.gap_ms for step in steps]
                sample: Sample = {name: value - before[name] for name, value in _memory(contestant).items()}
                sample |= {"gap_median_ms": median(gaps), "gap_p99_ms": percentile(gaps, 0.99), "gap_max_ms": max(gaps)}
                samples[contestant.name] = sample | {"failed_requests": failed_requests}
                contestant.kept.append(steps)
        return samples

    def over_repeats(self, every: Sequence[Contestant]) -> dict[str, Sample]:
        """See Scenario: what steps that change owners cost, and how much longer they take than with the fixed split.

        The CPU's time for making room is given of the same steps with the fixed split, too.
        """
        steps: dict[str, list[list[Step]]] = {contestant.name: contestant.kept for contestant in every}
        changes = [[step.changes for step in repeat] for repeat in steps.get("ours", [])]
        found = {name: room_sample(steps[name], changes) for name in ("ours", BASELINE) if name in steps}
        for name in steps.keys() - {BASELINE} if BASELINE in steps else ():
            found[name] = found.get(name, {}) | compared_sample(steps[name], steps[BASELINE])
        return found

    def _traffic(
        self, contestant: Contestant, background: Sequence[list[int]], prompts: Sequence[list[int]]
    ) -> tuple[list[Step], int]:
        """Sends all prompts. Returns the steps from the first prompt to the last, and how many requests failed."""
        engine, times = contestant.engine, RoomTimes()
        found: list[tuple[Step, Callable[[], float]]] = []
        failed_requests = 0
        last_s, last_gib = 0.0, _owners(contestant)

        def add(prompt: list[int], generate: int) -> None:
            engine.add_request(int(next(engine.request_counter)), prompt, greedy(generate))

        def step() -> None:
            nonlocal failed_requests, last_s, last_gib
            before_tokens = engine.context.lifetime_prefill_token_count
            done = engine.step_modern()
            gap_ms = MS * (time.perf_counter() - last_s)
            room_ms, copied_ms = times.take()
            computed_tokens = engine.context.lifetime_prefill_token_count - before_tokens
            requests = len(done["active_request_ids"]) + len(done["finished_request_records"])
            gib = _owners(contestant)
            one = Step(
                gap_ms=gap_ms,
                work=(computed_tokens, requests),
                changed_gib=gib[0] - last_gib[0],
                moved_gib=gib[1] - last_gib[1],
                room_ms=room_ms,
            )
            found.append((one, copied_ms))
            failed_requests += sum(record.merge().failed() for record in done["finished_request_records"])
            last_s, last_gib = time.perf_counter(), gib  # what this function does is not in a step's time

        with times.watch(engine):
            for prompt in background:
                add(prompt, self.generated_tokens)
            step()
            step()  # the first of them that only decodes
            synchronize()
            found.clear()
            last_s = time.perf_counter()
            for prompt in prompts:
                if contestant.should_stop():
                    engine.reset()
                    raise Stopped
                add(prompt, self.generate)
                for _ in range(self.steps):
                    step()
        traffic = [replace(one, copy_ms=copied_ms()) for one, copied_ms in found]
        while engine.has_unfinished_requests():
            step()
        return traffic, failed_requests


def _owners(contestant: Contestant) -> tuple[float, float]:
    """GiB that changed so far between KV and states, and that moved for it; 0 for engines that do not share memory."""
    found = _memory(contestant)
    return found.get("to_states_gib", 0.0) + found.get("to_kv_gib", 0.0), found.get("moved_gib", 0.0)


def _memory(contestant: Contestant) -> dict[str, float]:
    """What changed so far in the memory of this package's cache; empty for other engines."""
    stats = contestant.counters()
    if not stats:
        return {}
    found = {"evicted_states": stats["evictions"], "evicted_blocks": stats["kv_evictions"]}
    context = contestant.engine.context
    use, layout = context.prefix_cache.inspect.memory_use(), context.layout
    if use is None:
        return found
    page_gib = layout.page_bytes / 2**30
    return found | {
        "to_states_gib": use.pages_to_states * page_gib,
        "to_kv_gib": use.pages_to_kv * page_gib,
        "moved_gib": use.moved_blocks * layout.block_bytes / 2**30,
    }
