"""Grammars of answers, by llguidance: what a request asks for, checked in a process of its own, and the tokens that may come next.

The library has limits of its own for single masks. Compiling has not: a few hundred characters took 34 s and 2.2 GiB, others
overflowed the stack. So each grammar is compiled in a child first, which may fail.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hybrid_prefix.errors import FieldError

LIMIT_S = 3  # of processor time to compile a grammar, and of the wait for another child; twice as long for this one
LIMIT_BYTES = 128 * 2**20  # of memory to compile it, which is most of what a kept one has; a usual one takes 30 MiB
MOST_CHARACTERS = 2**18  # of a grammar
_SIDE_BY_SIDE = threading.BoundedSemaphore(2)
_FIELD = "structured_outputs"
# Of a mask, and of what an ambiguous grammar may be at a token: a mask takes up to 0.1 s with them, and seconds with the defaults. What
# needs more fails; an object of 250 optional fields does not.
_LIMITS = {"max_items_in_row": 1000, "step_max_items": 5_000, "verbose_errors": False}
# Compiles and makes the first mask, with a fraction of the stack that the engine's threads have.
_CHILD = f"""
import json, resource as r, sys
text, special = json.load(sys.stdin)
for kind, most in ((r.RLIMIT_AS, {LIMIT_BYTES}), (r.RLIMIT_CPU, {LIMIT_S}), (r.RLIMIT_STACK, 2**20), (r.RLIMIT_CORE, 0)):
    r.setrlimit(kind, (most, most))
import llguidance as ll
class Bytes:
    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([at]) for at in range(256)), b"<end>", *map(str.encode, special)]
    special_token_ids = [*range(256, len(tokens))]
    __call__ = staticmethod(list)
