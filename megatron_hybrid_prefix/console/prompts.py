"""Prompts and how to sample: their options, and reading prompts as tokens from text, JSON lines, sessions, conversations."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.answers import Request
from megatron_hybrid_prefix.console.engine_options import positive_int
from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, json_lines, read_json, read_text
from megatron_hybrid_prefix.sampling import SamplingOptions, check_integer, check_tokens
from megatron_hybrid_prefix.text.tokenizer import Tokenizer, common_tokens, other_ends, prompt_tokens

# What a line of JSON may say of its prompt, and the types; the rest is said for all prompts.
LINE_FIELDS: dict[str, type] = {
    "num_tokens_to_generate": int,
    "cache_salt": str,
    "cache_read": bool,
    "cache_write": bool,
    "cache_breakpoints": list,
    "cache_session": dict,
    "cache_uses": int,
    "cache_pin": dict,
}


# --- Options ---------------------------------------------------------------------------------------------------------


def add_prompt_options(parser: Any) -> None:
    """Adds prompts as text and in files; see `parse_prompts`."""
    add = parser.add_argument_group("input").add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="a prompt, as text; - is standard input, also for the files below")
    for name, text in (
        ("--jsonl", "prompts as JSON lines, see below (repeatable)"),
        ("--sessions", "recorded requests as JSON lines, see below; sent by timestamp (repeatable)"),
    ):
        add(name, action="append", default=[], type=Path, metavar="F", help=text)
    add("--conversation", type=Path, metavar="F", help="a conversation as JSON, see below; sent turn by turn")


def parse_prompts(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments: prompts and options in any order, and after ``--`` only prompts. The prompt ``-`` is standard input."""
    own, literal = list(argv), []
    if "--" in argv:  # parse_intermixed_args would take what comes after it for options
        at = own.index("--")
        own, literal = own[:at], own[at + 1 :]
    args = parser.parse_intermixed_args(own)
    args.prompt = [*(Path(text) if text == "-" else text for text in args.prompt), *literal]
    return args


def add_sampling_options(parser: Any) -> None:
    """Adds how answers are sampled, and where they end."""
    add = parser.add_argument_group("sampling").add_argument
    text = "length of an answer (default: %(default)s)"
    add("--num-tokens-to-generate", type=positive_int, default=32, metavar="N", help=text)
    how = "(with none of --temperature, --top-k and --top-p: as --hf says, else greedy)"
    add("--temperature", type=float, help=f"sampling temperature; 0 is greedy {how}")
    add(
        "--top-k",
        type=int,
        help="sample from the K tokens of the highest probability; 1 is greedy, 0 is off (default: 0)",
    )
    add("--top-p", type=float, help="nucleus sampling, 0 to 1; 0 is off (default: 0)")
    add("--stop-word", action="append", default=[], metavar="TEXT", help="stop before this text (repeatable)")
    add("--ignore-eos", action="store_true", help="do not stop at an end token")
    text = "return log-probs of the generated tokens"
    add("--log-probs", action=argparse.BooleanOptionalAction, default=True, help=text)


