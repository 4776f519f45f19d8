"""Messages to prompts: the tokenizer folder's chat template, or a plain form; and where each message ends.

Templates are rendered by transformers, in its sandbox and with what it offers to them, as they are written for it. It is
imported only where there is a template, as that takes half a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.terminal import InputError, read_text
from megatron_hybrid_prefix.tokenizer import common_tokens

# Ends of messages that are looked for in a prompt: those of the first message and of the last ones.
_MOST_ENDS = 32
PLAIN_STOP = "\nUser:"


class ChatForm:
    """How a conversation becomes a prompt.

    Args:
        template: Jinja source; None for the plain form, which is that of ``run_inference --conversation``, but for the
            answers, which come back as they were generated, so that the next turn finds them cached.
        special: Names of special tokens that a template may use, such as ``bos_token``.
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
                pass  # it wants messages

    @property
    def stop(self) -> list[str]:
        """What ends an answer anyway: in the plain form the beginning of another turn."""
        return [] if self._template is not None else [PLAIN_STOP]

    def render(self, messages: Sequence[dict[str, str]], *, begin_answer: bool = True) -> str:
        """The prompt of these messages.

        Raises:
            ValueError: The template does not take them.
        """
        if self._template is None:
            return _plain(messages) + ("Assistant:" if begin_answer else "")
        from jinja2 import TemplateError

        try:
            return self._render(self._template, messages, begin_answer)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from None

    def _render(self, template: str, messages: Sequence[dict[str, str]], begin_answer: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its annotations are not what it takes and returns
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
        """Tokens of the prompt that end with a message or before, one for each of ``wanted`` (by default every message)."""
        if wanted is None:
            wanted = range(len(messages))
            if len(wanted) > _MOST_ENDS:
                wanted = [0, *wanted[1 - _MOST_ENDS :]]
        found = set()
        for number in wanted:
            try:
                begin = self.render(messages[: number + 1], begin_answer=False)
            except ValueError:
                continue  # a template may refuse a conversation that ends here: then nothing is shared up to here
            found.add(common_tokens(tokens, tokenize(begin)))
        return sorted(end for end in found if 0 < end < len(tokens))


def _plain(messages: Sequence[dict[str, str]]) -> str:
    forms = {"system": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant:{}\n"}
    return "".join(forms[message["role"]].format(message["content"]) for message in messages)


def load_chat_form(template: Path | None, tokenizer: Path | None) -> ChatForm:
    """The template in a file, or that of a Hugging Face tokenizer folder, or else the plain form.

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
    return ChatForm(source, special)
