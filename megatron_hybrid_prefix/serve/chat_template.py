"""Chat messages to prompts, by the tokenizer's chat template or in a plain format; and where each message ends.

transformers renders the templates, in its sandbox. It is imported only if there is a template, because the import takes
half a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.terminal import InputError, read_text
from megatron_hybrid_prefix.tokenizer import common_tokens

# Most message ends to find in a prompt: those of the first message and of the last ones.
_MOST_ENDS = 32
PLAIN_STOP = "\nUser:"


class ChatForm:
    """Turns a conversation into a prompt.

    Args:
        template: Jinja source. None: the plain format of ``hybrid-prefix generate --conversation``. Answers are
            inserted as they were generated, so that the next turn finds them in the cache.
        special: Special tokens that a template may use by name, such as ``bos_token``.
    """

    def __init__(self, template: str | None = None, special: dict[str, str] | None = None) -> None:
        self._template, self._special = template, special or {}
        if template is not None:
            from jinja2 import TemplateError, TemplateSyntaxError

            try:
                self._render(template, [], False)
            except TemplateSyntaxError as error:
                raise InputError(f"the chat template cannot be read: {error}") from None
            except (TemplateError, TypeError):
                pass  # the template cannot render an empty conversation

    @property
    def stop(self) -> list[str]:
        """Stop strings of every answer: in the plain format, the start of another turn."""
        return [] if self._template is not None else [PLAIN_STOP]

    def render(self, messages: Sequence[dict[str, str]], *, begin_answer: bool = True) -> str:
        """The prompt for these messages.

        Raises:
            ValueError: The template refuses them.
        """
        if self._template is None:
            return _plain(messages) + ("Assistant:" if begin_answer else "")
        from jinja2 import TemplateError

        try:
            return self._render(self._template, messages, begin_answer)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def _render(self, template: str, messages: Sequence[dict[str, str]], begin_answer: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its annotations are wrong
        (text,), _ = render(
            [list(messages)], chat_template=template, add_generation_prompt=begin_answer, **self._special
        )
        return str(text)

    def ends(
        self,
        messages: Sequence[dict[str, str]],
        tokens: Sequence[int],
        tokenize: Callable[[str], list[int]],
        wanted: Sequence[int] | None = None,
    ) -> list[int]:
        """Lengths, in tokens, of the prompt's prefixes that end with a message, ascending.

        Args:
            messages: The conversation.
            tokens: The prompt's tokens.
            tokenize: Text to tokens.
            wanted: Indices of the messages. None: all messages (of a long conversation, the first and the last ones).
        """
        if wanted is None:
            wanted = range(len(messages))
            if len(wanted) > _MOST_ENDS:
                wanted = [0, *wanted[1 - _MOST_ENDS :]]
        found = set()
        for number in wanted:
            try:
                begin = self.render(messages[: number + 1], begin_answer=False)
            except ValueError:
                continue  # a template may refuse a conversation that ends here
            found.add(common_tokens(tokens, tokenize(begin)))
        return sorted(end for end in found if 0 < end < len(tokens))


def _plain(messages: Sequence[dict[str, str]]) -> str:
    forms = {"system": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant:{}\n"}
    return "".join(forms[message["role"]].format(message["content"]) for message in messages)


class NoChatForm(ChatForm):
    """Of a model whose folder has no template: there is no conversation that it was trained on."""

    def render(self, messages: Sequence[dict[str, str]], *, begin_answer: bool = True) -> str:
        """Raises ValueError."""
        raise ValueError(
            "the model has no chat template: use /v1/completions, or start the server with --chat-template"
        )


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
    if tokenizer is not None and (tokenizer / "tokenizer_config.json").is_file():
        try:
            config = json.loads(read_text(tokenizer / "tokenizer_config.json"))
        except json.JSONDecodeError as error:
            raise InputError(f"{tokenizer / 'tokenizer_config.json'} is not JSON: {error.msg}") from None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    values = {name: config.get(name) for name in names}
    special = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items() if value}
    if template is None and tokenizer is not None and (tokenizer / "chat_template.jinja").is_file():
        template = tokenizer / "chat_template.jinja"
    if template is not None:
        return ChatForm(read_text(template), special)
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((item["template"] for item in source if item.get("name") == "default"), None)
    return ChatForm(source, special) if source is not None or plain else NoChatForm(special=special)