# --- Prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A shared prefix, whose parts end at ``prefix_ends``, and turns. ``separator`` follows each answer.

    A turn is the tokens to append to the history, and how many of them are the message: the others begin the answer.
    """

    prefix: list[int]
    prefix_ends: list[int]
    turns: list[tuple[list[int], int]]
    separator: list[int]
    sampling: dict[str, Any]

    def play(self, answer_to: Callable[[Request], list[int]]) -> list[Request]:
        """Sends the turns one after another, each with the history so far. Returns all requests."""
        sent: list[Request] = []
        history, ends = self.prefix, self.prefix_ends
        for number, (question, message_tokens) in enumerate(self.turns, 1):
            prompt = [*history, *question]
            ends = [*ends, len(history) + message_tokens]
            inner = sorted({end for end in ends if 0 < end < len(prompt)})
            hint = {"cache_breakpoints": inner} if inner else {}
            sent.append(Request(label=f"turn {number}", tokens=prompt, sampling=self.sampling | hint))
            history = [*prompt, *answer_to(sent[-1]), *self.separator]
            ends = [*ends, len(history)]
        return sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Turns the command's input into tokens.

    Attributes:
        tokenizer: The tokenizer.
        vocab_size: Vocabulary size of the model.
        add_bos: Whether a text begins with ``bos`` even if the tokenizer does not begin it so.
        sampling: Sampling parameters; a line of JSON may have some of its own.
    """

    tokenizer: Tokenizer
    vocab_size: int
    add_bos: bool
    sampling: dict[str, Any]

    def prompts(self, args: argparse.Namespace) -> list[Request]:
        """Prompts from arguments and JSON lines, in this order."""
        texts = [read_text(text) if isinstance(text, Path) else text for text in args.prompt]
        found = [self._request(f"prompt {n}", self._begin(text)) for n, text in enumerate(texts, 1)]
        return found + [self._json_line(*line) for line in json_lines(args.jsonl, "prompts")]

    def sessions(self, paths: Sequence[Path]) -> list[Request]:
        """Prompts of recorded sessions, by time."""
        lines = []
        for where, label, data in json_lines(paths, "requests"):
            if not isinstance(data, dict) or not {"timestamp", "input"} <= data.keys():
                raise InputError(f'{where}: expected an object with "timestamp" and "input"')
            timestamp, text = data["timestamp"], data["input"]
            if type(timestamp) not in (int, float) or (type(timestamp) is float and not math.isfinite(timestamp)):
                raise InputError(f'{where}: "timestamp" must be a number')
            if not isinstance(text, str):
                raise InputError(f'{where}: "input" must be text')
            lines.append((timestamp, self._request(label, self._begin(text), where)))
        # Requests of the same time keep the order of files and lines.
        return [request for _, request in sorted(lines, key=lambda line: line[0])]

    def conversation(self, data: Any, where: str) -> Conversation:
        """The conversation in the parsed JSON of a file."""
        if not isinstance(data, dict) or "turns" not in data or data.keys() - {"system", "context", "turns"}:
            raise InputError(f'{where}: expected an object with "system", "context" and "turns"')
        intro = [data[key] for key in ("system", "context") if key in data]
        if not all(isinstance(text, str) for text in intro) or not isinstance(data["turns"], list):
            raise InputError(f'{where}: "system" and "context" must be text, "turns" a list')
        if not data["turns"]:
            raise InputError(f"{where}: no user turn")
        turns: list[tuple[list[int], int]] = []
        for number, turn in enumerate(data["turns"], 1):
            if not isinstance(turn, str):
                raise InputError(f"{where}: turn {number} must be text")
            question, ends = self._with_ends([f"User: {turn}\n", "Assistant:"], self._tokens)
            turns.append((question, ends[0]))
        first = self._begin("")[:1]
        first = first if first == [self.tokenizer.bos] else []  # a tokenizer may also end a text, but here it goes on
        prefix, ends = self._with_ends([f"{text}\n\n" for text in intro], lambda text: first + self._tokens(text))
        separator = self._tokens("\n")
        return Conversation(prefix=prefix, prefix_ends=ends, turns=turns, separator=separator, sampling=self.sampling)

    def _with_ends(self, parts: list[str], tokenize: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
        """Tokens of the joined parts; and for each part, the length in tokens of the prefix that ends with it."""
        tokens = tokenize("".join(parts))
        return tokens, [common_tokens(tokens, tokenize(text)) for text in accumulate(parts)]

    def _json_line(self, where: str, label: str, data: Any) -> Request:
        if not isinstance(data, dict) or ("prompt" in data) == ("tokens" in data):
            raise InputError(f'{where}: expected an object with either "prompt" or "tokens"')
        for key, value in data.items():
            if key not in ("prompt", "tokens", *LINE_FIELDS):
                raise InputError(f"{where}: unknown field {key!r}")
            if key in LINE_FIELDS and type(value) is not LINE_FIELDS[key]:
                raise InputError(f"{where}: {key}={value!r} is not of type {LINE_FIELDS[key].__name__}")
        sampling = self.sampling | {key: data[key] for key in data.keys() & LINE_FIELDS.keys()}
        with as_input_errors(ValueError, prefix=f"{where}: "):
            check_integer("num_tokens_to_generate", sampling["num_tokens_to_generate"], 1)
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
                    f"{where}: cache_breakpoints: {position!r} is not between 1 and the prompt's {len(tokens)} tokens"
                )
        return Request(label=label, tokens=tokens, sampling=sampling or self.sampling)

    def _begin(self, text: str) -> list[int]:
        return prompt_tokens(self.tokenizer, text, add_bos=self.add_bos)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.tokenize(text))


