"""A tiny random model of Hugging Face, its answers, and the same dimensions as a `HybridModelConfig`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import HybridModelConfig
from tests.harness.engine_helpers import greedy, run_to_end
from tests.harness.hf_state_dict import hf_shapes
from tests.harness.limits import HANG_S

REFERENCE = Path(__file__).parent / "workers" / "hf_reference.py"
NEW_TOKENS = 8

# No two dimensions agree by chance: inner 96, conv 160, query heads 80, key and value heads 40.
NEMOTRON_H = HybridModelConfig(
    layer_pattern="M*-M-*M",
    hidden_size=64,
    vocab_size=272,
    max_sequence_length=1024,
    mamba_num_heads=8,
    mamba_head_dim=12,
    mamba_state_dim=16,
    mamba_num_groups=2,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=20,
    ffn_hidden_size=112,
    dtype="float32",
)
NEMOTRON_H_ASKED = {
    "architecture": "NemotronH",
    "model": {
        "hybrid_override_pattern": NEMOTRON_H.layer_pattern,
        "hidden_size": NEMOTRON_H.hidden_size,
        "vocab_size": NEMOTRON_H.vocab_size,
        "mamba_num_heads": NEMOTRON_H.mamba_num_heads,
        "mamba_head_dim": NEMOTRON_H.mamba_head_dim,
        "ssm_state_size": NEMOTRON_H.mamba_state_dim,
        "n_groups": NEMOTRON_H.mamba_num_groups,
        "conv_kernel": NEMOTRON_H.d_conv,
        "chunk_size": 32,  # another grid than megatron's: the result may not depend on it
        "num_attention_heads": NEMOTRON_H.num_attention_heads,
        "num_key_value_heads": NEMOTRON_H.num_query_groups,
        "head_dim": NEMOTRON_H.kv_channels,
        "intermediate_size": NEMOTRON_H.ffn_hidden_size,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": NEMOTRON_H.layernorm_epsilon,
        "use_conv_bias": True,
        "use_bias": False,
    },
    "prompt_lengths": (1, 2, 3, 7, 64, 127, 128, 129, 300),
    "new_tokens": NEW_TOKENS,
    "seed": 1,
}

# The bias changes which experts are chosen; 2 of 4 groups; weights are scaled.
NEMOTRON_H_EXPERTS = replace(
    NEMOTRON_H,
    layer_pattern="M*E-ME*M",
    num_moe_experts=16,
    moe_router_topk=4,
    moe_router_score="sigmoid",
    moe_router_groups=4,
    moe_router_topk_groups=2,
    moe_router_scaling=2.5,
    moe_ffn_hidden_size=40,
    moe_shared_expert_intermediate_size=48,
)
NEMOTRON_H_EXPERTS_ASKED = NEMOTRON_H_ASKED | {
    "model": NEMOTRON_H_ASKED["model"]
    | {
        "hybrid_override_pattern": NEMOTRON_H_EXPERTS.layer_pattern,
        "n_routed_experts": NEMOTRON_H_EXPERTS.num_moe_experts,
        "num_experts_per_tok": NEMOTRON_H_EXPERTS.moe_router_topk,
        "n_group": NEMOTRON_H_EXPERTS.moe_router_groups,
        "topk_group": NEMOTRON_H_EXPERTS.moe_router_topk_groups,
        "routed_scaling_factor": NEMOTRON_H_EXPERTS.moe_router_scaling,
        "moe_intermediate_size": NEMOTRON_H_EXPERTS.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": NEMOTRON_H_EXPERTS.moe_shared_expert_intermediate_size,
    },
}

# Three value heads share a key head, two query heads a key and value head. The last layer has an MLP and no experts.
QWEN3_NEXT = HybridModelConfig(
    layer_pattern="GEGEGE*EG-",
    hidden_size=64,
    vocab_size=272,
    max_sequence_length=1024,
    gdn_num_key_heads=2,
    gdn_num_value_heads=6,
    gdn_key_head_dim=20,
    gdn_value_head_dim=12,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=24,
    ffn_hidden_size=112,
    activation="swiglu",
    rotary_base=10_000_000,
    rotary_fraction=0.25,
    attention_output_gate=True,
    qk_norm=True,
    float32_norms=True,
    layernorm_epsilon=1e-6,
    num_moe_experts=8,
    moe_router_topk=3,
    moe_ffn_hidden_size=40,
    moe_shared_expert_intermediate_size=48,
    moe_shared_expert_gate=True,
    dtype="float32",
)
QWEN3_NEXT_ASKED = {
    "architecture": "Qwen3Next",
    "model": {
        "hidden_size": QWEN3_NEXT.hidden_size,
        "vocab_size": QWEN3_NEXT.vocab_size,
        "num_hidden_layers": 5,
        "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
        "mlp_only_layers": [4],
        "linear_num_key_heads": QWEN3_NEXT.gdn_num_key_heads,
        "linear_num_value_heads": QWEN3_NEXT.gdn_num_value_heads,
        "linear_key_head_dim": QWEN3_NEXT.gdn_key_head_dim,
        "linear_value_head_dim": QWEN3_NEXT.gdn_value_head_dim,
        "linear_conv_kernel_dim": QWEN3_NEXT.d_conv,
        "num_attention_heads": QWEN3_NEXT.num_attention_heads,
        "num_key_value_heads": QWEN3_NEXT.num_query_groups,
        "head_dim": QWEN3_NEXT.kv_channels,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(QWEN3_NEXT.rotary_base or 0),
            "partial_rotary_factor": QWEN3_NEXT.rotary_fraction,
        },
        "intermediate_size": QWEN3_NEXT.ffn_hidden_size,
        "num_experts": QWEN3_NEXT.num_moe_experts,
        "num_experts_per_tok": QWEN3_NEXT.moe_router_topk,
        "moe_intermediate_size": QWEN3_NEXT.moe_ffn_hidden_size,
        "shared_expert_intermediate_size": QWEN3_NEXT.moe_shared_expert_intermediate_size,
        "rms_norm_eps": QWEN3_NEXT.layernorm_epsilon,
    },
    "prompt_lengths": (1, 2, 3, 4, 63, 64, 65, 128, 300),
    "new_tokens": NEW_TOKENS,
    "seed": 8,  # no choice between two experts is close, see `router_margin`
}


BAMBA = HybridModelConfig(
    layer_pattern="M-*-M-*-",
    hidden_size=64,
    vocab_size=272,
    max_sequence_length=1024,
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_state_dim=24,
    mamba_num_groups=2,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=112,
    activation="swiglu",
    rotary_base=10_000,
    rotary_fraction=0.5,
    dtype="float32",
)
BAMBA_ASKED = {
    "architecture": "Bamba",
    "model": {
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 3],
        "hidden_size": BAMBA.hidden_size,
        "vocab_size": BAMBA.vocab_size,
        "mamba_n_heads": BAMBA.mamba_num_heads,
        "mamba_d_head": "auto",
        "mamba_d_state": BAMBA.mamba_state_dim,
        "mamba_n_groups": BAMBA.mamba_num_groups,
        "num_attention_heads": BAMBA.num_attention_heads,
        "num_key_value_heads": BAMBA.num_query_groups,
        "intermediate_size": BAMBA.ffn_hidden_size,
        "rms_norm_eps": BAMBA.layernorm_epsilon,
        "mamba_chunk_size": 32,
    },
    "prompt_lengths": (1, 3, 64, 129),
    "new_tokens": NEW_TOKENS,
    "seed": 1,
}

MODELS = {
    "bamba": (BAMBA, BAMBA_ASKED),
    "nemotron_h": (NEMOTRON_H, NEMOTRON_H_ASKED),
    "nemotron_h_experts": (NEMOTRON_H_EXPERTS, NEMOTRON_H_EXPERTS_ASKED),
    "qwen3_next": (QWEN3_NEXT, QWEN3_NEXT_ASKED),
}


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
    given = asked["model"] | {
        "model_type": model_type.removesuffix("_experts"),
        "dtype": "float32",
        "tie_word_embeddings": tied,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given | {"max_position_embeddings": config.max_sequence_length}))
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
        last = self.model.output_layer if self.model.post_process else self.model.decoder
        hook = last.register_forward_hook(lambda module, args, output: seen.append(output[0].detach().clone()))
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
