"""Chat messages to prompts, by the tokenizer's chat template or in a plain format; and where each message ends.

transformers renders the templates, in its sandbox. It is imported only if there is a template, because the import takes
half a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, read_text
from megatron_hybrid_prefix.errors import shown
from megatron_hybrid_prefix.text.hf_tokens import read_object, token_texts
from megatron_hybrid_prefix.text.tokenizer import common_tokens

if TYPE_CHECKING:
    from megatron_hybrid_prefix.text.answers import AnswerForm

# Most message ends to find in a prompt unless it names them: those of the first message and of the last ones.
_MOST_ENDS = 32
PLAIN_STOP = "\nUser:"
# What a template may raise in the sandbox, beside jinja2's errors.
_TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Tokens that a template may use by name.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
Messages = Sequence[dict[str, Any]]


class ChatForm:
    """Turns a conversation into a prompt.

    Args:
        template: Jinja source. None: the plain format of ``hybrid-prefix generate --conversation``. Answers are
            inserted as they were generated, so that the next turn finds them in the cache.
        special: Special tokens that a template may use by name, such as ``bos_token``.
        plain: False: a model without a template has no chats, as there is no conversation that it was trained on.
        response: The folder's response template; None: that of a known family, if the template is of one.

    Attributes:
        answers: How answers are parsed; None: they are text.
    """

    def __init__(
        self,
        template: str | None = None,
        special: dict[str, str] | None = None,
        *,
        plain: bool = True,
        response: Any = None,
    ) -> None:
        self._template, self._special, self._plain = template, special or {}, plain
        self.answers: AnswerForm | None = None
        if template is not None:
            from megatron_hybrid_prefix.text.answers import AnswerForm, known_template

            if response is None:
                response = known_template(template)
            with as_input_errors(ValueError):
                self.answers = None if response is None else AnswerForm(response)
            from jinja2 import TemplateError, TemplateSyntaxError

            try:
                self._render(template, [], False, {})
            except TemplateSyntaxError as error:
                raise InputError(f"the chat template cannot be read: {error}") from None
            except (TemplateError, *_TEMPLATE_ERRORS):
                pass  # the template cannot render an empty conversation

    @property
    def template(self) -> str | None:
        """Jinja source; None: the plain format."""
        return self._template

    @property
    def calls_tools(self) -> bool:
        """Whether prompts can have tools, and answers calls of them."""
        return self.answers is not None and self.answers.call is not None and "tools" in (self._template or "")

    @property
    def stop(self) -> list[str]:
        """Stop strings of every answer: in the plain format, the start of another turn."""
        return [] if self._template is not None else [PLAIN_STOP]

    def render(self, messages: Messages, *, begin_answer: bool = True, variables: dict[str, Any] | None = None) -> str:
        """The prompt for these messages.

        Args:
            messages: The conversation.
            begin_answer: Whether the prompt ends with the start of the assistant's turn.
            variables: More variables for the template, of which ``tools`` and ``continue_final_message`` (the prompt ends
                inside the last message) are transformers'.

        Raises:
            ValueError: The template refuses them, or there is no template.
        """
        variables = variables or {}
        if self._template is None and not self._plain:
            raise ValueError(
                "the model has no chat template: use /v1/completions, or start the server with --chat-template"
            )
        if self._template is None:
            text = _plain(messages)
            return text[:-1] if variables.get("continue_final_message") else text + "Assistant:" * begin_answer
        from jinja2 import TemplateError

        try:
            return self._render(self._template, messages, begin_answer, variables)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refuses these messages ({type(error).__name__})") from None

    def _render(self, template: str, messages: Messages, begin_answer: bool, variables: dict[str, Any]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its annotations are wrong
        (text,), _ = render(
            [list(messages)], chat_template=template, add_generation_prompt=begin_answer, **self._special | variables
        )
        return str(text)

    def ends(
        self,
        text: str,
        messages: Messages,
        wanted: Sequence[int] | None = None,
        *,
        more: Sequence[tuple[int, dict[str, Any]]] = (),
        begin_answer: bool = True,
        variables: dict[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[int | None]:
        """Characters of a prompt up to which it is that of a conversation which ends earlier, for each; None: the template refuses it.

        Args:
            text: The prompt, as rendered.
            messages: The conversation.
            wanted: Indices of the last messages. None: all messages (of a long conversation, the first and the last ones).
            more: Further last messages, each with the number of messages before it.
            begin_answer, variables: As of `render`.
            check: Called before each conversation. What it raises ends the search.
        """
        if wanted is None:
            wanted = range(len(messages))
            if len(wanted) > _MOST_ENDS:
                wanted = [0, *wanted[1 - _MOST_ENDS :]]
        lasts = [*((number, messages[number]) for number in wanted), *more]

        earlier = {name: value for name, value in (variables or {}).items() if name != "continue_final_message"}

        def rendered(part: Messages, *, whole: bool = False) -> str | None:
            check()
            try:
                return self.render(part, begin_answer=whole and begin_answer, variables=variables if whole else earlier)
            except ValueError:
                return None  # a template may refuse a conversation that ends here

        head, tail = _middle(messages, [number for number, _ in lasts])
        short: str | None = text
        first: str | None = None
        if head < tail:  # else each conversation is rendered whole
            short = rendered([*messages[:head], *messages[tail:]], whole=True)
            first = rendered([*messages[:head], messages[tail]])
        if short is None or first is None or not text.endswith(short[common_tokens(text, short) :]):
            head, tail, short, first = 0, 0, text, ""  # what comes before a message changes it
        least, ends, far = common_tokens(short, first), list[int | None](), dict[int, int]()
        for number, last in lasts:
            part = rendered([*messages[: min(number, head)], *messages[tail:number], last])
            if part is None:
                ends.append(None)
                continue
            end = common_tokens(text if number < head else short, part)
            if number >= head and end > least:
                end += len(text) - len(short)
            elif number >= head:  # it may be in the middle: the thoughts of a turn that began there are stripped later
                if end not in far:
                    far[end] = common_tokens(text, rendered([*messages[:number], last]) or "")
                end = far[end]
            ends.append(end)
        return ends


def _middle(messages: Messages, ends: Sequence[int]) -> tuple[int, int]:
    """A span of messages that no end needs, from one answer up to another, so that roles still take turns; or an empty one."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return 0, 0
    first = answers[0]
    least = min((end for end in ends if end >= first), default=first)
    return first, max(number for number in answers if number <= least)