tokenizer = ll.LLTokenizer(ll.TokenizerWrapper(Bytes()))
matcher = ll.LLMatcher(tokenizer, text, log_level=0, limits=ll.LLParserLimits(**{_LIMITS}))
matcher.is_error() or matcher.compute_bitmask()
sys.stdout.write(matcher.get_error())
"""


def check_compiles(wanted: Mapping[str, Any], tokenizer: Any) -> None:
    """Compiles a grammar in a child, within the limits. Takes a tenth of a second; once for each grammar.

    Args:
        wanted: As of `AnswerGrammar`.
        tokenizer: Likewise.

    Raises:
        FieldError: It cannot be compiled within `LIMIT_S` and `LIMIT_BYTES`, or there is no llguidance. Of an OSError: it was not tried.
    """
    _refuse(_problem_of(json.dumps(wanted), *getattr(tokenizer, "special", {}).values()))


class AnswerGrammar:
    """The grammar of one answer, which follows its tokens.

    Args:
        wanted: What the answer must match: `SamplingOptions.structured_outputs`.
        tokenizer: A `Tokenizer`.
        vocab_size: Of the model.
        ends: The request's end tokens. They are no text: each may come where the text is complete.

    Attributes:
        ends_now: Whether only an end token may come next.
        stuck: Why nothing may come next, or the mask was too dear, in one line; empty: it is not so.

    Raises:
        FieldError: The grammar cannot be compiled, there is no llguidance, or no end token.
    """

    def __init__(self, wanted: Mapping[str, Any], tokenizer: Any, vocab_size: int, ends: Collection[int]) -> None:
        # A model may have more tokens, for which there is no text.
        size = min(vocab_size, getattr(tokenizer, "vocab_size", vocab_size))
        self._ends = [token for token in ends if 0 <= token < size]
        if not self._ends:
            raise FieldError(_FIELD, f"{_FIELD}: no token ends the answer (ignore_eos), but a grammar has an end")
        self._matcher = _compiled(tokenizer, size, json.dumps(wanted)).deep_copy()
        # llguidance's end token is one more than the vocabulary has.
        self._text, self._taken = np.full(size // 32 + 1, 0xFFFFFFFF, dtype=np.uint32), 0
        for token in (size, *self._ends):
            self._text[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF
        self._mask: np.ndarray[Any, np.dtype[np.uint32]] | None = None
        self.ends_now, self.stuck = False, ""

    def mask(self, answer: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Which tokens may follow.

        Args:
            answer: Tokens so far; may be fewer than before, of an answer that is decoded again.

        Returns:
            (words,) uint32: bit ``i % 32`` of word ``i // 32`` says whether token ``i`` may come; tokens without a bit may not. All
            bits if it is `stuck`.
        """
        matcher = self._matcher
        if self._mask is not None and len(answer) == self._taken:  # asked for again: processed log-probs
            return self._mask
        if len(answer) < self._taken:
            matcher.reset()
            self._taken = 0
        matcher.consume_tokens(list(answer[self._taken :]))
        self._taken = len(answer)
        mask = self._mask = np.empty_like(self._text)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        mask &= self._text
        is_complete, goes_on = matcher.is_accepting(), mask.any()
        self.ends_now = is_complete and not goes_on
        why = matcher.get_error() or ("" if is_complete or goes_on else "no token of the vocabulary goes on")
        self.stuck = f"{_FIELD}: {' '.join(why.split())[:200]}" if why else ""
        if self.stuck:
            mask[:] = 0xFFFFFFFF
        elif is_complete:
            for token in self._ends:
                mask[token // 32] |= 1 << token % 32
        return mask


@functools.lru_cache(maxsize=64)
def _compiled(tokenizer: Any, size: int, wanted: str) -> Any:
    """llguidance's matcher, to be copied. Counts work, not time, so that ranks decide alike. The interpreter's lock is free meanwhile."""
    text, llguidance = _grammar(wanted)
    if not hasattr(tokenizer, "token_bytes"):
        raise FieldError(_FIELD, f"{_FIELD} needs the bytes of tokens, which {type(tokenizer).__name__} does not give")
    limits = llguidance.LLParserLimits(**_LIMITS)
    matcher = llguidance.LLMatcher(_vocabulary(tokenizer, size), text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    _refuse(matcher.get_error())
    return matcher


@functools.lru_cache(maxsize=256)
def _problem_of(wanted: str, *special: str) -> str:
    """Why a grammar cannot be compiled; empty: it can. Raises FieldError if this may be otherwise the next time."""
    text, _ = _grammar(wanted)
    if not _SIDE_BY_SIDE.acquire(timeout=LIMIT_S):
        _refuse("others take long: try again", TimeoutError())
    try:
        given = json.dumps([text, [name for name in special if name in text]])
        command = [sys.executable, "-c", _CHILD]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        done = None
    except OSError as error:
        _refuse(f"no process to try it in: {error.strerror}", error)
    finally:
        _SIDE_BY_SIDE.release()
    if done is None or done.returncode:
        return f"it takes more than {LIMIT_BYTES >> 20} MiB, {LIMIT_S} s or the stack"
    return done.stdout


def parts_of(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """llguidance's grammars of what an answer must match, the first of all of it. Raises FieldError as `check_compiles`."""
    text, _ = _grammar(json.dumps(wanted))
    is_lark = not wanted.keys().isdisjoint(("grammar", "choice"))
    found: list[dict[str, Any]] = [{"lark_grammar": text}] if is_lark else json.loads(text)["grammars"]
    return found


def _refuse(problem: str, cause: OSError | None = None) -> None:
    if problem:
        raise FieldError(_FIELD, f"{_FIELD} cannot be compiled: {' '.join(problem.split())[:200]}") from cause


def _grammar(wanted: str) -> tuple[str, Any]:
    """llguidance's text of a grammar, and the library. Raises FieldError: there is none, or the text is too long."""
    try:
        import llguidance
    except ImportError:
        raise FieldError(_FIELD, f"{_FIELD} needs llguidance: pip install 'megatron-hybrid-prefix[grammar]'") from None
    ((kind, value),), make = json.loads(wanted).items(), llguidance.LLMatcher
    match kind:
        case "regex":
            text = make.grammar_from_regex(value)
        case "grammar":
            text = make.grammar_from_lark(value)
        case "choice":
            text = make.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
        case _:
            schema = json.dumps(value if kind == "json" else {"type": "object"})
            try:
                text = make.grammar_from_json_schema(schema, overrides={"lenient": False})
            except ValueError as error:  # a number that is none
                _refuse(str(error))
    if len(text) > MOST_CHARACTERS:
        raise FieldError(_FIELD, f"{_FIELD} has {len(text)} characters, more than {MOST_CHARACTERS}")
    return text, llguidance


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, size: int) -> Any:
    """llguidance's form of a tokenizer: the bytes of each token within a text. Its end token is one more than there are."""
    import llguidance

    texts = [tokenizer.token_bytes(token, token) for token in range(size)]

    class Vocabulary:
        eos_token_id, bos_token_id = size, None
        special_token_ids = (*tokenizer.special, size)
        tokens = (*texts, b"<end of the answer>")

        def __call__(self, text: bytes) -> list[int]:
            return list(tokenizer.tokenize(text.decode(errors="replace")))

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()))
