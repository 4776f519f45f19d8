"""Megatron's engine with the weights of a Hugging Face Nemotron-H gives Hugging Face's answers (fp32, random weights)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import HybridModelConfig, build_hybrid_model
from megatron_hybrid_prefix.models.hf_weights import copy_hf_weights
from tests.harness.engine_helpers import greedy, run_to_end
from tests.harness.limits import HANG_S

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).resolve().parents[1] / "harness" / "workers" / "hf_reference.py"
LENGTHS = (1, 2, 3, 7, 64, 127, 128, 129, 300)
NEW_TOKENS = 8
# No two dimensions agree by chance: inner 96, conv 160, query heads 80, key and value heads 40.
CONFIG = HybridModelConfig(
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


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """State dict, and tokens and logits of prompts with their greedy continuation."""
    folder = tmp_path_factory.mktemp("hf")
    asked = {
        "model": {
            "hybrid_override_pattern": CONFIG.layer_pattern,
            "hidden_size": CONFIG.hidden_size,
            "vocab_size": CONFIG.vocab_size,
            "mamba_num_heads": CONFIG.mamba_num_heads,
            "mamba_head_dim": CONFIG.mamba_head_dim,
            "ssm_state_size": CONFIG.mamba_state_dim,
            "n_groups": CONFIG.mamba_num_groups,
            "conv_kernel": CONFIG.d_conv,
            "chunk_size": 32,  # another grid than megatron's: the result may not depend on it
            "num_attention_heads": CONFIG.num_attention_heads,
            "num_key_value_heads": CONFIG.num_query_groups,
            "head_dim": CONFIG.kv_channels,
            "intermediate_size": CONFIG.ffn_hidden_size,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": CONFIG.layernorm_epsilon,
            "use_conv_bias": True,
            "use_bias": False,
        },
        "prompt_lengths": LENGTHS,
        "new_tokens": NEW_TOKENS,
        "seed": 1,
    }
    (folder / "config.json").write_text(json.dumps(asked))
    result = subprocess.run(
        [sys.executable, str(REFERENCE), str(folder / "config.json"), str(folder / "out.pt")],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(folder / "out.pt", weights_only=True)


@pytest.fixture(scope="module")
def model(platform, reference):
    model = build_hybrid_model(CONFIG, seed=9, platform=platform)
    engine = build_engine(model)
    engine.add_request(0, [1, 2, 3], greedy(3))
    run_to_end(engine, {})  # decodes, which leaves copies of the first weights' A
    copy_hf_weights(model, reference["state_dict"], CONFIG)
    return model


def prompt_logits(model, tokens):
    """Logits after every token of a prompt, as the engine's prefill computes them: (tokens, vocabulary)."""
    seen = []
    hook = model.output_layer.register_forward_hook(
        lambda module, args, output: seen.append(output[0].detach().clone())
    )
    try:
        engine = build_engine(model, materialize_only_last_token_logits=False)
        engine.add_request(0, tokens, greedy(1, skip_prompt_log_probs=False))
        run_to_end(engine, {})
    finally:
        hook.remove()
    return seen[0].reshape(-1, CONFIG.vocab_size)[: len(tokens)]


def test_the_reference_has_logits_with_a_spread(reference):
    for case in reference["cases"]:
        assert case["logits"].std() > 1.0
        assert len(set(case["tokens"][case["length"] :])) > 2 or case["length"] < 3


def test_logits_of_every_prompt_position(model, reference):
    for case in reference["cases"]:
        logits = prompt_logits(model, case["tokens"])
        assert (logits - case["logits"]).abs().max() <= 1e-4, f"prompt of {len(case['tokens'])} tokens"


def test_generation_and_prompt_log_probs_of_a_batch(model, reference):
    """All prompts together: prefills of several lengths, then batched decodes."""
    engine = build_engine(model, materialize_only_last_token_logits=False)
    finished: dict = {}
    for number, case in enumerate(reference["cases"]):
        engine.add_request(number, case["tokens"][: case["length"]], greedy(NEW_TOKENS, skip_prompt_log_probs=False))
    run_to_end(engine, finished)
    for number, case in enumerate(reference["cases"]):
        request, length = finished[number], case["length"]
        assert list(request.generated_tokens) == case["tokens"][length:]
        right = torch.log_softmax(case["logits"].double(), -1)[:-1]
        right = right.gather(1, torch.tensor(case["tokens"][1:])[:, None])[:, 0]
        got = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs], dtype=torch.float64)
        assert got.shape == right.shape
        assert (got - right).abs().max() <= 1e-4, f"prompt of {length} tokens"


def test_a_perturbation_of_any_weight_shows(platform, reference):
    """Changing any one weight by a few percent breaks the parity. So no weight is ignored, or constant."""
    model = build_hybrid_model(CONFIG, seed=9, platform=platform)
    case = reference["cases"][LENGTHS.index(64)]
    for name, weight in reference["state_dict"].items():
        wrong = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        copy_hf_weights(model, reference["state_dict"] | {name: wrong}, CONFIG)
        assert (prompt_logits(model, case["tokens"]) - case["logits"]).abs().max() >= 1e-2, name


def test_a_wrong_state_dict_is_one_clear_line_and_changes_nothing(model, reference):
    good = reference["state_dict"]
    before = {name: value.clone() for name, value in model.named_parameters()}
    for bad, message in (
        (good | {"backbone.norm_f.bias": torch.zeros(1)}, "unknown weight model.norm_f.bias"),
        ({name: value for name, value in good.items() if not name.endswith("dt_bias")}, "lacks weight .*dt_bias and 2"),
        (good | {"model.layers.0.mixer.in_proj.bias": torch.zeros(1)}, "unknown weight .*in_proj.bias"),
        (good | {"lm_head.weight": good["lm_head.weight"][1:]}, "lm_head.weight has shape"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            copy_hf_weights(model, bad, CONFIG)
        assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_names_of_the_hub_and_multi_token_prediction(model, reference, platform):
    hub = {name.replace("model.", "backbone.", 1): value for name, value in reference["state_dict"].items()}
    other = build_hybrid_model(CONFIG, seed=10, platform=platform)
    copy_hf_weights(other, hub | {"mtp.layers.0.norm.weight": torch.zeros(1)}, CONFIG)
    for (name, value), (_, right) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(value, right), name


def test_only_models_like_nemotron_h(model, reference):
    with pytest.raises(ValueError, match="squared ReLU and no position embedding"):
        copy_hf_weights(model, reference["state_dict"], replace(CONFIG, rotary_base=10000))