def _plain(messages: Messages) -> str:
    forms = {"system": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant:{}\n", "tool": "Tool: {}\n"}
    texts = []
    for message in messages:
        calls = "".join(f" {json.dumps(call.get('function'))}" for call in message.get("tool_calls", ()))
        texts.append(forms[message["role"]].format(message["content"] + calls))
    return "".join(texts)


def load_chat_form(template: Path | None, tokenizer: Path | None, *, plain: bool = True) -> ChatForm:
    """Loads the template from a file, or from a Hugging Face tokenizer folder.

    Args:
        template: A file with the template.
        tokenizer: The folder.
        plain: Whether a model without a template gets the plain format; else it has no chats.

    Raises:
        InputError: A file cannot be read.
    """
    config: dict[str, Any] = {}
    special: dict[str, str] = {}
    if tokenizer is not None:
        with as_input_errors(ValueError):
            if (tokenizer / "tokenizer_config.json").is_file():
                config = read_object(tokenizer / "tokenizer_config.json")
            texts = {name: token_texts(tokenizer, name) for name in _SPECIAL}
            special = {name: found[0] for name, found in texts.items() if found}
    if template is None and tokenizer is not None and (tokenizer / "chat_template.jinja").is_file():
        template = tokenizer / "chat_template.jinja"
    if template is not None:
        return ChatForm(read_text(template), special, response=config.get("response_template"))
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
    if isinstance(source, dict):
        source = source.get("default")
    if not isinstance(source, str | None):
        raise InputError(f"{tokenizer}/tokenizer_config.json: chat_template is {shown(source)}, no text")
    return ChatForm(source, special, plain=plain, response=config.get("response_template"))
