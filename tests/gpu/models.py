"""The models of the scripts here, a preset or a Hugging Face folder, and the tokens that they are given."""

from __future__ import annotations

from dataclasses import replace
from pydoc_data.topics import topics

from megatron_hybrid_prefix.models import build_hybrid_model, open_folder
from megatron_hybrid_prefix.text.tokenizer import load_tokenizer
from tests.harness.engine_helpers import random_tokens
from tests.harness.named_models import named

GPT = "gpt:"
NO_GRAPHS = {"cuda_graph_impl": "none"}
"""The default here: engines that are compared share a model, and graphs are those of one engine."""


def layers_for(config):
    """Fields of `build_hybrid_model`: local layers in float32, because Transformer Engine multiplies float32 in TF32."""
    return {"transformer_impl": "local"} if config.dtype == "float32" else {}


def built(preset, **fields):
    """A preset, or a model of ``tests/harness/named_models.py``; with `GPT` before its name as a ``GPTModel``."""
    config = named(preset.removeprefix(GPT))
    model = build_hybrid_model(config, seed=0, **(NO_GRAPHS | layers_for(config) | fields))
    from tests.harness.gpt_model import as_gpt_model  # imports megatron, so the platform has to run

    return as_gpt_model(model) if preset.startswith(GPT) else model


class Source:
    """A model to measure, and its tokens: random ones for random weights, text for a folder's weights.

    ``preset`` counts where there is no Hugging Face folder (with a tokenizer); ``fields`` are as of `build_hybrid_model`.
    """

    def __init__(self, preset, hf=None, **fields):
        self.fields = fields
        self.folder = None if hf is None else open_folder(hf)
        self.name = preset if self.folder is None else self.folder.name
        self.config = named(preset) if self.folder is None else self.folder.config
        self._text = None
        if self.folder is not None:  # the topics of Python's help(), about 700 KB
            tokenizer = load_tokenizer(self.folder.path, self.config.vocab_size)
            self._text = tokenizer.tokenize("\n".join(topics[name] for name in sorted(topics)))

    def build(self, dtype=None, seed=0, **fields):
        """The model, its weights in another dtype if one is given, and other fields if some are given."""
        config = self.config if dtype is None else replace(self.config, dtype=dtype)
        return build_hybrid_model(config, seed=seed, hf=self.folder, **(NO_GRAPHS | self.fields | fields))

    def tokens(self, count, seed):
        """``count`` token ids: random ones, or a piece of the text."""
        if self._text is None:
            return random_tokens(count, seed=seed, vocabulary=self.config.vocab_size)
        (start,) = random_tokens(1, seed=seed, vocabulary=len(self._text) - count)
        return self._text[start : start + count]

    def prompt_and_answer(self, tokens, answer_tokens, seed, answer_seed):
        """A prompt and what follows: in a text it follows, random tokens have a seed of their own."""
        if self._text is None:
            return self.tokens(tokens, seed), self.tokens(answer_tokens, answer_seed)
        piece = self.tokens(tokens + answer_tokens, seed)
        return piece[:tokens], piece[tokens:]
