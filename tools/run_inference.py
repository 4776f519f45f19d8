#!/usr/bin/env python
"""Generate with a hybrid model, with one or more caching engines side by side.

Alone or under torchrun. Prompts come as arguments, text files, JSON lines, a conversation that is replayed turn by turn
or recorded sessions; a table shows, for each request, how many prompt tokens were computed and how many reused, and what
it took. The file is long because it is a whole command: options, input, run, comparison, report, in this order.

    tools/run_inference.py "Hello" --preset tiny
    tools/run_inference.py --conversation session.json --compare off,upstream,ours --json result.json --plot result.png
    tools/run_inference.py --sessions agents.jsonl --compare off,upstream,ours
    torchrun --nproc-per-node 2 tools/run_inference.py --jsonl prompts.jsonl --preset small --tp 2

JSON lines: one object a line with "prompt" (text) or "tokens" (ids), and optionally sampling parameters of its own
("num_tokens_to_generate", "temperature", "top_k", "top_p", "stop_words", "termination_id", "top_n_logprobs"), and for
the engine "ours" "cache_salt" (prompts with different salts share nothing), "cache_read" and "cache_write" (booleans),
and "cache_breakpoints" (lengths in tokens of beginnings of the prompt that others will share).

Conversation: {"system": "...", "context": "...", "turns": ["...", {"regenerate": true}, ...]} (a regenerated turn sends
the previous prompt again and its answer takes the other's place), or {"messages": [{"role": "user", "content": "..."},
...]} where an "assistant" message becomes the history in place of the generated answer. What the first engine
answers is the history for all engines, so that they are given the same prompts. Each prompt goes with the ends of the
messages in it as "cache_breakpoints"; what separates a message from the next counts to it.

Sessions: one object a line with "timestamp" (a number) and "input" (the whole prompt as text), sent in the order of time;
other fields, recorded answers among them, are ignored. The report gives totals, and sets the computed tokens against the
least possible: the tokens by which each prompt goes beyond what it has in common with the beginning of an earlier one.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from _sessions import against_least, least_tokens, print_sessions, read_sessions
from rich.console import Console

from megatron_hybrid_prefix.console.engine_options import (
    DEFAULT_MAMBA_GB,
    ENGINES,
    add_engine_options,
    add_model_options,
    cache_figures,
    check_engine_options,
    engine_fields,
    engine_names,
    plain,
    positive_int,
    started_platform,
    state_dtype_field,
    stop_requested,
    versions,
)
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    EngineRun,
    InputError,
    Interrupt,
    Request,
    Stopped,
    as_input_errors,
    check_writable,
    compare,
    is_main_rank,
    output_console,
    print_report,
    progress,
    read_text,
    run_command,
    save_plot,
    totals,
    write_whole,
)
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.tokenizer import Tokenizer, load_tokenizer

# A line of JSON lines may set these; the type that each must have.
SAMPLING_FIELDS: dict[str, tuple[type, ...]] = {
    "num_tokens_to_generate": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "stop_words": (list,),
    "termination_id": (int,),
    "top_n_logprobs": (int,),
    "cache_salt": (str,),
    "cache_read": (bool,),
    "cache_write": (bool,),
    "cache_breakpoints": (list,),
}


# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """All options, grouped as `--help` shows them."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("input").add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="a prompt as text")
    add("--text-file", action="append", default=[], type=Path, metavar="F", help="a file that is one prompt (repeat)")
    add("--jsonl", action="append", default=[], type=Path, metavar="F", help="prompts as JSON lines (repeat)")
    add("--conversation", type=Path, metavar="F", help="a conversation as JSON, replayed turn by turn")
    add(
        "--sessions",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="recorded requests of sessions as JSON lines, replayed in the order of time (repeat)",
    )

    add = parser.add_argument_group("model").add_argument
    add_model_options(add)
    add("--load", type=Path, metavar="DIR", help="take the weights from a checkpoint of --save")
    add("--save", type=Path, metavar="DIR", help="save the weights before generating")
    add("--tokenizer", type=Path, metavar="DIR", help="a Hugging Face tokenizer folder (default: bytes)")

    add = parser.add_argument_group("engine").add_argument
    add("--compare", default="off", metavar="NAMES", help=f"engines, by comma: {', '.join(ENGINES)} (default: off)")
    add("--concurrency", choices=("sequential", "batch"), help="default: batch; conversations and sessions: sequential")
    add("--max-sequence-length", type=positive_int, help="longest prompt plus answer in tokens (default: the model's)")
    add_engine_options(add, max_requests=16, max_requests_text="default: %(default)s", cuda_graphs_text="default: none")

    sampling = parser.add_argument_group("sampling (upstream's parameters)")
    add = sampling.add_argument
    add("--num-tokens-to-generate", type=positive_int, default=32, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=1.0, help="default: %(default)s")
    add("--top-k", type=int, help="default: 1 (greedy), or 0 (off) where --top-p is given")
    add("--top-p", type=float, default=0.0, help="default: 0 (off)")
    add("--stop-word", action="append", default=[], metavar="TEXT", help="end before this text (repeat)")
    end = sampling.add_mutually_exclusive_group()
    end.add_argument("--termination-id", type=int, metavar="ID", help="end at this token (default: the tokenizer's)")
    end.add_argument("--ignore-eos", action="store_true", help="end at no token")
    add("--log-probs", action=argparse.BooleanOptionalAction, default=True, help="log-probs of the generated tokens")
    add("--top-n-logprobs", type=int, default=0, metavar="N", help="also the N likeliest tokens (in --json)")
    add("--add-bos", action="store_true", help="begin text prompts with the tokenizer's first token")

    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="PATH", help="everything, as JSON")
    add("--plot", type=Path, metavar="PNG", help="computed prompt tokens and time to first token per request")
    return parser


