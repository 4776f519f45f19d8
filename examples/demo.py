#!/usr/bin/env python
"""One session on three engines, in less than a minute on a CPU: caching off, megatron-core's cache, this cache.

    scripts/demo.sh                                       # or: python examples/demo.py
    scripts/demo.sh --rounds 9 --json demo.json --plot demo.png

Users ask questions about a text, this package's own source. The weights are random, so the answers are noise; what is
shown is the cache. Each engine gets the same prompts in the same order, with new texts in each round:

1. A first question. Nothing is cached yet.
2. The next turn. The answer before it is longer than a block, and the turn continues it.
3. The same prompt again. It ends 2 tokens after a block boundary: spaces in the question see to that.
4. Another user asks about the same text. Nobody has shown before where the two prompts part.
5. A herd: several users ask about one new text at once. The slowest counts.
6. With chunked prefill: a prompt whose beginning is cached, in the same steps as a prompt that is not.

An answer is exact if it has the tokens of caching off, and log-probs within 0.0001 of its own. The model computes in
float32, so that another answer is an error and no rounding. First tokens are medians of the rounds.

Exit code: 0; 1 if this cache gave a wrong answer; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # on a GPU, products of float32 in float32
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to others

from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import running, terminal
from megatron_hybrid_prefix.console.answers import compare_results
from megatron_hybrid_prefix.console.plots import draw_bars
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset

PACKAGE = Path(options.__file__).parents[1]
# By kind of device: preset, tokens of a block and of the text, GiB of a cache, GiB of it that megatron-core keeps for states.
SIZES = {"cpu": ("tiny", 128, 2_000, 0.3, 0.1), "cuda": ("small", 256, 16_000, 8.0, 2.0)}
PARTS = ("first question", "next turn, after a long answer", "the same prompt again", "another user, same text")
PARTS += ("herd of 4, the slowest", "prefill in chunks")
SHORT_ANSWER = 8  # tokens
SAME_LOG_PROB = 1e-4  # parts of a prompt that are added up in another order differ by 1e-6, a wrong state by 1e-3
ENGINES = {"off": "off", "upstream": "megatron-core", "ours": "this cache"}
Send = Callable[[list[list[int]], int], list[Any]]  # prompts, tokens to generate -> a `RequestResult` each


def tokens(text: str) -> list[int]:
    """A token per byte."""
    return list(text.encode("ascii", errors="replace"))


class Session:
    """The prompts of a round. They begin with its number, so that rounds share nothing."""

    def __init__(self, number: int, block: int, text_tokens: int) -> None:
        source = "".join((PACKAGE / name).read_text("utf-8") for name in ("cache.py", "mcore/runner.py", "cli/main.py"))
        self.block, self.answer_tokens = block, block + 44
        text = tokens(f"{number}. Answer questions about this text:\n\n{source}")[: text_tokens + 40]
        self.text = self._cut(text)
        self.herd_text = self._cut([*tokens(f"{number}, a review. "), *text[: max(3 * block, text_tokens // 2)]])
        self.start = self._cut([*tokens(f"{number}: "), *text[: 5 * block]])
        self.unrelated = [*text[:1], *text[:0:-1]][: 6 * block - 20]
        pieces = [source[300 * user :][: 200 + 13 * user] for user in range(9)]
        self.asked = [tokens(f"User {user}: What is this?\n{text}\nAssistant:") for user, text in enumerate(pieces)]

    def _cut(self, text: list[int]) -> list[int]:
        """It ends 8 tokens before a block boundary, so that every question crosses one, as a long question does anyway."""
        return text[: (len(text) + 8) // self.block * self.block - 8]

    def play(self, send: Send, answer: list[int] | None) -> Iterator[list[Any]]:
        """Answers of each part but the last. ``answer``: the first one that engine "off" gave."""
        first = send([self.text + self.asked[0]], self.answer_tokens)
        yield first
        history = [*self.text, *self.asked[0], *(answer or first[0].generated), *tokens("\nUser 0: And which of that")]
        end = tokens(" is above?\nAssistant:")
        spaces = (2 - len(history) - len(end)) % self.block  # the convolution, of 4 tokens, then needs one from before
        turn = history + tokens(" ") * spaces + end
        herd = [self.herd_text + asked for asked in self.asked[2:6]]
        for prompts in ([turn], [turn], [self.text + self.asked[1]], herd):
            yield send(prompts, SHORT_ANSWER)

    def play_chunked(self, send: Send) -> list[Any]:
        """The answer of the last part."""
        send([self.start + self.asked[6]], SHORT_ANSWER)
        return send([self.unrelated, self.start + self.asked[7]], SHORT_ANSWER)[1:]


def judge(truth: Sequence[Sequence[Any]], rounds: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What an engine did in a part: for each round the answers of caching off, and its own."""
    compared = [entry for pair in zip(truth, rounds, strict=True) for entry in compare_results(*pair)]
    gaps = [gap for entry in compared if (gap := entry["max_log_prob_difference"]) is not None]
    is_number = not any(isnan(value) for one in rounds for result in one for value in result.log_probs)
    waits_ms = [1e3 * max(result.time_to_first_token_s for result in one) for one in rounds]
    return {
        "exact": all(one["tokens_equal"] for one in compared)
        and all(gap <= SAME_LOG_PROB for gap in gaps)
        and is_number,
        "max_log_prob_difference": max(gaps, default=None),
        "reused_tokens": min(sum(result.reused_tokens for result in one) for one in rounds),
        "prompt_tokens": sum(result.prompt_tokens for result in rounds[0]),
        "first_token_ms": statistics.median(waits_ms),
        "first_tokens_ms": waits_ms,
    }


