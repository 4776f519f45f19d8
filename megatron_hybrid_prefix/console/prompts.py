"""Reads prompts as tokens: from arguments, text files, JSON lines, recorded sessions and conversations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.sessions import read_sessions
from megatron_hybrid_prefix.console.terminal import InputError, Request, read_text
from megatron_hybrid_prefix.tokenizer import Tokenizer, common_tokens

# Fields that a line of a JSONL file may set, and their types.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation.

    Attributes:
        question: Tokens to append to the history. None: send the previous prompt again.
        message_tokens: How many of these tokens are the message. The others begin the answer.
        answer: Tokens to use in the history instead of the generated ones.
    """

    question: list[int] | None
    message_tokens: int = 0
    answer: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A shared prefix, whose parts end at ``prefix_ends``, and turns. ``separator`` follows each answer."""

    prefix: list[int]
    prefix_ends: list[int]
    turns: list[Turn]
    separator: list[int]
    sampling: dict[str, Any]

    def play(self, answer_to: Callable[[Request], list[int]]) -> list[Request]:
        """Sends the turns one after another, each with the history so far. Returns all requests."""
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
        """Prompts from arguments, text files and JSON lines, in this order."""
        found = [self._request(f"prompt {n}", self._begin(text)) for n, text in enumerate(args.prompt, 1)]
        found += [self._request(path.name, self._begin(read_text(path))) for path in args.text_file]
        for path in args.jsonl:
            for number, line in enumerate(read_text(path).split("\n"), 1):
                if line.strip():
                    found.append(self._json_line(f"{path}:{number}", f"{path.name}:{number}", line))
        return found

    def sessions(self, paths: Sequence[Path]) -> list[Request]:
        """Prompts of recorded sessions, by time."""
        return [self._request(line.label, self._begin(line.text), line.where) for line in read_sessions(paths)]

    def conversation(self, data: Any, where: str) -> Conversation:
        """The conversation in the parsed JSON of a file."""
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
                raise InputError(f"{where}: the role {role!r} is not allowed here")
        return intro, turns

    def _question(self, text: str) -> Turn:
        question, ends = self._with_ends([f"User: {text}\n", "Assistant:"], self._tokens)
        return Turn(question=question, message_tokens=ends[0])

    def _with_ends(self, parts: list[str], tokenize: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
        """Tokens of the joined parts; and for each part, the length in tokens of the prefix that ends with it."""
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
                    f"{where}: cache_breakpoints: {position!r} is not between 1 and the prompt's {len(tokens)} tokens"
                )
        return Request(label=label, tokens=tokens, sampling=sampling or self.sampling)

    def _begin(self, text: str) -> list[int]:
        return [
            *((self.tokenizer.bos,) if self.add_bos and self.tokenizer.bos is not None else ()),
            *self._tokens(text),
        ]

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.tokenize(text))


def check_sampling(fields: dict[str, Any], vocab_size: int, where: str = "") -> None:
    """Checks the sampling parameters. Megatron would only assert on them in the middle of the run."""
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


def read_json(path: Path) -> Any:
    """Parses a JSON file.

    Raises:
        InputError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None


def sampling_from(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The command's sampling options as fields of megatron's ``SamplingParams``."""
    termination_id = tokenizer.eod if args.termination_id is None else args.termination_id
    # Megatron ends an answer at one token: others, which --hf may have, are stop words. Special tokens tokenize to themselves.
    use_ends = args.termination_id is None and not args.ignore_eos
    ends = [tokenizer.detokenize([token]) for token in getattr(args, "end_tokens", ()) if use_ends]
    return {
        "num_tokens_to_generate": args.num_tokens_to_generate,
        "temperature": args.temperature,
        "top_k": args.top_k if args.top_k is not None else 0 if args.top_p else 1,
        "top_p": args.top_p,
        "stop_words": [*args.stop_word, *ends] or None,
        "termination_id": -1 if args.ignore_eos or termination_id is None else termination_id,
        "return_log_probs": args.log_probs,
        "skip_prompt_log_probs": True,
        "top_n_logprobs": args.top_n_logprobs,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to send: prompts or a conversation. With ``sessions`` the report has only totals."""

    prompts: list[Request]
    conversation: Conversation | None
    batched: bool
    sessions: bool = False

    def longest(self) -> list[Request]:
        """All requests at their longest. Generated answers may end earlier."""
        if self.conversation is None:
            return self.prompts
        return self.conversation.play(lambda request: [0] * request.sampling["num_tokens_to_generate"])


def read_work(args: argparse.Namespace, tokenizer: Tokenizer, vocab_size: int, max_sequence_length: int) -> Work:
    """Reads and checks all input.

    Raises:
        InputError: Some of it is invalid.
    """
    if args.add_bos and tokenizer.bos is None:
        raise InputError("--add-bos: the tokenizer has no begin-of-text token")
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
            "give prompts (as text, --text-file or --jsonl), or --conversation, or --sessions"
            + ", but only one of them" * (given > 1)
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
                f"{request.label}: {len(request.tokens)} tokens are more than --max-tokens {args.max_tokens}: raise it "
                "or add --chunked-prefill"
            )
    return work
