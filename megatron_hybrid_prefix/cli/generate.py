"""Generate with a hybrid model, on one or more caching engines side by side.

The input is prompts, a conversation or recorded sessions. The output is a table: how many prompt tokens of each request
were computed, how many were reused, and how long it took. The prefix cache is on (--compare off: without). With several
engines (--compare) their answers are compared.

examples:
    hybrid-prefix generate "Hello" --preset tiny
    hybrid-prefix generate "Once upon a time" --hf ./Nemotron-H-8B
    hybrid-prefix generate --conversation session.json --compare off --compare upstream --compare ours --json result.json
    hybrid-prefix generate --sessions agents.jsonl --compare off --compare upstream --compare ours
    torchrun --nproc-per-node 2 -m megatron_hybrid_prefix generate --jsonl prompts.jsonl --preset small --tp 2

--jsonl: one JSON object per line, with "prompt" (text) or "tokens" (ids). A line may have its own "num_tokens_to_generate",
and for the engine "ours":
    "cache_salt"          text; requests with different salts share nothing
    "cache_read"          false: do not reuse cached prefixes
    "cache_write"         false: do not cache this request
    "cache_breakpoints"   token positions up to which other prompts will share this one
    "cache_session"       {"id": text, "end": true}: its session, and whether that is over with it
    "cache_uses"          how many more times this prompt will come
    "cache_pin"           {"requests": n} or {"seconds": s}: how long it is kept

--conversation: one JSON object, {"system": "...", "context": "...", "turns": ["...", ...]}. The first engine's answers become the
history for all engines, so all engines get the same prompts. The end of each message is sent as a breakpoint
("cache_breakpoints").

--sessions: one JSON object per line, with "timestamp" (a number) and "input" (the whole prompt as text). Requests are
sent one after another, by timestamp. Other fields are ignored.

In the report, "least possible" is what a perfect cache would compute: the tokens after each prompt's longest common prefix
with an earlier prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import prompts, running, terminal
from megatron_hybrid_prefix.console.answers import EngineRun, Request, compare_results, print_report, totals
from megatron_hybrid_prefix.console.hf import build_model, default_sampling, tokenizer_of
from megatron_hybrid_prefix.console.prompts import Work, for_megatron
from megatron_hybrid_prefix.console.terminal import ArgumentParser, Interrupt, Stopped, as_main
from megatron_hybrid_prefix.text.tokenizer import Tokenizer

DEFAULT_ENGINES = ("ours",)

# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    prompts.add_prompt_options(parser)
    group = parser.add_argument_group("model")
    options.add_options(group, *options.MODEL_OPTIONS, "--load", *options.TEXT_OPTIONS)
    group = options.add_several_engines(parser, "--compare", DEFAULT_ENGINES)
    text = "send prompts one by one or all at once (default: batch; conversations and sessions: sequential)"
    group.add_argument("--concurrency", choices=("sequential", "batch"), help=text)
    options.add_options(group, "--max-sequence-length", "--num-speculative-tokens")
    prompts.add_sampling_options(parser)
    options.add_options(parser, "--json", title="output")
    return parser


# --- Run -------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs the same work on one engine after another."""

    def __init__(self, model: Any, tokenizer: Tokenizer, platform: Any, interrupt: Interrupt) -> None:
        self.model, self.tokenizer, self.platform = model, tokenizer, platform
        self.should_stop = partial(running.stop_requested, platform, interrupt)

    def run(
        self, name: str, fields: dict[str, Any], work: Work, sent: list[Request] | None, on_done: Callable[[int], None]
    ) -> EngineRun:
        """Builds the engine ``name``, sends ``sent`` (None: the work's own requests), and releases the engine."""
        from megatron_hybrid_prefix.mcore.runner import check_fits

        with running.running_engine(name, self.model, fields, self.tokenizer) as engine:
            for request in work.longest():
                with terminal.as_input_errors(ValueError, prefix=f"{request.label}: "):
                    check_fits(engine, len(request.tokens), request.sampling["num_tokens_to_generate"])
            results: list[Any] = []

            def answer_to(request: Request) -> list[int]:
                results.extend(self._send(engine, name, [request]))
                on_done(len(results))
                generated: list[int] = results[-1].generated
                return generated

            started_s = time.perf_counter()
            if work.batched:
                sent = work.prompts
                results = self._send(engine, name, sent, on_done)
            elif sent is None and work.conversation is not None:
                sent = work.conversation.play(answer_to)
            else:
                sent = sent or work.prompts
                for request in sent:
                    answer_to(request)
            wall_s = time.perf_counter() - started_s
            return EngineRun(
                name=name, requests=sent, results=results, wall_s=wall_s, prefix_stats=running.cache_figures(engine)
            )

    def _send(
        self, engine: Any, name: str, requests: list[Request], on_done: Callable[[int], None] = lambda count: None
    ) -> list[Any]:
        from megatron_hybrid_prefix.upstream.names import SamplingParams

        fields = [request.sampling for request in requests]
        if name == options.UPSTREAM:
            fields = [for_megatron(sampling, self.tokenizer) for sampling in fields]
        tokens = [request.tokens for request in requests]
        sampling = [SamplingParams.deserialize(one) for one in fields]
        return running.send(engine, tokens, sampling, self.should_stop, on_done)


