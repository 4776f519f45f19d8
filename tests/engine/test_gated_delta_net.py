"""Gated DeltaNet and Gated Delta Product layers: what megatron trains is what the engine runs, in one pass, with states in float32."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.layers import gated_delta_net
from megatron_hybrid_prefix.layers.gated_delta_net import GatedDeltaNetKind
from megatron_hybrid_prefix.mcore import HybridPrefixContext
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform.kernels.training import chunk_gated_delta_product
from megatron_hybrid_prefix.upstream.delta_net import mark_packed_parameters
from megatron_hybrid_prefix.upstream.delta_product import IS_THERE, mixer_spec
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.named_models import named

with_products = pytest.mark.skipif(not IS_THERE, reason="this megatron-core has no Gated Delta Product layers")


@pytest.mark.parametrize("with_slots", [False, True], ids=["megatrons_class", "slot_class"])
@pytest.mark.parametrize(
    ("name", "number"), [("tiny-gdn", 3), ("tiny-olmo-hybrid", 2), pytest.param("tiny-gdp", 3, marks=with_products)]
)
def test_the_reference_is_what_megatron_trains(platform, with_slots, name, number):
    """Megatron's own forward, with PyTorch in place of flash-linear-attention. It has gradients."""
    model = build_hybrid_model(named(name), seed=0, platform=platform)
    if with_slots:
        build_engine(model)
    layer, reference = model.decoder.layers[number], NaiveHybridModel(model, model.hybrid_config)
    hidden = torch.randn(150, 1, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    is_product = name == "tiny-gdp"
    part, of_reference = ("mixer", reference._delta_product) if is_product else ("self_attention", reference._delta_net)
    with torch.compiler.set_stance("force_eager"):
        theirs, bias = getattr(layer, part)(hidden, **({} if is_product else {"attention_mask": None}))
    expected = of_reference(hidden[:, 0].detach().double(), f"decoder.layers.{number}.{part}.", None, None)
    assert bias is None
    assert (theirs[:, 0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    theirs.sum().backward()
    assert hidden.grad.isfinite().all() and hidden.grad[-1].any()


def test_one_pass_gives_the_states_of_all_boundaries(tiny_gdn, monkeypatch):
    """However many states a prefill keeps: each layer's recurrence runs once a step, and starts from a slot."""
    calls = []
    scan = gated_delta_net.scan_delta_rule

    def spy(*args, **kwargs):
        calls.append((kwargs["source_slots"].tolist(), [s for s in kwargs["chunk_slots"].tolist() if s >= 0]))
        return scan(*args, **kwargs)

    monkeypatch.setattr(gated_delta_net, "scan_delta_rule", spy)
    served = EngineHarness(tiny_gdn, retention_interval_tokens=BLOCK)
    prompt = tokens(6, 9, seed=1)
    served.send(prompt)
    layers = tiny_gdn.hybrid_config.count("G")
    assert len(calls) == layers and all(len(kept) == 6 for _, kept in calls)
    kept = calls[0][1]
    calls.clear()
    for blocks in (1, 2, 3, 4, 5, 6):  # from each of them
        request = served.send(prompt[: blocks * BLOCK] + random_tokens(20, seed=blocks))
        assert request.num_cached_tokens == blocks * BLOCK
    assert [sources[0] for sources, _ in calls[::layers]] == kept
    assert len(calls) == 6 * layers
    served.check()


def test_states_are_float32_unless_asked_otherwise(platform):
    model = build_hybrid_model(get_preset("tiny-gdn", layer_pattern="GM*-", dtype="bfloat16"), platform=platform)

    def types(**fields):
        tensors = build_engine(model, HybridPrefixConfig(mamba_gb=0.01, **fields)).context.shared_memory.states
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}

    windows = {"conv": "bfloat16", "gdn_conv": "bfloat16"}
    assert types() == windows | {"gdn_state": "float32", "ssm": "bfloat16"}
    assert types(state_dtype="bfloat16") == windows | {"gdn_state": "bfloat16", "ssm": "bfloat16"}
    assert types(state_dtype="float32") == windows | {"gdn_state": "float32", "ssm": "float32"}


def test_the_gates_are_those_of_hugging_face_in_bfloat16(platform):
    """Up to float32's rounding: ``exp(A_log)``, rounded as in megatron's training, would be up to 0.4 % off at every token."""
    model = build_hybrid_model(get_preset("tiny-gdn", dtype="bfloat16"), platform=platform)
    build_engine(model)
    layer = model.decoder.layers[0].self_attention
    qkv, z, beta, alpha = layer._parts(torch.randn(5, layer.in_proj.weight.shape[0]).bfloat16())
    *_, log_decay, found_beta = layer._by_head(qkv, z, beta, alpha)
    softplus = torch.nn.functional.softplus(alpha.float() + layer.dt_bias)
    assert layer.A_log.dtype == torch.bfloat16 and log_decay.dtype == torch.float32
    off = [
        (log_decay / (-rates * softplus) - 1).abs().max() for rates in (layer.A_log.float().exp(), layer.A_log.exp())
    ]
    assert off[0] <= 8 * torch.finfo().eps < 64 * torch.finfo().eps < off[1]
    torch.testing.assert_close(found_beta, beta.sigmoid(), rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_a_kind_may_refuse_cuda_graphs(tiny_gdn, monkeypatch):
    monkeypatch.setattr(GatedDeltaNetKind, "cuda_graphs", False)
    inference_config, model_config = EngineHarness(tiny_gdn).context.config, copy.copy(tiny_gdn.config)
    model_config.cuda_graph_impl = "local"
    with pytest.raises(ValueError, match="CUDA graphs cannot capture layers of kind gated_delta_net"):
        HybridPrefixContext(model_config, dataclasses.replace(inference_config, num_cuda_graphs=2))


def test_layers_with_another_activation_are_refused(platform):
    model = build_hybrid_model("tiny-gdn", seed=0, platform=platform)
    model.decoder.layers[0].self_attention.act_fn = torch.nn.functional.gelu
    with pytest.raises(ValueError, match=r"Gated DeltaNet layers with activation 'gelu': .* \(activation='swiglu'\)"):
        build_engine(model)


@pytest.mark.parametrize("taps", [1, 5])
def test_layers_with_another_number_of_taps_are_refused(platform, taps):
    """Megatron's decode kernel has code for 2 to 4 taps only, and no check."""
    model = build_hybrid_model("tiny-gdn", seed=0, platform=platform, linear_conv_kernel_dim=taps)
    with pytest.raises(ValueError, match=rf"a convolution of {taps} taps: use 2 to 4 \(linear_conv_kernel_dim\)"):
        build_engine(model)


def test_a_bias_of_the_convolution_is_sharded_like_its_weights(platform):
    model = build_hybrid_model("tiny-gdn", seed=0, platform=platform)
    convolution = model.decoder.layers[0].self_attention.conv1d
    assert convolution.bias is None
    convolution.bias = torch.nn.Parameter(torch.zeros(convolution.out_channels))
    mark_packed_parameters(model)
    assert convolution.bias.partition_sizes == convolution.weight.partition_sizes
    assert sum(convolution.bias.partition_sizes) == len(convolution.bias)


@pytest.mark.skipif(IS_THERE, reason="this megatron-core has Gated Delta Product layers")
def test_a_megatron_without_the_layer_is_named(platform, monkeypatch):
    monkeypatch.setattr("megatron_hybrid_prefix.upstream.delta_product.mixer_spec", mixer_spec)
    with pytest.raises(
        ValueError, match=r"^gdp_num_householder=3: only Megatron-LM's main has Gated Delta Product layers$"
    ):
        build_hybrid_model(get_preset("tiny", gdp_num_householder=3), platform=platform)


def test_packed_sequences_do_not_train_without_the_kernels():
    with pytest.raises(ValueError, match=r"Gated Delta Product layers train on sequences of one length$"):
        chunk_gated_delta_product(*torch.ones(5, 1, 2, 1, 1), num_householder=1, cu_seqlens=torch.tensor([0, 1, 2]))
