"""A ``GPTModel`` with Gated DeltaNet layers, as Megatron-Bridge builds Qwen3-Next and Qwen3.5, says what the ``HybridModel`` says."""

from __future__ import annotations

import copy

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.layers.base import KINDS
from megatron_hybrid_prefix.mcore import build_upstream_engine, restore_mixers
from megatron_hybrid_prefix.mcore.state import layout
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.engine.test_prefix_exact import GPT_DIMENSIONS as DIMENSIONS
from tests.engine.test_prefix_speculative import check_accepted_drafts
from tests.harness.engine_helpers import assert_same, described, greedy, random_tokens
from tests.harness.gpt_model import as_gpt_model
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.selection import mostly_slow


@pytest.fixture(scope="module")
def pairs(platform):
    """A ``HybridModel`` and the ``GPTModel`` with its weights, by name."""
    hybrids = {
        name: build_hybrid_model(dimensions, seed=0, platform=platform) for name, dimensions in DIMENSIONS.items()
    }
    return {name: (hybrid, as_gpt_model(hybrid)) for name, hybrid in hybrids.items()}


@pytest.mark.parametrize("name", DIMENSIONS)
def test_log_probs_and_tokens_are_those_of_the_hybrid_model(pairs, name):
    """Of prompts and answers, without a cache. The experts are computed by other code: one by one."""
    answers = []
    for model in pairs[name]:
        served = EngineHarness(model, slots=None, materialize_only_last_token_logits=False)
        for length in (1, 2, 63, 64, 65, 300):
            served.add(random_tokens(length, seed=length), 6, params={"skip_prompt_log_probs": False})
        served.finish()
        answers.append([served.finished[number] for number in sorted(served.finished)])
    for right, found in zip(*answers, strict=True):
        assert found.generated_tokens == right.generated_tokens
        assert len(found.prompt_log_probs) == len(found.prompt_tokens) - 1
        for kind in ("generated_log_probs", "prompt_log_probs"):
            theirs, ours = (torch.tensor(getattr(request, kind)) for request in (right, found))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


