"""Requests that an engine must refuse, and good ones beside them, by name; and a fuzz of both."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_hybrid_prefix.sampling import SamplingOptions
from tests.harness.engine_helpers import random_tokens

VOCABULARY = 512
BLOCK = 64
LIMIT_TOKENS = 256  # of prompt and answer
COUNT = int(os.environ.get("MHP_BAD_REQUESTS", "200"))
GOOD_PROMPT = random_tokens(30, seed=4)
NAN, INFINITE = float("nan"), float("inf")


class Asked(NamedTuple):
    """A request, as it is sent."""

    prompt: Any
    fields: Mapping[str, Any] = {}  # of the sampling parameters
    named: str = ""  # by the refusal
    in_messages: bool = True  # whether it can be sent between processes


def _prompts() -> dict[str, Asked]:
    prompts = {
        "no tokens": [], "no text": "",
        "a token above the vocabulary": [1, VOCABULARY, 2],
        "a token far above": [1, 2**40], "a token beyond int64": [1, 2**63], "a negative token": [5, -1],
        "a fraction": [1, 2.5], "text in a list": [1, "a"], "lists in a list": [[1, 2], [3]],
        "None in a list": [1, None], "nothing": None, "a number": 7, "bytes": b"abc", "an object": {"prompt": [1]},
    }  # fmt: skip
    return {f"prompt: {name}": Asked(prompt, {}, "prompt") for name, prompt in prompts.items()}


def _fields() -> dict[str, Asked]:
    values: dict[str, tuple[Any, ...]] = {
        "temperature": (-1.0, NAN, INFINITE, -INFINITE, 1e300, None, "1", True),
        "top_k": (-1, VOCABULARY, 2**31, 2.5, None, "3", False),
        "top_p": (-0.1, 1.1, NAN, INFINITE, None, "0.5"), "num_tokens_to_generate": (-1, 2.5, "4", True),
        "termination_id": (-2, 2**63, 1.5, "1"),
        "stop_token_ids": (7, "7", [VOCABULARY], [-1], [1.5], [None], {"7": 1}),
        "top_n_logprobs": (-1, VOCABULARY + 1, 1.5), "return_log_probs": (None, "yes", 2),
        "skip_prompt_log_probs": (None, "yes", 2), "stop_words": ("stop", [""], [7], [None], 3),
        "sampling_options": (
            7, [], "greedy", {"colour": 1}, {"temperature": NAN}, {"temperature": "1"}, {"top_k": -1},
            {"top_k": VOCABULARY}, {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": NAN}, {"min_p": -0.1}, {"min_p": NAN},
            {"seed": 1.5}, {"seed": "x"}, {"frequency_penalty": INFINITE}, {"presence_penalty": NAN},
            {"repetition_penalty": 0}, {"repetition_penalty": 1e-300}, {"min_tokens": -1}, {"min_tokens": 1.5},
            {"min_tokens": "3"}, {"logit_bias": 3}, {"logit_bias": [3]}, {"logit_bias": [[VOCABULARY, 1.0]]},
            {"logit_bias": [[-1, 1.0]]}, {"logit_bias": [[1.5, 1.0]]}, {"logit_bias": [[1, NAN]]},
            {"logit_bias": [[1, 1e308]]}, {"logit_bias": [[1, None]]}, {"logit_bias": [[1, 1.0], [1, 2.0]]},
        ),
    }  # fmt: skip
    found = {}
    for name, wrongs in values.items():
        for wrong in wrongs:
            named = next(iter(wrong)) if isinstance(wrong, dict) else name
            found[f"{name}={wrong!r}"] = Asked([1, 2, 3], {name: wrong}, named)
    return found


# The rest: fields that exclude each other, or that the prompt or the engine excludes.
_TOGETHER: dict[str, Asked] = {
    "both lengths": Asked([1, 2, 3], {"num_tokens_to_generate": 4, "num_tokens_total": 9}, "num_tokens_total"),
    "a total within the prompt": Asked(
        list(range(9)), {"num_tokens_to_generate": None, "num_tokens_total": 8}, "num_tokens_total"
    ),
    "a total of text": Asked([1], {"num_tokens_to_generate": None, "num_tokens_total": "9"}, "num_tokens_total"),
    "no tokens and no log-probs": Asked(
        [1, 2], {"num_tokens_to_generate": 0, "return_log_probs": False}, "num_tokens_to_generate"
    ),
    "likeliest tokens without log-probs": Asked(
        [1, 2], {"return_log_probs": False, "top_n_logprobs": 2}, "return_log_probs"
    ),
    "log-probs of the prompt": Asked([1, 2], {"skip_prompt_log_probs": False}, "skip_prompt_log_probs"),
    "text as a number of likeliest tokens": Asked([1, 2], {"top_n_logprobs": "2"}, "top_n_logprobs"),
    "a temperature beyond float64": Asked([1, 2], {"temperature": 10**400}, "temperature", in_messages=False),
    "parts of no tokens": Asked([1, 2], {"streaming_interval": 0}, "streaming_interval", in_messages=False),
    "for another engine": Asked([1, 2], {"do_kv_handoff": True}, "do_kv_handoff"),
    "breakpoints of text": Asked([1, 2], {"cache_breakpoints": "2"}, "cache_breakpoints"),
    "a session by its name": Asked([1, 2], {"cache_session": "a"}, "cache_session"),
    "uses of text": Asked([1, 2], {"cache_uses": "2"}, "cache_uses"),
    "uses below none": Asked([1, 2], {"cache_uses": -1}, "cache_uses"),
    "a pin without an end": Asked([1, 2], {"cache_pin": {"tokens": 1}}, "cache_pin"),
    "a pin of both": Asked([1, 2], {"cache_pin": {"requests": 1, "seconds": 1}}, "cache_pin"),
    "a pin for no request": Asked([1, 2], {"cache_pin": {"requests": 0}}, "cache_pin"),
    "a pin for ever": Asked([1, 2], {"cache_pin": {"seconds": math.inf}}, "cache_pin", in_messages=False),
    "a pin by name": Asked([1, 2], {"cache_pin": "a"}, "cache_pin"),
    "a pin with more": Asked([1, 2], {"cache_pin": {"requests": 1, "end": True}}, "cache_pin"),
    "a time that is none": Asked([1, 2], {"cache_uses": 1, "cache_now": math.nan}, "cache_now", in_messages=False),
    "times of no breakpoints": Asked([1, 2], {"cache_ttls": [1, 2]}, "cache_ttls"),
    "a session that may end": Asked([1, 2], {"cache_session": {"id": "a", "end": "no"}}, "cache_session"),
}

BAD: dict[str, Asked] = _prompts() | _fields() | _TOGETHER

GREEDY = {"top_k": 1, "termination_id": -1, "return_log_probs": True, "skip_prompt_log_probs": True}


def params(fields: Mapping[str, Any]) -> Any:
    """Sampling parameters with these fields. Megatron's own constructor would refuse some."""
    from megatron.core.inference.sampling_params import SamplingParams

    made = SamplingParams()
    vars(made).update({"num_tokens_to_generate": 4} | GREEDY | dict(fields))
    return made