# --- Input -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation.

    Attributes:
        question: Tokens that follow the history; None sends the previous prompt again.
        message_tokens: How many of them are the message; what follows begins the answer.
        answer: Tokens that become the history in place of the generated ones.
    """

    question: list[int] | None
    message_tokens: int = 0
    answer: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A shared beginning, whose parts end at ``prefix_ends``, and turns; ``separator`` ends an answer."""

    prefix: list[int]
    prefix_ends: list[int]
    turns: list[Turn]
    separator: list[int]
    sampling: dict[str, Any]

    def play(self, answer_to: Callable[[Request], list[int]]) -> list[Request]:
        """Send turn after turn, each with the history so far; returns what was sent."""
        sent: list[Request] = []
        history, prompt = self.prefix, self.prefix
        history_ends, ends = self.prefix_ends, self.prefix_ends
        for number, turn in enumerate(self.turns, 1):
            again = turn.question is None
            if not again:
                prompt = [*history, *(turn.question or ())]
                ends = [*history_ends, len(history) + turn.message_tokens]
            label = f"turn {number}" + (" (again)" if again else "")
            inner = sorted({end for end in ends if 0 < end < len(prompt)})
            hint = {"cache_breakpoints": inner} if inner else {}
            sent.append(Request(label=label, tokens=prompt, sampling=self.sampling | hint))
            answer = answer_to(sent[-1])
            history = [*prompt, *(answer if turn.answer is None else turn.answer), *self.separator]
            history_ends = [*ends, len(history)]
        return sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Turns the command's input into tokens."""

    tokenizer: Tokenizer
    vocab_size: int
    add_bos: bool
    sampling: dict[str, Any]

    def prompts(self, args: argparse.Namespace) -> list[Request]:
        """Prompts of all kinds but conversations, in the order: arguments, text files, JSON lines."""
        found = [self._request(f"prompt {n}", self._begin(text)) for n, text in enumerate(args.prompt, 1)]
        found += [self._request(path.name, self._begin(read_text(path))) for path in args.text_file]
        for path in args.jsonl:
            for number, line in enumerate(read_text(path).split("\n"), 1):
                if line.strip():
                    found.append(self._json_line(f"{path}:{number}", f"{path.name}:{number}", line))
        return found

    def sessions(self, paths: Sequence[Path]) -> list[Request]:
        """Prompts of recorded sessions, in the order of time."""
        return [self._request(line.label, self._begin(line.text), line.where) for line in read_sessions(paths)]

    def conversation(self, data: Any, where: str) -> Conversation:
        """The conversation in what a JSON file holds."""
        known = {"messages"} if isinstance(data, dict) and "messages" in data else {"system", "context", "turns"}
        if not isinstance(data, dict) or set(data) - known or not set(data) & {"messages", "turns"}:
            raise InputError(f'{where}: expected an object with "system", "context" and "turns", or with "messages"')
        intro, turns = self._messages(where, data["messages"]) if "messages" in data else self._turns(where, data)
        if not turns:
            raise InputError(f"{where}: no user turn")
        prefix, ends = self._with_ends([f"{text}\n\n" for text in intro], self._begin)
        separator = self._tokens("\n")
        return Conversation(prefix=prefix, prefix_ends=ends, turns=turns, separator=separator, sampling=self.sampling)

    def _turns(self, where: str, data: dict[str, Any]) -> tuple[list[str], list[Turn]]:
        intro = [data[key] for key in ("system", "context") if key in data]
        if not all(isinstance(text, str) for text in intro) or not isinstance(data["turns"], list):
            raise InputError(f'{where}: "system" and "context" must be text, "turns" a list')
        turns: list[Turn] = []
        for number, turn in enumerate(data["turns"], 1):
            if isinstance(turn, str):
                turns.append(self._question(turn))
            elif turn == {"regenerate": True} and turns:
                turns.append(Turn(question=None))
            else:
                raise InputError(f'{where}: turn {number} must be text, or {{"regenerate": true}} after another turn')
        return intro, turns

    def _messages(self, file: str, messages: Any) -> tuple[list[str], list[Turn]]:
        intro: list[str] = []
        turns: list[Turn] = []
        for number, message in enumerate(messages if isinstance(messages, list) else [messages], 1):
            where = f"{file}: message {number}"
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise InputError(f'{where} must be an object with "role" and "content"')
            role, text = message.get("role"), message["content"]
            if role == "user":
                turns.append(self._question(text))
            elif role == "system" and not turns:
                intro.append(text)
            elif role == "assistant" and turns and turns[-1].answer is None:
                turns[-1] = replace(turns[-1], answer=self._tokens(f" {text}"))
            else:
                raise InputError(f"{where}: the role {role!r} cannot stand here")
        return intro, turns

    def _question(self, text: str) -> Turn:
        question, ends = self._with_ends([f"User: {text}\n", "Assistant:"], self._tokens)
        return Turn(question=question, message_tokens=ends[0])

    def _with_ends(self, parts: list[str], tokenize: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
        """Tokens of the parts as one text; and for each part how many tokens, from the front, end with it or before."""
        tokens = tokenize("".join(parts))
        return tokens, [common_tokens(tokens, tokenize(text)) for text in accumulate(parts)]

    def _json_line(self, where: str, label: str, line: str) -> Request:
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(data, dict) or ("prompt" in data) == ("tokens" in data):
            raise InputError(f'{where}: expected an object with either "prompt" or "tokens"')
        for key, value in data.items():
            if key in ("prompt", "tokens"):
                continue
            if key not in SAMPLING_FIELDS:
                raise InputError(f"{where}: unknown field {key!r}")
            if not isinstance(value, SAMPLING_FIELDS[key]) or isinstance(value, bool) != (
                SAMPLING_FIELDS[key] == (bool,)
            ):
                raise InputError(f"{where}: {key}={value!r} is not of type {SAMPLING_FIELDS[key][-1].__name__}")
        sampling = self.sampling | {key: data[key] for key in data.keys() & SAMPLING_FIELDS.keys()}
        if "top_p" in data and "top_k" not in data:
            sampling["top_k"] = 0
        check_sampling(sampling, self.vocab_size, f"{where}: ")
        if "prompt" in data:
            if not isinstance(data["prompt"], str):
                raise InputError(f'{where}: "prompt" must be text')
            return self._request(label, self._begin(data["prompt"]), where, sampling)
        tokens = data["tokens"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise InputError(f'{where}: "tokens" must be a list of token ids')
        return self._request(label, tokens, where, sampling)

    def _request(
        self, label: str, tokens: list[int], where: str | None = None, sampling: dict[str, Any] | None = None
    ) -> Request:
        where = where or label
        if not tokens:
            raise InputError(f"{where}: the prompt is empty")
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"{where}: token {token} is outside the vocabulary of {self.vocab_size}")
        for position in (sampling or {}).get("cache_breakpoints", ()):
            if type(position) is not int or not 0 < position <= len(tokens):
                raise InputError(
                    f"{where}: cache_breakpoints: {position!r} is no length from 1 to {len(tokens)} tokens"
                )
        return Request(label=label, tokens=tokens, sampling=sampling or self.sampling)

    def _begin(self, text: str) -> list[int]:
        return [
            *((self.tokenizer.bos,) if self.add_bos and self.tokenizer.bos is not None else ()),
            *self._tokens(text),
        ]

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.tokenize(text))


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    pairs = zip(a, b, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        InputError: It cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None


def sampling_from(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The command's sampling parameters as fields of upstream's ``SamplingParams``."""
    termination_id = tokenizer.eod if args.termination_id is None else args.termination_id
    return {
        "num_tokens_to_generate": args.num_tokens_to_generate,
        "temperature": args.temperature,
        "top_k": args.top_k if args.top_k is not None else 0 if args.top_p else 1,
        "top_p": args.top_p,
        "stop_words": args.stop_word or None,
        "termination_id": -1 if args.ignore_eos or termination_id is None else termination_id,
        "return_log_probs": args.log_probs,
        "skip_prompt_log_probs": True,
        "top_n_logprobs": args.top_n_logprobs,
    }


def check_sampling(fields: dict[str, Any], vocab_size: int, where: str = "") -> None:
    """Refuse what upstream would assert on in the middle of the run."""
    rules = (
        ("num_tokens_to_generate", fields["num_tokens_to_generate"] >= 1, "must be at least 1"),
        ("temperature", 0 < fields["temperature"] < float("inf"), "must be above 0 (top_k=1 is greedy)"),
        ("top_k", 0 <= fields["top_k"] < vocab_size, f"must be in 0..{vocab_size - 1}"),
        ("top_p", 0 <= fields["top_p"] <= 1, "must be in 0..1"),
        ("top_p", not (fields["top_p"] and fields["top_k"]), f"cannot be used with top_k={fields['top_k']}"),
        ("termination_id", -1 <= fields["termination_id"] < vocab_size, f"is outside the vocabulary of {vocab_size}"),
        ("top_n_logprobs", 0 <= fields["top_n_logprobs"] <= vocab_size, f"must be in 0..{vocab_size}"),
        ("top_n_logprobs", fields["return_log_probs"] or not fields["top_n_logprobs"], "needs log-probs"),
        ("stop_words", all(isinstance(w, str) and w for w in fields["stop_words"] or ()), "must be non-empty texts"),
    )
    for name, holds, problem in rules:
        if not holds:
            raise InputError(f"{where}{name}={fields[name]} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to send: prompts, or a conversation. Of ``sessions`` there are many, and the report has only their totals."""

    prompts: list[Request]
    conversation: Conversation | None
    batched: bool
    sessions: bool = False

    def longest(self) -> list[Request]:
        """Every request, as long as it can become (an answer may end early)."""
        if self.conversation is None:
            return self.prompts
        return self.conversation.play(lambda request: [0] * request.sampling["num_tokens_to_generate"])


def read_work(args: argparse.Namespace, tokenizer: Tokenizer, vocab_size: int, max_sequence_length: int) -> Work:
    """Read and check all input.

    Raises:
        InputError: Something in it cannot be run.
    """
    if args.add_bos and tokenizer.bos is None:
        raise InputError("--add-bos: the tokenizer has no such token")
    sampling = sampling_from(args, tokenizer)
    check_sampling(sampling, vocab_size)
    reader = Reader(tokenizer=tokenizer, vocab_size=vocab_size, add_bos=args.add_bos, sampling=sampling)
    conversation = None
    if args.conversation is not None:
        conversation = reader.conversation(read_json(args.conversation), str(args.conversation))
    prompts = reader.prompts(args)
    given = bool(prompts) + (conversation is not None) + bool(args.sessions)
    if given != 1:
        raise InputError(
            "give prompts (as text, --text-file or --jsonl) or a --conversation or --sessions"
            + ", not both" * (given > 1)
        )
    prompts = prompts or reader.sessions(args.sessions)
    if conversation is not None and args.concurrency == "batch":
        raise InputError("--concurrency batch: the turns of a conversation run one after another")
    usual = "sequential" if args.sessions or conversation is not None else "batch"
    work = Work(
        prompts=prompts,
        conversation=conversation,
        batched=(args.concurrency or usual) == "batch",
        sessions=bool(args.sessions),
    )
    for request in work.longest():
        if len(request.tokens) >= max_sequence_length:
            raise InputError(
                f"{request.label}: {len(request.tokens)} tokens leave no room to generate in "
                f"max_sequence_length={max_sequence_length}"
            )
        if args.max_tokens is not None and len(request.tokens) > args.max_tokens and not args.chunked_prefill:
            raise InputError(
                f"{request.label}: {len(request.tokens)} tokens are more than --max-tokens {args.max_tokens}: raise it, "
                "or give --chunked-prefill"
            )
    return work


def check_options(args: argparse.Namespace) -> tuple[list[str], Any]:
    """Check all that needs neither torch nor input files; returns engine names and the model's dimensions."""
    config = check_engine_options(args)
    names = engine_names(args.compare, "--compare")
    if (args.max_sequence_length or 0) > config.max_sequence_length:
        raise InputError(f"--max-sequence-length: {args.preset} has {config.max_sequence_length}")
    if args.load is not None and not args.load.is_dir():
        raise InputError(f"--load: there is no folder {args.load}")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install matplotlib")
    if args.save is not None and args.save.is_dir() and any(args.save.iterdir()):
        raise InputError(f"--save: {args.save} is not empty")
    new_folder = args.save is not None and not args.save.is_dir()
    for path in (args.json, args.plot, args.save if new_folder else None):
        if path is not None:
            check_writable(path)
    return names, config


# --- Run -------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs the same work on one engine after another."""

    def __init__(self, model: Any, tokenizer: Tokenizer, platform: Any, interrupt: Interrupt) -> None:
        self.model, self.tokenizer, self.platform, self._interrupt = model, tokenizer, platform, interrupt

    def should_stop(self) -> bool:
        """Whether any rank got Ctrl-C; see `stop_requested`."""
        return stop_requested(self.platform, self._interrupt)

    def run(
        self,
        name: str,
        fields: dict[str, Any],
        work: Work,
        sent: list[Request] | None,
        on_done: Callable[[int], None],
    ) -> EngineRun:
        """Build the engine ``name``, send ``sent`` (or else the work's own requests), drop it."""
        from megatron_hybrid_prefix.mcore import build_engine
        from megatron_hybrid_prefix.mcore.runner import check_fits, release_engine

        with as_input_errors(ValueError, prefix=f"engine {name}: "):
            engine = build_engine(self.model, tokenizer=self.tokenizer, **fields)
        try:
            for request in work.longest():
                with as_input_errors(ValueError, prefix=f"{request.label}: "):
                    check_fits(engine, len(request.tokens), request.sampling["num_tokens_to_generate"])
            # The first forward of a process pays for lazy set-up. Two tokens are too few to be cached.
            sampling = work.longest()[0].sampling | {"num_tokens_to_generate": 2}
            sampling.pop("cache_breakpoints", None)
            warm_up = Request(label="", tokens=[0, 1], sampling=sampling)
            self._send(engine, [warm_up], lambda count: None)
            started_s = time.perf_counter()
            if work.batched:
                sent = work.prompts
                results = self._send(engine, sent, on_done)
            else:
                results = []

                def answer_to(request: Request) -> list[int]:
                    results.extend(self._send(engine, [request], lambda count: None))
                    on_done(len(results))
                    return results[-1].generated

                if sent is None and work.conversation is not None:
                    sent = work.conversation.play(answer_to)
                else:
                    sent = sent or work.prompts
                    for request in sent:
                        answer_to(request)
            wall_s = time.perf_counter() - started_s
            return EngineRun(
                name=name,
                requests=sent,
                results=results,
                wall_s=wall_s,
                prefix_stats=cache_figures(engine),
            )
        finally:
            release_engine(engine)

    def _send(self, engine: Any, requests: list[Request], on_done: Callable[[int], None]) -> list[Any]:
        from megatron.core.inference.sampling_params import SamplingParams

        from megatron_hybrid_prefix.mcore.runner import run_batch

        results = run_batch(
            engine,
            [request.tokens for request in requests],
            [SamplingParams.deserialize(request.sampling) for request in requests],
            on_step=lambda done, total: on_done(done),
            should_stop=self.should_stop,
        )
        if any(result.status == "stopped" for result in results):
            raise Stopped
        return results


def run_engines(
    runner: Runner, names: Sequence[str], work: Work, args: argparse.Namespace
) -> tuple[list[EngineRun], dict[str, Any]]:
    """Each engine in turn, and the settings they had."""
    device_type = runner.platform.device.type
    longest = work.longest()
    longest_tokens = max(len(request.tokens) for request in longest)
    shared = engine_fields(args, device_type, longest_tokens, args.max_sequence_length)
    state_dtype = state_dtype_field(runner.model, args.state_dtype)
    mamba_gb = args.mamba_gb or DEFAULT_MAMBA_GB[device_type]
    runs: list[EngineRun] = []
    with progress(names, len(longest)) as done:
        for name in names:
            sent = runs[0].requests if runs else None
            fields = shared | ENGINES[name](mamba_gb, args.host_gb or 0.0) | state_dtype
            runs.append(runner.run(name, fields, work, sent, lambda count, name=name: done(name, count)))
            gc.collect()  # the engine's parts refer to each other
    return runs, {
        "mamba_gb": mamba_gb,
        "host_gb": args.host_gb,
        "state_dtype": args.state_dtype,
        **plain(shared),
    }


# --- Command ---------------------------------------------------------------------------------------------------------


def as_json(
    runs: list[EngineRun],
    comparisons: list[dict[str, Any]],
    settings: dict[str, Any],
    args: argparse.Namespace,
    least: list[int] | None,
) -> dict[str, Any]:
    """Everything that was measured; of sessions also the least tokens to compute for each request."""
    return {
        "versions": versions(),
        "model": {"preset": args.preset, "seed": args.seed, "load": args.load and str(args.load)},
        **settings,
        "engines": {
            run.name: {
                "totals": totals(run) if least is None else totals(run) | against_least(run, least),
                "prefix_stats": run.prefix_stats,
                "requests": [
                    {"label": request.label, "sampling": request.sampling, **asdict(result)}
                    | ({} if least is None else {"least_computed_tokens": least[number]})
                    for number, (request, result) in enumerate(zip(run.requests, run.results, strict=True))
                ],
            }
            for run in runs
        },
        "comparisons": comparisons,
    }


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> None:
    """The whole command; see the module's docstring."""
    args = make_parser().parse_intermixed_args(argv)
    names, config = check_options(args)
    with as_input_errors(ValueError):
        tokenizer = load_tokenizer(args.tokenizer, config.vocab_size)
    limit = args.max_sequence_length or config.max_sequence_length
    work = read_work(args, tokenizer, config.vocab_size, limit)

    with started_platform(args) as platform:
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
    """Build the model, run the engines, report."""
    from megatron_hybrid_prefix import models

    console = output_console() if is_main_rank() else Console(quiet=True)
    console.print(platform.describe(), markup=False, soft_wrap=True)
    with as_input_errors(ValueError, PlatformError):
        overrides = {"cuda_graph_impl": "local"} if args.cuda_graphs else {}
        model = models.build_hybrid_model(config, seed=args.seed, platform=platform, **overrides)
        if args.load is not None:
            models.load_checkpoint(model, args.load)
        if args.save is not None:
            models.save_checkpoint(model, args.save)
    runner = Runner(model, tokenizer, platform, interrupt)
    if runner.should_stop():
        raise Stopped
    runs, fields = run_engines(runner, names, work, args)
    comparisons = [
        {"engine": other.name, "against": runs[0].name, "requests": compare(runs[0], other)} for other in runs[1:]
    ]
    if not is_main_rank():
        return
    least = None
    if work.sessions:
        least = least_tokens([request.tokens for request in runs[0].requests])
        print_sessions(console, runs, least, comparisons)
    else:
        print_report(console, runs, comparisons)
    if args.json is not None:
        settings = {"platform": platform.describe(), "engine_fields": fields}
        text = json.dumps(as_json(runs, comparisons, settings, args, least), indent=1, allow_nan=False)
        write_whole(args.json, lambda part: part.write_text(text + "\n", encoding="utf-8"))
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    if args.plot is not None:
        title = f"{args.preset}, {platform.device.type}, tp={args.tp} pp={args.pp}"
        write_whole(args.plot, lambda part: save_plot(part, runs, title))
        console.print(f"wrote {args.plot}", markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(lambda interrupt: run(argv, interrupt))


if __name__ == "__main__":
    sys.exit(main())
