"""A tiny random model of Hugging Face, its answers, and the same dimensions as a `HybridModelConfig`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models.hf.dimensions import dimensions_of
from tests.harness.engine_helpers import greedy, run_to_end
from tests.harness.hf_state_dict import hf_shapes
from tests.harness.limits import HANG_S

REFERENCE = Path(__file__).parent / "workers" / "hf_reference.py"
NEW_TOKENS = 8

# No two dimensions agree by chance: inner 96, conv 160, query heads 80, key and value heads 40.
NEMOTRON_H_ASKED = {
    "architecture": "NemotronH",
    "model": {
        "hybrid_override_pattern": "M*-M-*M",
        "hidden_size": 64,
        "vocab_size": 272,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 32,  # another grid than megatron's: the result may not depend on it
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "intermediate_size": 112,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "use_conv_bias": True,
        "use_bias": False,
    },
    "prompt_lengths": (1, 2, 3, 7, 64, 127, 128, 129, 300),
    "new_tokens": NEW_TOKENS,
    "seed": 1,
}

# The bias changes which experts are chosen; 2 of 4 groups; weights are scaled.
NEMOTRON_H_EXPERTS_ASKED = NEMOTRON_H_ASKED | {
    "model": NEMOTRON_H_ASKED["model"]
    | {
        "hybrid_override_pattern": "M*E-ME*M",
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
    },
}

# Three value heads share a key head, two query heads a key and value head. The last layer has an MLP and no experts.
QWEN3_NEXT_ASKED = {
    "architecture": "Qwen3Next",
    "model": {
        "hidden_size": 64,
        "vocab_size": 272,
        "num_hidden_layers": 5,
        "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
        "mlp_only_layers": [4],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "intermediate_size": 112,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
        "rms_norm_eps": 1e-6,
    },
    "prompt_lengths": (1, 2, 3, 4, 63, 64, 65, 128, 300),
    "new_tokens": NEW_TOKENS,
    "seed": 8,  # no choice between two experts is close, see `router_margin`
}

BAMBA_ASKED = {
    "architecture": "Bamba",
    "model": {
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 3],
        "hidden_size": 64,
        "vocab_size": 272,
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 112,
        "rms_norm_eps": 1e-5,
        "mamba_chunk_size": 32,
    },
    "prompt_lengths": (1, 3, 64, 129),
    "new_tokens": NEW_TOKENS,
    "seed": 1,
}


def config_json(model_type: str, asked: dict[str, Any], *, tied: bool = False) -> dict[str, Any]:
    """What a folder's ``config.json`` says."""
    own = {"model_type": model_type.removesuffix("_experts"), "dtype": "float32", "tie_word_embeddings": tied}
    return asked["model"] | own | {"max_position_embeddings": 1024}


# By kind: the dimensions as the package reads them (parity with the answers of transformers shows that they are right), and what
# transformers is asked for.
MODELS = {
    name: (dimensions_of(config_json(name, asked), name), asked)
    for name, asked in {
        "bamba": BAMBA_ASKED,
        "nemotron_h": NEMOTRON_H_ASKED,
        "nemotron_h_experts": NEMOTRON_H_EXPERTS_ASKED,
        "qwen3_next": QWEN3_NEXT_ASKED,
    }.items()
}
BAMBA, NEMOTRON_H, NEMOTRON_H_EXPERTS, QWEN3_NEXT = (config for config, _ in MODELS.values())


def make_folder(
    folder: Path,
    model_type: str = "nemotron_h",
    *,
    shards: int = 1,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """A folder with random weights; returns them."""
    from safetensors.torch import save_file

    config, asked = MODELS[model_type]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(model_type, asked, tied=tied)))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in hf_shapes(config).items()
        if not (tied and name == "lm_head.weight")
    }
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return weights
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        names = list(weights)[number::shards]
        save_file({name: weights[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return weights


def save_tokenizer(folder: Path, *special: str) -> None:
    """A tokenizer of single bytes, ids 0 to 255 in ByteLevel's order, and special tokens behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))


def make_references(asked: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """State dict, and tokens and logits of prompts with their greedy continuation, of each folder. It gets the model's files.

    One process makes them all.
    """
    for folder, wanted in asked.items():
        folder.mkdir(exist_ok=True)
        (folder / "asked.json").write_text(json.dumps(wanted))
    result = subprocess.run(
        [sys.executable, str(REFERENCE), *map(str, asked)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return {folder: load_reference(folder) for folder in asked}


def load_reference(folder: Path) -> dict[str, Any]:
    """What `make_references` left in a folder."""
    return torch.load(folder / "out.pt", weights_only=True)


def answers_of_a_batch(model: Any, reference: dict[str, Any]) -> dict[int, Any]:
    """All prompts together, prefills of several lengths, then batched decodes: finished requests by the case's number."""
    engine = build_engine(model, materialize_only_last_token_logits=False)
    finished: dict[int, Any] = {}
    for number, case in enumerate(reference["cases"]):
        engine.add_request(number, case["tokens"][: case["length"]], greedy(NEW_TOKENS, skip_prompt_log_probs=False))
    run_to_end(engine, finished)
    return finished


def assert_same_answer(request: Any, case: dict[str, Any]) -> float:
    """Tokens, and log-probs of prompt and answer within 1e-4; returns how far off the worst log-prob is."""
    length = case["length"]
    assert list(request.generated_tokens) == case["tokens"][length:]
    right = torch.log_softmax(case["logits"].double(), -1)[:-1]
    right = right.gather(1, torch.tensor(case["tokens"][1:])[:, None])[:, 0]
    got = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs], dtype=torch.float64)
    assert got.shape == right.shape
    gap = float((got - right).abs().max())
    assert gap <= 1e-4, f"prompt of {length} tokens"
    return gap


class PromptLogits:
    """Logits after every token of a prompt, as the engine's prefill computes them.

    One engine, built once: weights may change between two prompts.
    """

    def __init__(self, model: Any, **fields: Any) -> None:
        self.model = model
        self.engine = build_engine(model, materialize_only_last_token_logits=False, **fields)
        self.next_id = 0

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """(tokens, vocabulary), on the CPU; nothing of use on a pipeline stage without an output layer."""
        seen: list[torch.Tensor] = []
        hook = self.model.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
        try:
            self.engine.add_request(self.next_id, tokens, greedy(1, skip_prompt_log_probs=False))
            self.next_id += 1
            run_to_end(self.engine, {})
        finally:
            hook.remove()
        return seen[0].reshape(-1, seen[0].shape[-1])[: len(tokens)].cpu()


def gaps(model, reference):
    """Largest gaps of a model to its reference, of logits and of log-probs; the greedy answers must be the same.

    A pipeline stage without an output layer has the log-probs, and no logits.
    """
    answers, cases = answers_of_a_batch(model, reference), reference["cases"]
    found = {"log_probs_gap": max(assert_same_answer(answers[n], case) for n, case in enumerate(cases))}
    prompt_logits = PromptLogits(model)
    for case in cases:
        logits = prompt_logits(case["tokens"])
        if model.post_process:
            gap = float((logits - case["logits"]).abs().max())
            found["logits_gap"] = max(gap, found.get("logits_gap", 0.0))
    return found
