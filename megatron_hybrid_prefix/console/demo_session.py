"""The session of the demo: which prompts are sent, in which order. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.engine_options import step_tokens
from megatron_hybrid_prefix.tokenizer import ByteTokenizer

PACKAGE = Path(__file__).resolve().parents[1]
CONTEXT_FILES = ("cache.py", "mcore/entrypoints/build.py", "mcore/runner.py")
CONTEXT_TOKENS = {"cpu": 2000, "cuda": 16000}
BLOCK_TOKENS = {"cpu": 128, "cuda": 256}
QUESTION_FILES = ("index/tree.py", "index/matcher.py", "policy/boundaries.py", "pool/slots.py", "index/keys.py")
EXCERPT_CHARACTERS = 200
FOLLOW_UP = "And which of that does the text above use?"
SYSTEM = "You answer questions about the text that follows, briefly and with the names that it uses."
HERD_SYSTEM = "You review the text that follows, one remark a line."
HERD_USERS = 4
SHORT_ANSWER_TOKENS = 8
LONGER_TOKENS = 44  # that the first answer has more than a block
# The convolution of the models looks at 4 tokens. Of a prompt that goes on 2 tokens before its end it needs 1 from before.
TAIL_TOKENS = 2
# Texts end so many tokens before a block boundary: every question crosses it, as one longer than a block does anyway.
GAP_TOKENS = 8

# What is sent in each part, in a few words and in full; the first one fills the cache.
PARTS = (
    ("first question", "First question about a text of {text_tokens:,} tokens"),
    ("next turn, after a long answer", "Next turn, after an answer of {answer_tokens} tokens: longer than a block"),
    (
        "the same prompt again",
        f"The same prompt again; it ends {TAIL_TOKENS} tokens after a block boundary (chosen so)",
    ),
    ("another user, same text", "Another user asks about the same text, for the first time"),
    (
        f"herd of {HERD_USERS}, the slowest",
        f"Herd: {HERD_USERS} users ask about one new text at once (the slowest)",
    ),
    (
        "prefill in chunks",
        "Chunked prefill, {step_tokens:,} tokens a step: known text, with a new prompt in the same steps",
    ),
)

Prompts = list[list[int]]
# Prompts, tokens to generate -> a `RequestResult` each.
Send = Callable[[Prompts, int], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """All prompts but those that continue an answer, as tokens. A round's begin with its number, so that rounds share nothing.

    Attributes:
        text: System prompt and context of the first two users.
        questions: Of the first user, the same one's next turn, and the other user.
        herd: Prompts that share a text of their own.
        chunked: For the engine with chunked prefill: one that fills the cache, then two at once, the second of which
            begins like the first.
        step_tokens: Of that engine.
        answer_tokens: Length of the first answer.
    """

    text: list[int]
    questions: Prompts
    herd: Prompts
    chunked: Prompts
    step_tokens: int
    answer_tokens: int

    def next_turn(self, answer: list[int]) -> list[int]:
        """The first prompt, its answer, and the next question."""
        return [*self.text, *self.questions[0], *answer, *_tokens("\n"), *self.questions[1]]

    def title(self, text: str) -> str:
        """The title of one of the `PARTS`, with this session's numbers."""
        return text.format(text_tokens=len(self.text), answer_tokens=self.answer_tokens, step_tokens=self.step_tokens)

    def longest_tokens(self) -> int:
        """Length of the longest prompt with its answer."""
        prompts = [self.next_turn([0] * self.answer_tokens), *self.herd, *self.chunked]
        return max(map(len, prompts)) + SHORT_ANSWER_TOKENS


def make_session(round_number: int, context_tokens: int, block_tokens: int) -> Session:
    """A session about the sources of this package.

    Args:
        round_number: Of the round, one digit.
        context_tokens: Of the sources.
        block_tokens: Of a KV block.
    """
    context = _sources(context_tokens)
    asked = [_tokens(f"User {number}: {_question(number)}\nAssistant:") for number in range(HERD_USERS + 4)]
    text = _cut(_tokens(f"{round_number}. {SYSTEM}\n\n{context}"), block_tokens)
    answer_tokens = block_tokens + LONGER_TOKENS
    # Spaces, so that the next turn ends where it should.
    whole = len(text) + len(asked[0]) + answer_tokens + 1 + len(_tokens(f"User 0: {FOLLOW_UP}\nAssistant:"))
    then_asked = _tokens(f"User 0: {FOLLOW_UP}{' ' * ((TAIL_TOKENS - whole) % block_tokens)}\nAssistant:")
    herd_text = _tokens(f"{round_number}. {HERD_SYSTEM}\n\n{context}")[: max(3 * block_tokens, len(text) // 2)]
    start = _cut([*_tokens(f"{round_number}. "), *text[: 5 * block_tokens]], block_tokens)
    unrelated = _tokens(f"{round_number}. {context[::-1]}")[: 6 * block_tokens - 20]
    return Session(
        text=text,
        questions=[asked[0], then_asked, asked[1]],
        herd=[_cut(herd_text, block_tokens) + question for question in asked[2 : 2 + HERD_USERS]],
        chunked=[start + asked[-2], unrelated, start + asked[-1]],
        step_tokens=step_tokens(8 * block_tokens),
        answer_tokens=answer_tokens,
    )


def _sources(tokens: int) -> str:
    """Sources of this package, one byte and one token a character."""
    text = "".join(f"# {name}\n{(PACKAGE / name).read_text(encoding='utf-8')}\n" for name in CONTEXT_FILES)
    return text.encode("ascii", errors="replace").decode()[:tokens]


def _question(number: int) -> str:
    """About a pasted piece of source; none is as long as another."""
    number %= len(QUESTION_FILES)
    name = QUESTION_FILES[number]
    piece = (PACKAGE / name).read_text(encoding="utf-8")[: EXCERPT_CHARACTERS + 13 * number]
    return f"This is the beginning of {name}:\n{piece}\nHow does it fit into the text above?"


def _cut(tokens: list[int], block_tokens: int) -> list[int]:
    """As many of them as end `GAP_TOKENS` before a block boundary."""
    return tokens[: (len(tokens) + GAP_TOKENS) // block_tokens * block_tokens - GAP_TOKENS]


def _tokens(text: str) -> list[int]:
    return list(ByteTokenizer().tokenize(text))


def play(session: Session, send: Send, answer: list[int] | None) -> list[list[Any]]:
    """The parts but the last on one engine.

    Args:
        session: What to send.
        send: Sends prompts at once.
        answer: The first answer as the first engine gave it; None: this is the first engine.

    Returns:
        Results of each part.
    """
    text, questions = session.text, session.questions
    first = send([text + questions[0]], session.answer_tokens)
    next_turn = session.next_turn(first[0].generated if answer is None else answer)
    rest = ([next_turn], [next_turn], [text + questions[2]], session.herd)
    return [first, *(send(prompts, SHORT_ANSWER_TOKENS) for prompts in rest)]


def play_chunked(session: Session, send: Send) -> list[list[Any]]:
    """The last part, on an engine with chunked prefill: only the last prompt is of interest."""
    filler, unrelated, last = session.chunked
    send([filler], SHORT_ANSWER_TOKENS)
    return [send([unrelated, last], SHORT_ANSWER_TOKENS)[1:]]
