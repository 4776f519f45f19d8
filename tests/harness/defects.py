"""The list of megatron-core's defects, and which of them the installed one has.

Each has tests, marked with its number (`expected`): they must fail on megatron's own classes where it stands, and pass where it is
mended. The list is in ``docs/compatibility.md``, too: ``python -m tests.harness.defects`` prints it, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from megatron_hybrid_prefix.upstream import capabilities, version

# Releases and commits of main, oldest first.
RUN = tuple(run.split()[0] for run in version.RUN)


@dataclass(frozen=True, slots=True)
class Mending:
    """A commit of Megatron-LM's main that mends defects; ``first_run`` is the oldest of `RUN` that has it.

    ``adds`` is a name that megatron has since then, as in `capabilities.CAPABILITIES`. It tells a commit that was never run.
    """

    pull: int
    commit: str
    date: str
    first_run: str
    adds: str

    def __str__(self) -> str:
        return f"[#{self.pull}](https://github.com/NVIDIA/Megatron-LM/pull/{self.pull}), {self.commit} of {self.date}"


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect of 0.19.2: what kind of harm, what happens, and what mends it in main."""

    kind: str
    what: str
    mended: Mending | None = None

    def is_mended(self) -> bool:
        """Whether the installed megatron-core is without it."""
        return self.mended is not None and capabilities.is_there(self.mended.adds)


_CONTEXTS = "megatron.core.inference.contexts"
_SSM = "megatron.core.ssm"
_SLOTS = Mending(6091, "d04e7a0b", "2026-07-30", "708f0a5e", f"{_CONTEXTS}.mamba_slot_allocator:MambaSlotCapacityError")
_BLOCKS = Mending(
    5995, "ee386490", "2026-07-31", "708f0a5e", f"{_CONTEXTS}.kv_block_allocator:KVBlockAllocator.get_allocatable_count"
)
_REFRESH = Mending(6672, "fbbc142b", "2026-08-20", "d98e8a64", f"{_SSM}.mamba_mixer:MambaMixer.refresh_cache")
_WINDOW = Mending(
    6711,
    "436bae00",
    "2026-08-22",
    "d98e8a64",
    f"{_SSM}.ops.common.causal_conv1d_varlen:causal_conv1d_varlen_carry_states",
)

