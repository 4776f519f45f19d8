"""`SamplingOptions`: how the next token is chosen, beyond what megatron's ``SamplingParams`` offer. No torch.

A request carries them as the attribute ``sampling_options`` of its ``SamplingParams``, in the form of `as_dict`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GREEDY_TEMPERATURE = 1e-4
"""A lower temperature counts as greedy. Logits divided by it might overflow, and nothing can be sampled from those."""


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

    Raises:
        ValueError: A value is out of range.
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

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or self.repetition_penalty <= 0:
            raise ValueError("temperature and top_k must not be negative, repetition_penalty must be above 0")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1], min_p={self.min_p} in [0, 1]")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, after bias and penalties."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether there is a bias or a penalty."""
        return bool(self.logit_bias) or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far matter."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1

    @property
    def are_megatrons(self) -> bool:
        """Whether megatron's ``temperature``, ``top_k`` and ``top_p`` say the same."""
        if self.changes_logits:
            return False
        both = self.top_k > 0 and self.top_p < 1
        return self.is_greedy or (self.seed is None and not self.min_p and not both)

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for messages between processes."""
        return asdict(self)

    def as_fields(self) -> dict[str, Any]:
        """Fields of megatron's ``SamplingParams`` that say the same, with ``sampling_options`` if megatron's own cannot.

        Megatron refuses ``top_k`` together with ``top_p``, and says 0 where this class says ``top_p=1``.
        """
        greedy = {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
        if not self.are_megatrons:
            return greedy | {"sampling_options": self.as_dict()}
        if self.is_greedy:
            return greedy
        top_p = 0.0 if self.top_p == 1 else float(self.top_p)
        return greedy | {"temperature": float(self.temperature), "top_k": int(self.top_k), "top_p": top_p}

    @classmethod
    def of(cls, params: Any) -> SamplingOptions | None:
        """The options of megatron's ``SamplingParams``; None: it has none.

        Raises:
            ValueError: The attribute ``sampling_options`` is wrong.
        """
        values = getattr(params, "sampling_options", None)
        if values is None or isinstance(values, cls):
            return values
        try:
            bias = tuple((int(token), float(value)) for token, value in values.get("logit_bias", ()))
            return cls(**values | {"logit_bias": bias})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"sampling_options: {error}") from None