def run_engines(
    runner: Runner, names: Sequence[str], work: Work, args: argparse.Namespace
) -> tuple[list[EngineRun], dict[str, Any]]:
    """Runs each engine in turn. Returns the results and the engines' settings."""
    platform = runner.platform
    longest = work.longest()
    longest_tokens = max(len(request.tokens) for request in longest)
    shared = options.engine_fields(args, platform.device.type, longest_tokens, args.max_sequence_length)
    budgets = running.budgets_of(args, platform)
    fields = {name: shared | options.ENGINES[name](budgets) for name in names}
    runs: list[EngineRun] = []
    with terminal.progress(names, len(longest)) as done:
        for name in names:
            own = fields[name] | options.state_dtype_field(runner.model, args.state_dtype)
            runs.append(runner.run(name, own, work, runs[0].requests if runs else None, partial(done, name)))
    return runs, {
        "budgets": {name: options.budget_of(fields[name]) for name in names},
        "mamba_gb": budgets.mamba_gb,
        "host_gb": args.host_gb,
        "shared": args.shared,
        "state_dtype": args.state_dtype,
        **options.plain(shared),
    }


# --- Command ---------------------------------------------------------------------------------------------------------


def as_json(
    runs: list[EngineRun], comparisons: list[dict[str, Any]], settings: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """All results as JSON values."""
    return {
        "versions": running.versions(),
        "model": {"preset": args.preset, "hf": args.hf, "seed": args.seed, "load": args.load and str(args.load)},
        **settings,
        "engines": {
            run.name: {
                "totals": totals(run),
                "prefix_stats": run.prefix_stats,
                "requests": [
                    {"label": request.label, "sampling": request.sampling, **asdict(result)}
                    for request, result in zip(run.requests, run.results, strict=True)
                ],
            }
            for run in runs
        },
        "comparisons": comparisons,
    }


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> None:
    """Runs the command."""
    args = prompts.parse_prompts(make_parser(), sys.argv[1:] if argv is None else argv)
    config = options.check_engine_options(args)
    names = options.engine_names(args.compare, DEFAULT_ENGINES, "--compare")
    tokenizer = tokenizer_of(args, config.vocab_size)
    limit = args.max_sequence_length or config.max_sequence_length
    work = prompts.read_work(args, tokenizer, config.vocab_size, limit, default_sampling(args))
    if options.UPSTREAM in names:
        for request in work.longest():
            for_megatron(request.sampling, tokenizer)

    with running.started_platform(args) as platform:
        run_on(platform, names, config, tokenizer, work, args, interrupt)


def run_on(
    platform: Any,
    names: list[str],
    config: Any,
    tokenizer: Tokenizer,
    work: Work,
    args: argparse.Namespace,
    interrupt: Interrupt,
) -> None:
    """Builds the model, runs the engines, prints and writes the report."""
    console = terminal.output_console()
    console.print(platform.describe(), markup=False, soft_wrap=True)
    budgets = running.budgets_of(args, platform)  # before weights are read
    if names == ["ours"]:
        console.print(f"the prefix cache has {budgets.cache_gb:g} GiB (--cache-gb); to go without it: --compare off")
    model = build_model(args, config, platform)
    runner = Runner(model, tokenizer, platform, interrupt)
    if runner.should_stop():
        raise Stopped
    runs, fields = run_engines(runner, names, work, args)
    comparisons = []
    for other in runs[1:]:
        entries = zip(runs[0].requests, compare_results(runs[0].results, other.results), strict=True)
        labelled = [{"label": request.label} | entry for request, entry in entries]
        comparisons.append({"engine": other.name, "against": runs[0].name, "requests": labelled})
    if not terminal.is_main_rank():
        return
    print_report(console, runs, comparisons)
    settings = {"platform": platform.describe(), "engine_fields": fields}
    terminal.save_json(console, args.json, as_json(runs, comparisons, settings, args))


main = as_main(run)
