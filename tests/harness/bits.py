"""Requests whose answers are compared bit by bit with those of the same requests alone in an engine that reuses nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness

SPANS = (1, 2, 63, 64, 65, 127, 128, 129)  # tokens of a prompt after a prefix that others share
LARGE = 2.0**16


def by_rows(sums: torch.Tensor) -> torch.Tensor:
    """Sums in an order that depends on the number of rows, as BLAS may choose one. For controls.

    From 64 rows to 127, from 192 to 255, and so on, a large term is added first and taken away last: float32 sums are then
    rounded to multiples of 1/128, on every processor. (Steps of an engine have 64 rows, 128, and so on, or few.)
    """
    rows = sums.numel() // sums.shape[-1]
    return sums + LARGE - LARGE if rows // 64 % 2 else sums


def exact_harness(model: Any, **fields: Any) -> EngineHarness:
    """An engine whose bits are compared; requests may ask for the log-probs of their prompt."""
    return EngineHarness(model, **{"exact": "bits", "materialize_only_last_token_logits": False} | fields)


def bits(request: Any) -> tuple[list[int], list[float], list[float] | None]:
    """Tokens and log-probs of a finished request."""
    wanted = not request.sampling_params.skip_prompt_log_probs
    return (
        list(request.generated_tokens),
        list(request.generated_log_probs),
        list(request.prompt_log_probs) if wanted else None,
    )


class Alone:
    """Answers of requests, each alone in an engine that reuses nothing.

    The scan's chunks end at multiples of ``block_size_tokens``, so it must be the same.
    """

    def __init__(self, model: Any, **fields: Any) -> None:
        self._harness = exact_harness(model, slots=0, **fields)
        self._answers: dict[str, tuple[list[int], list[float], list[float] | None]] = {}

    def answer(self, request: Any) -> tuple[list[int], list[float], list[float] | None]:
        """Bits of a finished request's answer, computed again; once for equal requests."""
        wanted, harness = request.sampling_params, self._harness
        params = {"skip_prompt_log_probs": wanted.skip_prompt_log_probs}
        options = getattr(wanted, "sampling_options", None)
        sent = {"prompt": request.prompt_tokens.tolist(), "count": wanted.num_tokens_to_generate, "params": params}
        key = repr((sent, options))
        if key not in self._answers:
            attributes = {} if options is None else {"sampling_options": options}
            found = harness.send(sent.pop("prompt"), **sent, **attributes)
            assert found.num_cached_tokens == 0
            self._answers[key] = bits(found)
        return self._answers[key]


def differing(harness: EngineHarness, alone: Alone) -> list[int]:
    """Ids of finished requests whose bits are others than alone."""
    return [number for number, request in harness.finished.items() if bits(request) != alone.answer(request)]


class BitsTraffic:
    """Random requests on an engine with random settings: shared prefixes, next turns, sampling, preemption, a host tier.

    ``counts`` are how many tokens the answers may have; ``fields`` are in place of random ones.
    """

    def __init__(
        self, model: Any, seed: int, requests: int, *, counts: Sequence[int] = (1, 2, 5, 20, 60), **fields: Any
    ) -> None:
        self.dice = dice = random.Random(seed)
        self.seed, self.requests, self.counts = seed, requests, counts
        block = self.block = dice.choice((64, 128) if "G" in model.hybrid_config.layer_pattern else (64, 96, 128))
        self.longest = 7 * BLOCK
        settings: dict[str, Any] = {
            "async_sched_mode": dice.choice(("legacy", "async")),
            "enable_chunked_prefill": dice.random() < 0.7,
            "max_tokens": dice.choice((320, 384, 512)),
            "block_size_tokens": block,
            "blocks": dice.choice((8, 14, 60)),
            "slots": dice.choice((2, 5, 40)),
            "host_gb": dice.choice((0.0, 0.002, 0.05)),
            "retention_interval_tokens": dice.choice((0, block, None)),
        } | fields
        if not settings["enable_chunked_prefill"]:
            settings["max_tokens"] = 1024
        self.harness = exact_harness(model, **settings)
        if settings["enable_chunked_prefill"]:
            self.harness.context.max_tokens -= dice.randint(0, 50)  # the budget of a step, of any residue
        self.trunks = [random_tokens(self.longest, seed=1000 * seed + number) for number in range(3)]

    def send(self) -> None:
        """Queues a request."""
        dice, harness = self.dice, self.harness
        count = dice.choice(self.counts)
        own = random_tokens(dice.choice(SPANS), seed=777 * self.seed + harness.next_id)
        prompt = dice.choice(self.trunks)[: dice.choice((0, 1, 2, 3)) * self.block + dice.choice((0, 0, 1, 31))] + own
        if harness.finished and dice.random() < 0.35:  # the next turn of a conversation
            before = harness.finished[dice.choice(sorted(harness.finished))]
            prompt = before.prompt_tokens.tolist() + list(before.generated_tokens) + own
        attributes = {}
        if dice.random() < 0.4:
            attributes["sampling_options"] = {"temperature": 0.8, "seed": dice.randrange(1000)}
        params = {"skip_prompt_log_probs": dice.random() < 0.6}
        harness.add(prompt[: self.longest - count], count, params=params, **attributes)

    def alone(self) -> Alone:
        """Answers to requests of this traffic, each alone."""
        return Alone(self.harness.model, block_size_tokens=self.block)

    def differing(self, alone: Alone | None = None) -> list[int]:
        """Ids of requests whose bits are others than ``alone`` (default: `alone`, for this call)."""
        return differing(self.harness, self.alone() if alone is None else alone)

    def run(self) -> None:
        """Sends all, and runs them to the end."""
        dice, harness = self.dice, self.harness
        while harness.next_id < self.requests:
            waiting = len(harness.engine.waiting_request_ids)
            for _ in range(min(dice.choice((1, 1, 2, 4, 7)), self.requests - harness.next_id, max(0, 8 - waiting))):
                self.send()
            harness.step(dice.randint(1, 9))
        harness.run()