def sampling_from(
    args: argparse.Namespace, tokenizer: Tokenizer, vocab_size: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The command's sampling options as fields and attributes of megatron's ``SamplingParams``.

    Args:
        args: Parsed options of `add_sampling_options`.
        tokenizer: The tokenizer.
        vocab_size: Vocabulary size of the model.
        defaults: What the model says of sampling: its penalty counts always, the rest if the command says nothing.

    Raises:
        InputError: A value is out of range. Megatron would only assert on it in the middle of the run.
    """
    eod, ends = (None, ()) if args.ignore_eos else (tokenizer.eod, other_ends(tokenizer))
    fields = {
        "num_tokens_to_generate": args.num_tokens_to_generate,
        "stop_words": args.stop_word or None,
        "termination_id": -1 if eod is None else eod,
        "return_log_probs": args.log_probs,
        "skip_prompt_log_probs": True,
    } | ({"stop_token_ids": list(ends)} if ends else {})
    if not all(args.stop_word):
        raise InputError("--stop-word: the text is empty")
    given = {name: value for name in ("temperature", "top_k", "top_p") if (value := getattr(args, name)) is not None}
    how = {name: value for name, value in defaults.items() if name == "repetition_penalty" or not given} | given
    if not how.keys() - {"repetition_penalty"}:
        how["temperature"] = 0.0
    if not how.get("top_p", 1):  # off, as in megatron
        how["top_p"] = 1.0
    with as_input_errors(ValueError):
        check_tokens("stop_token_ids", ends, vocab_size)
        options = SamplingOptions(**how)
        options.check_vocabulary(vocab_size)
    return fields | options.as_fields()


def for_megatron(sampling: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The sampling parameters for megatron's own engine, which ends an answer at one token and at texts.

    Raises:
        InputError: It cannot sample so, or cannot end an answer at one of the tokens.
    """
    if "sampling_options" in sampling:
        raise InputError(
            "engine upstream: megatron samples by top_k or by top_p, and has no min_p and repetition_penalty: give other values, "
            "or --no-generation-config"
        )
    tokens = sampling.get("stop_token_ids", ())
    texts = [tokenizer.detokenize([token]) for token in tokens]
    for token, text in zip(tokens, texts, strict=True):
        if tokenizer.tokenize(text) != [token]:
            raise InputError(
                f"engine upstream: megatron cannot end an answer at token {token}, whose text is not that token alone: give "
                "--ignore-eos"
            )
    rest = {name: value for name, value in sampling.items() if name != "stop_token_ids"}
    return rest | {"stop_words": [*(sampling["stop_words"] or ()), *texts] or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to send: prompts or a conversation."""

    prompts: list[Request]
    conversation: Conversation | None
    batched: bool

    def longest(self) -> list[Request]:
        """All requests at their longest. Generated answers may end earlier."""
        if self.conversation is None:
            return self.prompts
        return self.conversation.play(lambda request: [0] * request.sampling["num_tokens_to_generate"])


def read_work(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    vocab_size: int,
    max_sequence_length: int,
    defaults: Mapping[str, Any],
) -> Work:
    """Reads and checks all input. ``defaults``: as of `sampling_from`. Raises InputError if some of it is invalid."""
    sampling = sampling_from(args, tokenizer, vocab_size, defaults)
    reader = Reader(tokenizer=tokenizer, vocab_size=vocab_size, add_bos=args.add_bos, sampling=sampling)
    conversation = None
    if args.conversation is not None:
        conversation = reader.conversation(read_json(args.conversation), str(args.conversation))
    prompts = reader.prompts(args)
    given = bool(prompts) + (conversation is not None) + bool(args.sessions)
    if given != 1:
        raise InputError(
            "give prompts (as text or --jsonl), or --conversation, or --sessions"
            + ", but only one of them" * (given > 1)
        )
    prompts = prompts or reader.sessions(args.sessions)
    if conversation is not None and args.concurrency == "batch":
        raise InputError("--concurrency batch: the turns of a conversation run one after another")
    usual = "sequential" if args.sessions or conversation is not None else "batch"
    work = Work(prompts=prompts, conversation=conversation, batched=(args.concurrency or usual) == "batch")
    for request in work.longest():
        if len(request.tokens) >= max_sequence_length:
            raise InputError(
                f"{request.label}: {len(request.tokens)} tokens leave no room to generate in "
                f"max_sequence_length={max_sequence_length}"
            )
        if args.max_tokens is not None and len(request.tokens) > args.max_tokens and not args.chunked_prefill:
            raise InputError(
                f"{request.label}: {len(request.tokens)} tokens are more than --max-tokens {args.max_tokens}: raise it "
                "or add --chunked-prefill"
            )
    return work
