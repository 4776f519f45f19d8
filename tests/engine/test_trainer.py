"""`invariant_forward`: a trainer's forward has the bits of the engine, and the gradient of megatron's forward at each layer's inputs."""

from __future__ import annotations

import pytest
import torch
from megatron.core.inference.utils import InferenceMode

from megatron_hybrid_prefix import invariant_forward
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.named_models import YARN, named
from tests.harness.selection import mostly_slow
from tests.harness.trainer import answers, differ, forward, gradients, padded, trained

BOTH_KINDS = {"rotary_base": 10_000, "rotary_fraction": 0.5, "attention_output_gate": True, "qk_norm": True, **YARN}


@pytest.fixture(scope="module", autouse=True)
def engines_of_other_modules(platform):
    """They are never suspended, and megatron takes every forward for one of theirs."""
    was_active = InferenceMode.is_active()
    InferenceMode.unset_active()
    yield
    if was_active:
        InferenceMode.set_active()


def built(name, platform):
    config = get_preset("tiny-gdn", layer_pattern="MG*-", **BOTH_KINDS) if name == "both" else named(name)
    return build_hybrid_model(config, seed=0, platform=platform)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [
            *("tiny 96", "both 128", "tiny-granite-dense 64", "tiny-gdn 64", "tiny-moe 64", "tiny-qwen3-next 64"),
            "tiny-olmo-hybrid 64",
        ],
        "tiny 96",
        "both 128",
        "tiny-moe 64",
    ),
)
def test_a_trainer_has_the_bits_of_the_engine(platform, case):
    """Answers over ends of chunks and of blocks; prompts of one token, and of several chunks."""
    name, block = case.split()
    model = built(name, platform)
    found = answers(model, (1, 60, 200), 70, block_size_tokens=int(block))
    differing = trained(model, found, int(block))
    assert differing["without gradients"] == differing["with gradients"] == 0
    assert differing["by default"] > 0
    assert differing["between the gradients"] < 1e-6


def test_chunks_of_other_blocks_are_noticed(platform):
    model = built("tiny", platform)
    found = answers(model, (60, 200), 70, block_size_tokens=96)
    tokens = padded(model, found)
    with invariant_forward(model, block_size_tokens=128) as log_probs, torch.no_grad():
        assert differ(found, log_probs(forward(model, tokens), tokens)) > 0


def test_two_models_side_by_side_and_hooks_of_weights(platform):
    """A policy and its reference; a weight's hook runs once."""
    tokens = torch.randint(512, (1, 70), generator=torch.Generator().manual_seed(0))
    models = [build_hybrid_model(named("tiny"), seed=seed, platform=platform).requires_grad_() for seed in (0, 1)]
    with torch.no_grad():
        plain = [forward(model, tokens) for model in models]
    with invariant_forward(models[0]) as log_probs:
        alone = log_probs(forward(models[0], tokens), tokens)
        wanted = gradients(models[0], alone)
        with invariant_forward(models[1]) as others:
            both = log_probs(forward(models[0], tokens), tokens), others(forward(models[1], tokens), tokens)
        assert torch.equal(both[0], alone) and not torch.equal(both[1], alone)
        assert not torch.equal(forward(models[0], tokens), plain[0])
        assert torch.equal(forward(models[1], tokens), plain[1])
        name, weight = next((name, x) for name, x in models[0].named_parameters() if not name.startswith("embedding."))
        handle = weight.register_hook(lambda grad: 2 * grad)
        found = gradients(models[0], log_probs(forward(models[0], tokens), tokens))
        handle.remove()
        assert torch.equal(found[name], 2 * wanted[name])


def fresh(x):
    """A value of a layer's arguments, as the input of another graph."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def test_the_gradient_of_a_layer_is_that_of_megatrons_forward_at_the_same_inputs(platform):
    """Bit for bit; the inputs are what the engine's operations give."""
    model = built("both", platform).requires_grad_()
    tokens = torch.randint(512, (2, 150), generator=torch.Generator().manual_seed(0))
    layers, calls, grads = [*model.decoder.layers, model.decoder.final_norm, model.output_layer], {}, {}

    def note(layer, args, kwargs, output):
        output = output[0] if isinstance(output, tuple) else output
        calls[layer] = [*map(fresh, args)], {name: fresh(x) for name, x in kwargs.items()}, output.detach().clone()
        output.register_hook(lambda grad: grads.__setitem__(layer, grad))

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    with invariant_forward(model) as log_probs:
        found = gradients(model, log_probs(forward(model, tokens), tokens))
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    assert set(calls) == set(grads) == set(layers)
    same = 0
    for layer, (args, kwargs, output) in calls.items():
        again = layer(*args, **kwargs)
        again = again[0] if isinstance(again, tuple) else again
        same += torch.equal(again, output)
        again.backward(grads[layer])
    assert same < len(layers), "megatron's operations were compared with themselves"
    for name, weight in model.named_parameters():
        if not name.startswith("embedding."):
            assert torch.equal(weight.grad, found[name]), name


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("attention_mask: only None", {"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()}),
        ("labels: ", {"labels": torch.zeros(1, 4, dtype=torch.long)}),
        ("packed_seq_params: ", {"packed_seq_params": object()}),
        ("dropout: ", "train"),
        ("dropout: ", "layer"),
        ("autocast: ", "autocast"),
        ("input_ids: ", {"input_ids": torch.zeros(0, 4, dtype=torch.long)}),
        ("an engine runs; call engine.suspend", "engine"),
    ],
)
def test_a_forward_that_is_not_covered_is_one_line(platform, monkeypatch, what, change):
    model, tokens = built("tiny", platform).train(), torch.zeros(1, 4, dtype=torch.long)
    with invariant_forward(model), torch.no_grad():
        model(tokens, tokens, torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1))
        if change == "train":
            model.config.hidden_dropout = 0.1
        if change == "layer":
            model.decoder.layers[1].hidden_dropout = 0.1
        if change == "engine":
            monkeypatch.setattr(InferenceMode, "is_active", lambda: True)
        fields = {"attention_mask": None} | (change if isinstance(change, dict) else {})
        given, cast = fields.pop("input_ids", tokens), torch.autocast("cpu", torch.bfloat16, change == "autocast")
        with pytest.raises(ValueError, match=f"^invariant_forward: {what}.*$"), cast:
            model(given, tokens, **fields)


@pytest.mark.parametrize(
    ("name", "block", "match"),
    [
        ("tiny-mtp", 64, "predict drafts"),
        ("tiny", 64, "core attention Own: Own.forward would never be called"),
        ("tiny-gdn", 96, "block_size_tokens=96 is no multiple of 64"),
    ],
)
def test_a_model_that_is_not_covered_is_one_line(platform, name, block, match):
    model = built(name, platform)
    if name == "tiny":
        core = model.decoder.layers[1].self_attention.core_attention
        core.__class__ = type("Own", (type(core),), {"forward": lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=f"^invariant_forward: .*{match}.*$"):
        invariant_forward(model, block_size_tokens=block).__enter__()
