"""How tokens are sampled: `SamplingOptions`, beyond megatron's ``SamplingParams``, and the checks of both; drafts. No torch.

A request carries the options as the attribute ``sampling_options`` of its ``SamplingParams``, in the form of `as_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from typing import Any

from megatron_hybrid_prefix.errors import FieldError, shown

GREEDY_TEMPERATURE = 1e-4
"""A lower temperature counts as greedy. Logits divided by it might overflow, and nothing can be sampled from those."""

_GREEDY_TOP_P = 1e-9  # less than the likeliest token's share of any vocabulary; megatron's float32 may round less to 0
_MOST = 1e6  # of a temperature, a penalty or a bias, for the same reason
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, _MOST),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "frequency_penalty": (-_MOST, _MOST),
    "presence_penalty": (-_MOST, _MOST),
    "repetition_penalty": (1 / _MOST, _MOST),
}
_MOST_LEVELS = 100  # of a schema
_FLAGS = (
    "return_log_probs",
    "skip_prompt_log_probs",
    "return_segments",
    "return_prompt_top_n_logprobs",
    "add_BOS",
    "detokenize_stop_sequence",
    "return_prompt_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options of one request.

    They apply in this order: ``logit_bias``, penalties, ``temperature``, ``min_p``, ``top_k``, ``top_p``.

    Attributes:
        temperature: Divides the logits; 0: the likeliest token.
        top_k: Keep this many likeliest tokens; 0: all.
        top_p: Keep the likeliest tokens up to this sum of probabilities; 1: all.
        min_p: Drop tokens less likely than this part of the likeliest token's probability.
        seed: Makes the noise depend on the seed and the position in the sequence alone. None: the engine's generator.
        frequency_penalty: Subtracted from a token's logit for each time it is in the answer.
        presence_penalty: Subtracted from the logits of tokens in the answer.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or answer.
        logit_bias: Token ids, and what to add to their logits.
        min_tokens: The answer's first tokens, this many, are no end tokens: the logits of those are masked. But a complete
            ``structured_outputs`` that nothing can follow ends.
        structured_outputs: What the answer must match, if it is not cut off: one of ``json`` (a JSON schema), ``json_object`` (True),
            ``regex``, ``choice`` (texts) and ``grammar`` (Lark, as llguidance has it), as in ``{"regex": "[0-9]+"}``.

    Raises:
        FieldError: A value has the wrong type, is not finite or is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            check_number(name, getattr(self, name), least, most)
        if self.top_p == 0:
            raise FieldError("top_p", "top_p=0 keeps no token: it must be above 0")
        check_integer("top_k", self.top_k, 0)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.seed is not None:
            check_integer("seed", self.seed)
        for token, value in self.logit_bias:
            check_integer("logit_bias", token)
            check_number("logit_bias", value, -_MOST, _MOST)
        if len(self.logit_bias) > len(dict(self.logit_bias)):
            raise FieldError("logit_bias", "logit_bias has a token twice")
        if self.structured_outputs is not None:
            _check_structure("structured_outputs", self.structured_outputs)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, after bias and penalties."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p < _GREEDY_TOP_P

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far matter."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1

    @property
    def are_the_models(self) -> bool:
        """Whether tokens are drawn from the model's own distribution: processed log-probs are the raw ones."""
        return replace(self, seed=None) == SamplingOptions()

    @property
    def are_megatrons(self) -> bool:
        """Whether megatron's ``temperature``, ``top_k`` and ``top_p`` say the same."""
        return not self.min_tokens and self.structured_outputs is None and self.are_megatrons_later

    @property
    def are_megatrons_later(self) -> bool:
        """The same, once the answer has ``min_tokens`` tokens, of logits that ``structured_outputs`` left."""
        if self.logit_bias or self.has_penalties:
            return False
        both = self.top_k > 0 and self.top_p < 1
        return self.is_greedy or (self.seed is None and not self.min_p and not both)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the options against a vocabulary of this size.

        Raises:
            FieldError: ``top_k`` is not below it, or ``logit_bias`` has another token.
        """
        check_integer("top_k", self.top_k, 0, vocab_size - 1)
        check_tokens("logit_bias", (token for token, _ in self.logit_bias), vocab_size)

    def check_drafts(self, drafts: str) -> None:
        """Check that the options go with drafts, which change the penalties of the tokens after them, and what may come there.

        Args:
            drafts: What the caller calls them.

        Raises:
            FieldError: There is a penalty, or ``structured_outputs``.
        """
        nothing = SamplingOptions()
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "structured_outputs"):
            if (value := getattr(self, name)) != getattr(nothing, name):
                raise FieldError(name, f"{name}={shown(value)} does not go with {drafts}")

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for messages between processes."""
        return asdict(self)

    def as_fields(self) -> dict[str, Any]:
        """Fields of megatron's ``SamplingParams`` that say the same, with ``sampling_options`` if megatron's own cannot.

        Megatron refuses ``top_k`` together with ``top_p``, and says 0 where this class says ``top_p=1``.
        """
        fields: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "top_p": 0.0}  # greedy
        if not self.are_megatrons:
            fields["sampling_options"] = self.as_dict()
        if self.are_megatrons_later and not self.is_greedy:
            fields |= {"temperature": float(self.temperature), "top_k": int(self.top_k)}
            fields["top_p"] = 0.0 if self.top_p == 1 else float(self.top_p)
        return fields

    @classmethod
    def of(cls, params: Any) -> SamplingOptions | None:
        """The options of megatron's ``SamplingParams``; None: it has none.

        Raises:
            FieldError: The attribute ``sampling_options`` is wrong.
        """
        values = getattr(params, "sampling_options", None)
        if values is None or isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise FieldError("sampling_options", f"sampling_options={shown(values)} must be a dict")
        known = cls.__dataclass_fields__
        if unknown := [name for name in values if name not in known]:
            message = f"sampling_options has no {shown(unknown[0])}; there are {', '.join(known)}"
            raise FieldError("sampling_options", message)
        bias = values.get("logit_bias", ())
        try:
            pairs = tuple((token, value) for token, value in bias)
        except (TypeError, ValueError):
            message = f"logit_bias={shown(bias)} must have pairs of a token id and a number"
            raise FieldError("logit_bias", message) from None
        return cls(**{**values, "logit_bias": pairs})


