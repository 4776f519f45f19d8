"""Show in one session what this cache does that megatron-core's own does not, against caching off.

    hybrid-prefix demo                                       # in less than a minute on a CPU
    hybrid-prefix demo --rounds 9 --seed 3 --json demo.json --plot demo.png

Users ask questions about a text, this package's own source. The weights are random, so the answers are noise; what is
shown is the cache. (For texts and questions of your own: hybrid-prefix generate --conversation --compare.) Each of three
engines (caching off, megatron-core's cache, this cache) gets the same prompts in the same order:

1. A first question. Nothing is cached yet.
2. The next turn. The answer before it is longer than a block, and the turn continues it.
3. The same prompt again. It ends 2 tokens after a block boundary: spaces in the question see to that.
4. Another user asks about the same text. Nobody has shown before where the two prompts part.
5. A herd: several users ask about one new text at once.
6. With chunked prefill: a prompt whose beginning is cached, in the same steps as a prompt that is not.

The engines take turns, with new texts in each round. First tokens are medians of the rounds; the fastest and the slowest
are shown where they differ much. The model computes in float32, so that another answer is an error and no rounding. An
answer is "exact" if it has the tokens of caching off, and log-probs within 0.0001 of its own. The text is cut 8 tokens
before a block boundary, so that every question crosses it, as one longer than a block does anyway.

Exit code: 0; 1 if this cache gave a wrong answer; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.console import demo_session, running, terminal
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console.demo_report import WIDTH, Part, as_json, outcomes, print_demo, save_demo_plot
from megatron_hybrid_prefix.console.demo_session import Session
from megatron_hybrid_prefix.console.hf import build_model, choose_model
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main

PRESETS = {"cpu": "tiny", "cuda": "small"}
STATES_KEPT = 64  # of a round
EXIT_WRONG = 1


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    text = "rounds; first tokens are their medians (default: %(default)s)"
    parser.add_argument("--rounds", type=options.positive_int, default=3, metavar="N", help=text)
    shown = {"help": "model (default: tiny on CPU, small on GPU)"}
    options.add_options(parser, "--preset", "--seed", "--device", "--json", "--plot", preset=shown)
    parser.set_defaults(tp=1, pp=1)
    return parser


# --- Run -------------------------------------------------------------------------------------------------------------


class Stage:
    """Plays sessions on three engines around one model.

    Attributes:
        fields: Fields of megatron's ``InferenceConfig`` that all engines share.
    """

    def __init__(self, model: Any, platform: Any, sessions: Sequence[Session], interrupt: Interrupt) -> None:
        self._model, self._platform, self._sessions = model, platform, sessions
        self._should_stop = partial(running.stop_requested, platform, interrupt)
        block_tokens = demo_session.BLOCK_TOKENS[platform.device.type]
        longest = max(session.longest_tokens() for session in sessions)
        self.fields: dict[str, Any] = {
            "block_size_tokens": block_tokens,
            "max_requests": 16,
            "max_tokens": max(options.DEFAULT_MAX_TOKENS[platform.device.type], options.step_tokens(longest)),
            "max_sequence_length": ceil_div(longest, block_tokens) * block_tokens,
        }

    def rounds(self, *, chunked: bool) -> dict[str, list[list[list[Any]]]]:
        """The last part if ``chunked``, else the others: engine -> for each round what each part was answered."""
        fields = self.fields
        if chunked:
            fields = fields | {"max_tokens": self._sessions[0].step_tokens, "enable_chunked_prefill": True}
        budgets = self._budgets(fields["max_tokens"])
        found: dict[str, list[list[list[Any]]]] = {name: [] for name in options.DEFAULT_ENGINES}
        what = "prefill in chunks" if chunked else "session"
        with ExitStack() as stack, terminal.progress([what], len(self._sessions)) as done:
            engines = {
                name: stack.enter_context(
                    running.running_engine(name, self._model, fields | options.ENGINES[name](budgets))
                )
                for name in found
            }
            for number, session in enumerate(self._sessions):
                answer = None
                for name, engine in engines.items():
                    ask = partial(self._send, engine)
                    found[name].append(
                        demo_session.play_chunked(session, ask) if chunked else demo_session.play(session, ask, answer)
                    )
                    answer = answer or (None if chunked else found["off"][number][0][0].generated)
                done(what, number + 1)
        return found

    def _budgets(self, max_tokens: int) -> options.Budgets:
        """megatron-core takes its scratch, two states for each block of a step at most, out of what checkpoints get."""
        from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, state_bytes

        slots = STATES_KEPT * len(self._sessions) + 2 * ceil_div(max_tokens, self.fields["block_size_tokens"])
        free = running.free_for_engines(self._platform)
        usual_gb = options.default_cache_gb(free, self._platform.device.type, len(options.DEFAULT_ENGINES))
        mamba_gb = slots * state_bytes(mamba_state_config(self._model)) / 2**30
        return options.Budgets(cache_gb=usual_gb + mamba_gb, mamba_gb=mamba_gb)

    def _send(self, engine: Any, prompts: list[list[int]], count: int) -> list[Any]:
        sampling = running.greedy(count)
        sampling.return_log_probs = sampling.skip_prompt_log_probs = True
        results = running.send(engine, prompts, sampling, self._should_stop)
        failed = [result.error for result in results if result.status == "failed"]
        if failed:
            raise InputError(failed[0])
        return results


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # on a GPU, products of float32 in float32
    # Before torch is imported: where other work runs, threads that spin while they wait take the cores of those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options.check_output(args)
    device_type = args.device or running.default_device()
    config = dataclasses.replace(choose_model(args, PRESETS[device_type]), dtype="float32")
    sizes = demo_session.CONTEXT_TOKENS[device_type], demo_session.BLOCK_TOKENS[device_type]
    sessions = [demo_session.make_session(number, *sizes) for number in range(args.rounds)]
    longest = max(session.longest_tokens() for session in sessions)
    if longest > config.max_sequence_length:
        most = f"which takes {config.max_sequence_length:,}"
        raise InputError(f"--preset: prompts of {longest:,} tokens are too long for {args.preset}, {most}")
    with running.started_platform(args) as platform:
        return run_on(platform, sessions, config, args, interrupt)


def run_on(platform: Any, sessions: list[Session], config: Any, args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Build the model, play the sessions on each engine, report."""
    console = terminal.output_console()
    console.width = min(console.width, WIDTH)
    facts = running.hardware(platform)
    machine = facts.get("gpu") or f"CPU ({facts['processor']})"
    medians = "Medians of 1 round." if args.rounds == 1 else f"Medians of {args.rounds} rounds."
    console.print("One session on three engines: caching off, megatron-core's cache, this cache.")
    console.print(f"Model: {args.preset}, float32, on {machine}.", markup=False)
    console.print(f"The weights are random, so the answers are noise. The caching is real. {medians}\n")
    stage = Stage(build_model(args, config, platform), platform, sessions, interrupt)
    first, last = stage.rounds(chunked=False), stage.rounds(chunked=True)
    rounds = {name: [one + two for one, two in zip(first[name], last[name], strict=True)] for name in first}
    parts = [
        Part(
            name=name,
            title=sessions[0].title(title),
            engines=outcomes({engine: [answers[number] for answers in rounds[engine]] for engine in rounds}),
        )
        for number, (name, title) in enumerate(demo_session.PARTS)
    ]
    if terminal.is_main_rank():
        print_demo(console, parts)
        workload = f"{args.preset} hybrid model, float32, on {machine}. "
        workload += f"Questions about a text of {len(sessions[0].text):,} tokens. {medians}"
        shown = [as_json(part) for part in parts]
        report = {"versions": running.versions(), "platform": platform.describe(), "hardware": facts}
        report |= {"model": {"preset": args.preset, "dtype": "float32", "seed": args.seed}}
        report |= {"engine_fields": stage.fields, "workload": workload, "parts": shown}
        terminal.save_json(console, args.json, report)
        if args.plot is not None:
            terminal.write_whole(args.plot, lambda path: save_demo_plot(path, shown, workload))
            console.print(f"wrote {args.plot}", markup=False, soft_wrap=True)
    return 0 if all(part.engines["ours"].exact for part in parts) else EXIT_WRONG


main = as_main(run)