class ZeroCentredNorm(torch.nn.RMSNorm):
    """Stands for Transformer Engine's, which Megatron-Bridge builds with ``layernorm_zero_centered_gamma``."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def test_zero_centred_norms(platform):
    hybrid = build_hybrid_model(DIMENSIONS["experts"], seed=0, platform=platform)
    for number, norm in enumerate(part for part in hybrid.modules() if isinstance(part, torch.nn.RMSNorm)):
        norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(number))
    model = as_gpt_model(hybrid)
    model.config.layernorm_zero_centered_gamma = True
    for norm in [part for part in model.modules() if isinstance(part, torch.nn.RMSNorm)]:
        norm.__class__ = ZeroCentredNorm
        norm.weight.sub_(1)
    answers = []
    for served in (EngineHarness(hybrid, slots=None), EngineHarness(model)):
        for own in (3, 9):
            served.send(tokens(2, 0, seed=1) + random_tokens(own, seed=own), count=8)
        answers.append(described(served.finished))
    assert answers[1][1]["cached_tokens"] == 2 * BLOCK
    assert assert_same(answers[1], answers[0]) <= 2e-5


@pytest.mark.parametrize("name", mostly_slow(DIMENSIONS, "dense"))
def test_the_next_turn_resumes_from_a_state_of_the_decode_and_from_the_host(pairs, name):
    served = EngineHarness(pairs[name][1], slots=2, blocks=16, host_gb=0.05, max_requests=2)
    prompt = tokens(1, 9, seed=1)
    history = [*prompt, *served.send(prompt, count=2 * BLOCK).generated_tokens, 7]
    assert served.send(history).num_cached_tokens == 3 * BLOCK
    assert served.context.prefix_stats().checkpoints_by_reason["decode"] > 0
    for seed in range(4):
        served.send(tokens(6, 7, seed=900 + seed), count=1)
    assert served.send([*history, 8]).num_cached_tokens == 3 * BLOCK
    assert served.context.prefix_stats().reused_tokens_host == 3 * BLOCK
    served.finish()


def test_drafts(platform):
    """The layers that draft are attention; the states of the others go back to the last accepted token."""
    dimensions = get_preset("tiny-gdn", layer_pattern="G-G-*-", mtp_num_layers=3, mtp_layer_pattern="*-")
    check_accepted_drafts(as_gpt_model(build_hybrid_model(dimensions, platform=platform)), 3, "async", range(2, 4))


def plain_gpt_model(like, **changes):
    """Attention in each of two layers."""
    config = copy.copy(like.config)
    config.num_layers = 2
    config.use_te_activation_func = False  # these layers have no module for it
    for name, value in changes.items():
        setattr(config, name, value)
    model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), 512, 512).requires_grad_(False).eval()
    for number, weight in enumerate(model.parameters()):
        weight.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    return model


def test_without_recurrent_layers_all_is_as_in_megatron(tiny_gdn):
    model = plain_gpt_model(tiny_gdn, is_hybrid_model=False)
    answers = []
    for build in (build_engine, build_upstream_engine):
        engine = build(model, max_requests=4)
        assert not engine.context.is_hybrid_model and engine.context.layer_map == {0: 0, 1: 1}
        answers.append(engine.generate([random_tokens(70, seed=1)], greedy(4))[0].merge().generated_tokens)
    assert answers[0] == answers[1]


CACHED = HybridPrefixConfig(mamba_gb=0.01)


def refusal(model, prefix=CACHED):
    with pytest.raises(ValueError) as error:
        build_engine(model, prefix)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_other_variants_of_attention_are_named(tiny_gdn):
    problem = "the model has no recurrent layers: use megatron's cache, enable_prefix_caching=True"
    assert refusal(plain_gpt_model(tiny_gdn)) == problem
    said = refusal(plain_gpt_model(tiny_gdn, experimental_attention_variant="dsa"))
    assert said == f"experimental_attention_variant='dsa': {problem}"


def test_recurrent_layers_of_no_kind_are_named(pairs):
    class GatedDeltaNet2(torch.nn.Module):
        pass

    model = as_gpt_model(pairs["dense"][0])
    model.decoder.layers[2].self_attention = GatedDeltaNet2()
    assert "layer 3 ('G', GatedDeltaNet2) is recurrent, and of none of the layer kinds" in refusal(model, None)


def test_latent_attention_beside_recurrent_layers_is_named(pairs):
    model = as_gpt_model(pairs["dense"][0])
    model.config.multi_latent_attention = True
    assert refusal(model) == refusal(model, None)
    assert refusal(model) == "multi_latent_attention=True is not supported beside layers of kind gated_delta_net"


def test_bits_are_refused(pairs):
    prefix = HybridPrefixConfig(mamba_gb=0.01, exact="bits")
    assert refusal(as_gpt_model(pairs["dense"][0]), prefix) == "exact='bits': the model is no HybridModel"


def test_layers_that_the_config_does_not_name_run_in_one_stage_only(pairs, monkeypatch):
    """Other stages see the config alone, and would cache as transformers do."""
    hybrid, model = pairs["dense"]
    unnamed = as_gpt_model(hybrid)
    unnamed.config.experimental_attention_variant = None
    served = EngineHarness(unnamed)
    for own in (3, 9):
        served.send(tokens(2, 0, seed=1) + random_tokens(own, seed=own))
    assert served.finished[2].num_cached_tokens == 2 * BLOCK
    served.finish()
    monkeypatch.setattr(layout, "stage_count", lambda groups: 2)
    # A plugin's kind, which other tests register, might be in any stage.
    monkeypatch.setattr(layout, "layer_kinds", lambda: [KINDS[name] for name in layout.RINGS])
    layout.mamba_state_config(model)
    said = "layers of kind gated_delta_net are in no pattern, so other pipeline stages do not know of them: set the model's"
    assert refusal(unnamed, None).startswith(said)


def test_slots_are_taken_off_again(pairs):
    model = as_gpt_model(pairs["dense"][0])
    build_engine(model, CACHED)
    assert restore_mixers(model) == 3
