"""Forced drafts: speculative decoding in which a test decides how many drafts are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.harness.lifecycle_helpers import EngineHarness, known_answer


@contextmanager
def forced_drafts(engine: Any, truth: dict[int, list[int]], accepted: Callable[[int, int], int]) -> Iterator[list[int]]:
    """A context in which drafts come from ``truth``: by request id, prompt and answer as without speculation.

    ``accepted`` says, of a request's id and the position of the first draft, how many drafts to make right. Yields a list that
    collects their number before each forward of each request.
    """
    controller, context = engine.controller, engine.context
    original = controller._compute_serial_mtp_and_sample
    depths, vocab_size = controller.num_speculative_tokens, controller.vocab_size
    drafted: list[int] = []

    def forcing(base_position: Any = None) -> None:
        active = slice(context.paused_request_count, context.total_request_count)
        positions = base_position
        if positions is None:
            positions = context.request_kv_length_offsets[active] + context.request_query_lengths[active]
        positions = positions.tolist()
        original(base_position)
        for row, (request_id, position) in enumerate(zip(context.request_ids[active].tolist(), positions, strict=True)):
            known = truth[request_id][position + 1 :]
            right = min(accepted(request_id, position + 1), len(known), depths)
            drafted.append(right)
            for depth in range(depths):
                token = known[depth] if depth < len(known) else 0
                controller._sampled_mtp_tokens_cuda[depth, row] = token if depth < right else (token + 1) % vocab_size

    controller._compute_serial_mtp_and_sample = forcing
    try:
        yield drafted
    finally:
        del controller._compute_serial_mtp_and_sample


class Drafting(EngineHarness):
    """An engine whose drafts are made from the right answers of the requests that `ask` adds.

    ``accepted``, ``truth`` and ``drafted`` are as of `forced_drafts`; the first may be changed between steps.
    """

    def __init__(
        self, model: Any, drafts: int, accepted: Callable[[int, int], int] = lambda *_: 99, **fields: Any
    ) -> None:
        super().__init__(model, num_speculative_tokens=drafts, **fields)
        self.plain = EngineHarness(model, slots=None)
        self.accepted, self._drafts = accepted, drafts
        self.truth: dict[int, list[int]] = {}
        self.drafted: list[int] = []

    def ask(self, prompt: list[int], count: int = 12, **attributes: Any) -> int:
        """As `add`; the drafts are made from its right answer."""
        number = self.add(prompt, count, **attributes)
        self.truth[number] = prompt + known_answer(self.plain, prompt, count)
        return number

    def step(self, count: int = 1) -> list[int]:
        """See `EngineHarness`, with forced drafts."""
        if not self._drafts:
            return super().step(count)
        with forced_drafts(self.engine, self.truth, self.accepted) as drafted:
            ids = super().step(count)
        self.drafted += drafted
        return ids