def check_params(params: Any, vocab_size: int) -> SamplingOptions:
    """Check what megatron's ``SamplingParams`` ask for, and set its fields to values that megatron can sample.

    Megatron itself would fail in a later step, and with it all other requests.

    Args:
        params: Changed in place, see `SamplingOptions.as_fields`.
        vocab_size: Vocabulary of the model.

    Returns:
        How the request samples.

    Raises:
        FieldError: A field has the wrong type, or is out of range, or two exclude each other.
    """
    options = SamplingOptions.of(params)
    if options is None:
        if params.top_p == 0:  # megatron's way to say 1
            params.top_p = 1.0
        options = SamplingOptions(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    options.check_vocabulary(vocab_size)
    vars(params).pop("sampling_options", None)
    vars(params).update(options.as_fields())
    for name in _FLAGS:
        if getattr(params, name) not in (False, True):
            raise FieldError(name, f"{name}={shown(getattr(params, name))} must be True or False")
    if params.termination_id is not None:
        check_integer("termination_id", params.termination_id, -1, 2**63 - 1)  # one that is no token ends nothing
    more = getattr(params, "stop_token_ids", None)
    if more is not None:
        if not isinstance(more, list | tuple | set | frozenset):
            raise FieldError("stop_token_ids", f"stop_token_ids={shown(more)} must be a list of token ids")
        for token in more:
            check_integer("stop_token_ids", token)
        check_tokens("stop_token_ids", more, vocab_size)
    check_integer("top_n_logprobs", params.top_n_logprobs, 0, vocab_size)
    if params.top_n_logprobs and not params.return_log_probs:
        raise FieldError("top_n_logprobs", f"top_n_logprobs={params.top_n_logprobs} needs return_log_probs=True")
    params.return_prompt_top_n_logprobs = params.top_n_logprobs > 0 and not params.skip_prompt_log_probs
    _check_lengths(params)
    words = params.stop_words
    if words is not None and not (isinstance(words, list | tuple) and all(isinstance(w, str) and w for w in words)):
        raise FieldError("stop_words", f"stop_words={shown(words)} must be a list of non-empty texts")
    check_integer("streaming_interval", vars(params).get("streaming_interval", 1), 1)
    if vars(params).get("do_kv_handoff"):
        raise FieldError("do_kv_handoff", "do_kv_handoff: this engine's KV blocks and states stay here; leave it out")
    return options


def drafts_problem(drafts: int, model: Any, name: str = "the model") -> str | None:
    """Why a model cannot draft so many tokens, in a few words; None if it can.

    Args:
        drafts: The tokens to draft in each decode step.
        model: Its dimensions: a `HybridModelConfig`, or megatron's ``TransformerConfig``.
        name: What the caller calls it.
    """
    depths = model.mtp_num_layers or 0
    if not drafts or (depths and (drafts <= depths or model.mtp_use_repeated_layer)):
        return None
    return f"{name} drafts at most {depths}" if depths else f"{name} has no multi-token prediction, which drafts: use 0"


def _check_lengths(params: Any) -> None:
    count, total = params.num_tokens_to_generate, params.num_tokens_total
    if count is not None and total is not None:
        raise FieldError("num_tokens_total", "num_tokens_total and num_tokens_to_generate exclude each other: set one")
    if total is not None:
        check_integer("num_tokens_total", total, 1)
    if count is not None:
        check_integer(
            "num_tokens_to_generate", count, 0 if params.return_log_probs else 1
        )  # 0: those of the prompt alone


def _check_structure(field: str, wanted: Any) -> None:
    """Check the form of ``structured_outputs``; whether it can be compiled, `AnswerGrammar` finds."""
    match wanted:
        case {"json": dict()} | {"json_object": True} | {"regex": str()} | {"grammar": str()}:
            is_right = True
        case {"choice": [*texts]}:
            is_right = bool(texts) and all(isinstance(text, str) and text for text in texts)
        case _:
            is_right = False
    if not is_right or len(wanted) > 1:
        kinds = "json (a schema), json_object (true), regex, choice (texts) and grammar (Lark)"
        raise FieldError(field, f"{field}={shown(wanted)} must have one of {kinds}")
    left: list[Any] = [wanted]
    for _ in range(_MOST_LEVELS):
        left = [each for items in left for each in (items.values() if isinstance(items, dict) else items)]
        left = [each for each in left if isinstance(each, dict | list)]
    if left:  # whoever reads it calls itself for each level
        raise FieldError(field, f"{field} has more than {_MOST_LEVELS} levels")


def check_integer(field: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    """Check that a value is an integer in this range. Raises FieldError if it is not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise FieldError(field, f"{field}={shown(value)} must be an integer")
    if (least is not None and int(value) < least) or (most is not None and int(value) > most):
        limits = f"at least {least}" if most is None else f"in {least}..{most}"
        raise FieldError(field, f"{field}={shown(value)} must be {limits}")


def check_number(field: str, value: Any, least: float, most: float) -> None:
    """Check that a value is a number in this range. Raises FieldError if it is not. NaN is in no range."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value <= most:  # type: ignore[operator]  # Real has none
        raise FieldError(field, f"{field}={shown(value)} must be a number in {least:g}..{most:g}")


def check_tokens(field: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Check that all tokens are in the vocabulary. Raises FieldError if one is not."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise FieldError(
                field, f"{field} has token {shown(token)}, which is outside the vocabulary of {vocab_size}"
            )