def show(parts: Sequence[dict[str, Any]]) -> None:
    """A row for each part, then what comes of all."""
    print(
        f"  {'what is sent':<34}{'megatron-core':>16}{'this cache':>16}    first token: {' / '.join(ENGINES.values())}"
    )
    for number, part in enumerate(parts, 1):
        found = [part["engines"][name] for name in ENGINES]
        cells = [f"{'exact' if one['exact'] else 'WRONG'}{one['reused_tokens']:>8,}" for one in found[1:]]
        times = " / ".join(f"{one['first_token_ms']:.0f}" for one in found)
        print(f"{number} {part['part']:<34}{cells[0]:>16}{cells[1]:>16}    {times} ms")
    upstream, ours = ([part["engines"][name] for part in parts] for name in ("upstream", "ours"))
    exact = [sum(one["exact"] for one in each) for each in (ours, upstream)]
    both = [(a, b) for a, b in zip(upstream, ours, strict=True) if a["exact"] and b["exact"]]
    more = sum(b["reused_tokens"] > a["reused_tokens"] for a, b in both)
    print(
        f"Exact in {exact[0]} of {len(parts)} parts: this cache. In {exact[1]} of {len(parts)}: megatron-core's.",
        end=" ",
    )
    print(f"Where both are exact, this cache reuses more in {more} of {len(both)}.")


def draw(path: Path, parts: Sequence[dict[str, Any]], subtitle: str) -> None:
    """First tokens side by side. Of the first part, which fills the cache, there is nothing to see."""
    engines = {name: [part["engines"][name] for part in parts[1:]] for name in ENGINES}
    draw_bars(
        path,
        [part["part"] for part in parts[1:]],
        {name: [one["first_token_ms"] for one in row] for name, row in engines.items()},
        title="Time to first token: shorter is better",
        subtitle=subtitle,
        figure_of=lambda value: f"{value:,.0f} ms",
        ranges={name: [one["first_tokens_ms"] for one in row] for name, row in engines.items()},
        notes={
            (name, at): "WRONG ANSWER"
            for name, row in engines.items()
            for at, one in enumerate(row)
            if not one["exact"]
        },
    )


def run(argv: Sequence[str] | None, interrupt: terminal.Interrupt) -> int:
    """Runs the demo."""
    parser = terminal.command_parser(__doc__)
    parser.add_argument("--rounds", type=options.positive_int, default=3, metavar="N", help="default: %(default)s")
    options.add_options(parser, "--seed", "--device", "--json", "--plot")
    parser.set_defaults(tp=1, pp=1)
    args = parser.parse_args(argv)
    options.check_output(args)
    with running.started_platform(args) as platform:
        preset, block, text_tokens, cache_gb, mamba_gb = SIZES[platform.device.type]
        model = build_hybrid_model(replace(get_preset(preset), dtype="float32"), seed=args.seed, platform=platform)
        budgets = options.Budgets(cache_gb=cache_gb, mamba_gb=mamba_gb)
        sessions = [Session(number, block, text_tokens) for number in range(args.rounds)]
        limits = {"max_requests": 16, "block_size_tokens": block, "max_sequence_length": text_tokens + 10 * block}
        whole, chunked = {"max_tokens": 128 * block}, {"max_tokens": 8 * block, "enable_chunked_prefill": True}
        stop = partial(running.stop_requested, platform, interrupt)

        def send(engine: Any, prompts: list[list[int]], count: int) -> list[Any]:
            sampling = running.greedy(count)
            sampling.return_log_probs = sampling.skip_prompt_log_probs = True
            return running.send(engine, prompts, sampling, stop)

        answers: dict[str, list[list[list[Any]]]] = {name: [[] for _ in sessions] for name in ENGINES}
        for steps in (whole, chunked):
            with ExitStack() as stack:
                engines = {
                    name: stack.enter_context(
                        running.running_engine(name, model, limits | steps | options.ENGINES[name](budgets))
                    )
                    for name in ENGINES
                }
                for number, session in enumerate(sessions):  # the engines take turns
                    for name, engine in engines.items():
                        ask, found, off = partial(send, engine), answers[name][number], answers["off"][number]
                        if steps is chunked:
                            found.append(session.play_chunked(ask))
                        else:
                            found += session.play(ask, off[0][0].generated if off else None)
        machine = running.hardware(platform)
    parts = []
    for at, part in enumerate(PARTS):
        truth, *_ = rounds = [[one[at] for one in answers[name]] for name in ENGINES]
        judged = {name: judge(truth, each) for name, each in zip(ENGINES, rounds, strict=True)}
        parts.append({"part": part, "engines": judged})
    workload = f"{preset} hybrid model, float32, on {machine.get('gpu') or 'CPU (' + machine['processor'] + ')'}. "
    workload += f"Questions about a text of {len(sessions[0].text):,} tokens. Medians of {args.rounds} rounds."
    print(f"{workload}\n")
    show(parts)
    if args.json is not None:
        facts = {"workload": workload, "versions": running.versions(), "hardware": machine, "seed": args.seed}
        terminal.write_json(args.json, facts | {"parts": parts})
    if args.plot is not None:
        terminal.write_whole(args.plot, lambda path: draw(path, parts, workload))
    return 0 if all(part["engines"]["ours"]["exact"] for part in parts) else 1


main = terminal.as_main(run)

if __name__ == "__main__":
    raise SystemExit(main())