DEFECTS: Mapping[int, Defect] = {
    1: Defect("wrong answer", "a later chunk of a prompt skips cached tokens without their state"),
    2: Defect("wrong answer", "a prompt of whole blocks and one token starts from zeros in place of its state"),
    3: Defect("wrong answer", "`reset_metadata()` forgets KV and keeps the states, which later prompts use"),
    4: Defect("wrong answer", "a span shorter than d_conv pads its convolution window with zeros", _WINDOW),
    5: Defect("wrong answer", "KV and states of old weights are reused after a new generation epoch"),
    6: Defect("failure", "a step raises if live requests hold all slots for states", _SLOTS),
    7: Defect("failure", "a decode step that needs a block does not evict one, and asserts", _BLOCKS),
    8: Defect("failure", "a matched block is registered twice, and a later eviction asserts", _BLOCKS),
    10: Defect("failure", "a request that does not fit is refused, and the blocks that it was given are lost"),
    11: Defect("failure", "a budget of states smaller than the scratch memory is refused"),
    15: Defect("reuse", "a preempted request is computed again from its first token", _BLOCKS),
    16: Defect("reuse", "the state at the end of a chunk is not kept"),
    17: Defect(
        "reuse", "states of a live request's blocks cannot be evicted; a use of a state refreshes all before it"
    ),
    18: Defect("reuse", "scratch memory comes out of the budget of states"),
    20: Defect("cost", "each eviction scans the whole cache"),
    21: Defect("safety", "KV that live requests read is written again"),
    22: Defect("statistics", "`num_cached_tokens` counts matched tokens, not skipped ones"),
    23: Defect("reuse", "by default a finished request leaves nothing in the cache"),
    25: Defect("safety", "prompts cannot be kept apart by a salt, and anybody can compute the 63-bit keys"),
    26: Defect("reuse", "boundaries that are no multiple of the scan's chunk size are dropped"),
    28: Defect("precision", "kept states are rounded to the type of the parameters"),
    29: Defect("wrong answer", "async scheduling gives a prefill the accepted drafts of another request"),
    30: Defect("wrong answer", "a resumed request writes KV into a block of an evicted one"),
    31: Defect("failure", "after a capture of CUDA graphs an eviction outside of inference mode raises", _SLOTS),
    32: Defect("wrong answer", "an end token among accepted drafts does not end the answer"),
    33: Defect("failure", "with drafts, a request that just fits fails in a step (0.19.2) or is refused (main)"),
    34: Defect("wrong answer", "KV and states of old weights are reused after suspend and resume"),
    35: Defect("wrong answer", "after new weights a captured decode uses the old A of Mamba2", _REFRESH),
    36: Defect("failure", "`reset()` of a suspended engine leaves it without buffers"),
    37: Defect("failure", "a bad request is found in a step, which fails for all, or ends the coordinator"),
    38: Defect("failure", "an id that is in use is taken again"),
    39: Defect("failure", "`reset()` leaves the futures of dropped requests waiting"),
    40: Defect("failure", "a step raises if the future of a request was cancelled"),
    41: Defect(
        "log-probs", "at the end of a prompt's chunk they are of the sampled token, not of the prompt's next one"
    ),
    42: Defect("log-probs", "chunks of a prompt without log-probs add entries to the likeliest tokens of the answer"),
    43: Defect("log-probs", "a request that asks for none gets those of the steps that it shares"),
    44: Defect("log-probs", "async scheduling: after a request ends, others get what it asked for"),
    45: Defect("log-probs", "an answer of no tokens gets one"),
    46: Defect("log-probs", "a stop word that is cut off leaves those of its earlier tokens"),
    47: Defect("log-probs", "of the likeliest tokens, only the least likely of those with the same text stays"),
    48: Defect("log-probs", "processed log-probs: padding rows belong to no request, and FlashInfer looks each up"),
}
"""By number. Numbers that are missing are limits without a test."""


def expected(number: int, raises: type[Exception] | tuple[type[Exception], ...]) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a test of a defect on megatron's own classes: where the defect stands, it must fail with ``raises``.

    That is an exception of the test, what megatron raises, or AssertionError if the test counts something.
    """
    found = DEFECTS[number]
    if found.is_mended():
        return ()
    return (pytest.mark.xfail(strict=True, reason=f"defect {number}: {found.what}", raises=raises),)


def columns() -> list[list[str]]:
    """`RUN` in parts that have the same defects."""
    first_runs = {found.mended.first_run for found in DEFECTS.values() if found.mended}
    parts: list[list[str]] = []
    for run in RUN:
        if not parts or run in first_runs:
            parts.append([])
        parts[-1].append(run)
    return parts


def stands(found: Defect, run: str) -> bool:
    """Whether one of `RUN` has a defect."""
    return found.mended is None or RUN.index(run) < RUN.index(found.mended.first_run)


def table() -> str:
    """The list in Markdown, with a column for each of `columns`."""
    firsts = [part[0] for part in columns()]
    names = [part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in columns()]
    rows = [["", "kind", "defect", *names, "mended by"], ["---"] * (len(names) + 4)]
    for number, found in DEFECTS.items():
        cells = ["stands" if stands(found, run) else "mended" for run in firsts]
        rows.append([str(number), found.kind, found.what, *cells, str(found.mended or "")])
    counts = [sum(stands(found, run) for found in DEFECTS.values()) for run in firsts]
    rows.append(["", "", "**stand**", *map(str, counts), ""])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  ", "| ") for row in rows)


if __name__ == "__main__":
    print(table())