def good_requests(count: int = 10) -> list[Asked]:
    """Requests with answers that do not depend on the engine's noise. Half of them begin with another's prompt."""
    seeded = SamplingOptions(seed=5, temperature=1.3, top_k=40, top_p=0.9).as_dict()
    kinds = ({}, {"temperature": 0.0, "top_k": 0}, {"temperature": 0, "top_k": 7, "top_p": 0.5}, seeded)
    found = []
    for number in range(count):
        prompt = random_tokens(1 + 17 * number, seed=128 + number // 2)
        fields = kinds[number % 4]
        fields = {"sampling_options": fields} if "seed" in fields else fields
        found.append(Asked(prompt, {"num_tokens_to_generate": 2 + number} | fields))
    return found


def fuzz(count: int, seed: int, *, messages: bool = False) -> Iterator[tuple[str | None, int, Asked]]:
    """``count`` bad requests among half as many good ones: the name of a bad one, or None and the number of a good one; and the
    request. ``messages``: only what can be sent between processes.
    """
    rng, good = random.Random(seed), good_requests()
    names = [name for name, asked in BAD.items() if asked.in_messages or not messages]
    sent = 0
    while sent < count:
        if rng.random() < 1 / 3:
            number = rng.randrange(len(good))
            yield None, number, good[number]
        else:
            name = names[sent] if sent < len(names) else rng.choice(names)
            sent += 1
            yield name, -1, BAD[name]
