"""Rounds of an RL trainer, by the calls that NeMo-RL's worker and megatron/rl make. Apart from `installed` all names are megatron's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig, PrefixCachingCoordinatorPolicy
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.utils import get_attr_wrapped_model

from megatron_hybrid_prefix import HybridPrefixConfig, installed
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer
from tests.harness.engine_helpers import random_tokens

BLOCK = 64  # tokens of a KV block
PROMPTS, SAMPLES = 4, 8  # of a round; of a prompt
SHARED, OWN, ANSWER = 600, 50, 6  # tokens that all prompts share, of one prompt alone, of an answer


def rl_engine(model: Any, prefix: HybridPrefixConfig | None = None, *given: Any, **fields: Any) -> Any:
    """An engine of `worker_engine`, with ``install``."""
    with installed(prefix):
        return worker_engine(model, *given, **fields)


def worker_engine(model: Any, assigned: dict[str, torch.dtype] | None = None, **fields: Any) -> Any:
    """An engine as NeMo-RL's worker makes it.

    ``assigned`` are dtypes of states that are assigned after ``from_model``, ``fields`` are in place of the worker's.
    """
    states = MambaInferenceStateConfig.from_model(model)
    for name, dtype in (assigned or {}).items():
        setattr(states, name, dtype)
    of_the_worker = {
        "block_size_tokens": BLOCK, "buffer_size_gb": 0.05, "num_cuda_graphs": 4, "max_tokens": 2048,
        "max_sequence_length": 1024, "use_cuda_graphs_for_non_decode_steps": True,
        "use_flashinfer_fused_rope": False, "use_synchronous_zmq_collectives": True,
        "materialize_only_last_token_logits": True, "enable_chunked_prefill": True, "enable_prefix_caching": True,
        "prefix_caching_coordinator_policy": PrefixCachingCoordinatorPolicy("first_prefix_block"),
        "pg_collection": get_attr_wrapped_model(model, "pg_collection"),
        "mamba_inference_state_config": states, "mamba_memory_ratio": 0.1, "logging_step_interval": 0,
        "num_speculative_tokens": 0, "logprobs_mode": "processed_logprobs", "max_requests": None,
    }  # fmt: skip
    context = DynamicInferenceContext(model.config, InferenceConfig(**of_the_worker | fields))
    wrapped = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(inference_wrapped_model=wrapped, tokenizer=ByteTokenizer(512))
    return DynamicInferenceEngine(controller, context)


def sampling(count: int = ANSWER, **fields: Any) -> SamplingParams:
    """What the worker asks for: tokens drawn at temperature 1, with the log-probs of the answer."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "return_log_probs": True, "skip_prompt_log_probs": True}
    return SamplingParams(**values | {"num_tokens_to_generate": count, "termination_id": -1} | fields)


def prompts_of_a_round() -> list[list[int]]:
    """One prompt for each group; all share a beginning. The same in every round."""
    shared = random_tokens(SHARED, seed=1)
    return [shared + random_tokens(OWN, seed=2 + number) for number in range(PROMPTS)]


def computed_once() -> int:
    """Prompt tokens that a round computes if nothing is computed twice but what is not in a full block."""
    whole, shared = SHARED + OWN, SHARED // BLOCK * BLOCK
    return whole + (PROMPTS - 1) * (whole - shared) + PROMPTS * (SAMPLES - 1) * (whole % BLOCK)


class Rollouts:
    """An engine of `rl_engine`, and the rounds that a trainer has it generate. All ranks of a model call the same."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.finished, self.next_id = engine, {}, 0

    def send(self, prompt: list[int], count: int = ANSWER) -> int:
        """Queues a request."""
        self.engine.add_request(self.next_id, prompt, sampling(count))
        self.next_id += 1
        return self.next_id - 1

    def run(self, steps: int = -1, *, until: Sequence[int] = ()) -> None:
        """Steps to the end, or so many times, or until these requests have finished."""
        while self.engine.has_unfinished_requests() and steps and not (until and self.finished.keys() >= set(until)):
            for record in self.engine.step_modern()["finished_request_records"]:
                self.finished[record.request_id] = record.merge()
            self.engine.context.check_integrity()
            steps -= 1

    def round(self, *, spans: bool = False) -> tuple[list[Any], int]:
        """One round; the last sample of each group is aborted. ``spans``: leaves a request that has begun for the next round.

        Returns one answer of each group, and how many prompt tokens were computed.
        """
        first = self.computed_tokens
        groups = [[self.send(prompt) for _ in range(SAMPLES)] for prompt in prompts_of_a_round()]
        while len(self.engine.waiting_request_ids):
            self.run(steps=1)
        aborted = [group.pop() for group in groups]
        assert all(map(self.engine.abort_request, aborted))
        self.run(until=[number for group in groups for number in (*group, *aborted)])
        computed = self.computed_tokens - first
        assert all(len(self.finished[number].generated_tokens) < ANSWER for number in aborted)
        if spans:
            self.send(prompts_of_a_round()[0], count=4 * ANSWER)
            self.run(steps=3)
            assert self.engine.has_unfinished_requests()
        return [self.finished[group[number]] for number, group in enumerate(groups)], computed

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed so far, by megatron's counter."""
        return int(self.engine.context.lifetime_prefill_token_count)
