"""Users' subclasses of what this package replaces: their maths is in the answers, as with caching off, or one line refuses them."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

import pytest
import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine, dynamic_engine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine, installed
from megatron_hybrid_prefix.layers.base import LayerKind
from megatron_hybrid_prefix.layers.kinds import restore_mixers
from megatron_hybrid_prefix.mcore import HybridPrefixController, build_upstream_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.upstream.capabilities import form_of
from megatron_hybrid_prefix.upstream.delta_product import IS_THERE, GatedDeltaProductMixer
from tests.engine.test_install import CONFIG, PREFIX, TOKENIZER
from tests.harness.engine_helpers import assert_same, described, greedy, random_tokens, run_to_end
from tests.harness.named_models import MORE

BLOCK = 64
FIELDS = {"max_requests": 4, "max_tokens": 1024, "buffer_size_gb": 0.05, "block_size_tokens": BLOCK}
PROMPTS = [random_tokens(2 * BLOCK, seed=1) + random_tokens(own, seed=own) for own in (7, 40)]
KERNELS = "_ssm_prefill ssm_prefill _ssm_decode ssm_decode"  # Falcon-H1's mixer scales their input
PREFILL, DECODE = KERNELS.split()[form_of("steps of recurrent layers") == "shared" :: 2]


def answers(engine: Any) -> list[dict[str, Any]]:
    """Of both prompts, one after the other: the second shares two blocks with the first."""
    finished: dict[int, Any] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(number, prompt, greedy(6))
        run_to_end(engine, finished)
    return described(finished)


@functools.cache
def plain(preset: str) -> list[dict[str, Any]]:
    return answers(build_engine(build_hybrid_model(MORE.get(preset, preset), seed=0), **FIELDS))


SUPER = "super().{name}(*args, **fields)"
SCALED = "super().{name}(args[0] * 1.5, *args[1:], **fields)"
SCALES = f"times({SUPER})"


def times(found: Any) -> Any:
    return (found[0] * 1.5, *found[1:]) if isinstance(found, tuple) else found * 1.5


def mine(base: type, names: str, body: str) -> type:
    """A subclass as users write them: ``super()`` is in their code."""
    methods = [f" def {name}(self, *args, **fields): return {body.format(name=name)}" for name in names.split()]
    scope = {"base": base, "times": times}
    exec("\n".join(["class Mine(base):", " pass", *methods]), scope)
    return scope["Mine"]


def model_with(preset: str, base: type, names: str, body: str) -> Any:
    """A model whose modules of a class are of a subclass, as if its spec had named that."""
    model = build_hybrid_model(MORE.get(preset, preset), seed=0)
    made: dict[type, type] = {}
    for module in [module for module in model.modules() if isinstance(module, base)]:
        module.__class__ = made.setdefault(type(module), mine(type(module), names, body))
    assert made
    return model


HONOURED = {
    "prefill and decode of Mamba2": ("tiny", MambaMixer, KERNELS, SCALED),
    "forward of Mamba2": ("tiny", MambaMixer, "forward", SCALES),
    "forward of Mamba2 beside a GDN": ("tiny-mixed", MambaMixer, "forward", SCALES),
    "forward of a GDN": ("tiny-gdn", GatedDeltaNet, "forward", SCALES),
    "norms": ("tiny-gdn", torch.nn.RMSNorm, "forward", SCALES),
    "attention": ("tiny", SelfAttention, "forward", SCALES),
    "MLP": ("tiny", MLP, "forward", SCALES),
    "linear layers": ("tiny", RowParallelLinear, "forward", SCALES),
    "embedding": ("tiny", VocabParallelEmbedding, "forward", SCALES),
    "router": ("tiny-moe", TopKRouter, "forward", SCALES),
    "experts": ("tiny-moe", BaseMoELayer, "forward", SCALES),
}


@pytest.mark.parametrize("name", HONOURED)
def test_a_layer_is_honoured(platform, name):
    preset, base, *written = HONOURED[name]
    model = model_with(preset, base, *written)
    # Megatron 0.19 cannot run a GDN: there `test_what_a_layer_adds_is_as_in_the_weights` is the judge.
    build_off = build_engine if "gdn" in preset or preset == "tiny-mixed" else build_upstream_engine
    off = answers(build_off(model, **FIELDS))
    cached = answers(build_engine(model, PREFIX, **FIELDS))
    assert [answer["cached_tokens"] for answer in cached] == [0, 2 * BLOCK]
    assert_same(cached, off)
    with pytest.raises(AssertionError):
        assert_same(cached, plain(preset))
    restore_mixers(model)
    assert all(type(module).__name__ == "Mine" for module in model.modules() if isinstance(module, base))


WEIGHTS = {"prefill and decode of Mamba2": "in_proj.weight", "forward of a GDN": "out_proj.weight", "norms": "weight"}


@pytest.mark.parametrize(("case", "weights"), WEIGHTS.items())
def test_what_a_layer_adds_is_as_in_the_weights(platform, case, weights):
    preset, base, *written = HONOURED[case]
    same = build_hybrid_model(preset, seed=0)
    for module in same.modules():
        if isinstance(module, base):
            module.get_parameter(weights).data.mul_(1.5)
    found = answers(build_engine(model_with(preset, base, *written), PREFIX, **FIELDS))
    assert_same(found, answers(build_engine(same, PREFIX, **FIELDS)))


REFUSED = [
    *(("tiny", MambaMixer, name) for name in (PREFILL, DECODE, "forward", "prefill", "_get_decode_A_neg_exp")),
    *(("tiny-gdn", GatedDeltaNet, name) for name in ("forward", "_apply_gated_norm")),
    *(("tiny-gdp", GatedDeltaProductMixer, name) for name in ("forward", "_prepare_qkv") if IS_THERE),
]


@pytest.mark.parametrize(("preset", "base", "name"), REFUSED)
def test_a_layer_is_refused(platform, preset, base, name):
    model = model_with(preset, base, name, "None")
    is_called = name not in ("_get_decode_A_neg_exp", "_apply_gated_norm", "_prepare_qkv")
    said = f"Mine.{name} {f'does not call super().{name}' if is_called else 'would never be called'}: "
    for prefix in (None, PREFIX):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}") as error:
            build_engine(model, prefix, **FIELDS)
        assert "\n" not in str(error.value)
    assert all(type(module).__name__ == "Mine" for module in model.modules() if isinstance(module, base))
    if preset == "tiny":
        with installed():  # no cache is asked for
            assert type(ENGINE(model)) is DynamicInferenceEngine
        with installed(PREFIX), pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            ENGINE(model)


def test_what_training_alone_calls_is_the_users(platform):
    model = model_with("tiny", MambaMixer, "_ssm_training sharded_state_dict train a_helper", "self")
    assert_same(answers(build_engine(model, PREFIX, **FIELDS)), plain("tiny"))


def test_a_method_of_the_object_and_another_activation_are_refused(platform):
    model = build_hybrid_model("tiny", seed=0)
    mixer = next(module for module in model.modules() if isinstance(module, MambaMixer))
    setattr(mixer, PREFILL, getattr(mixer, PREFILL))
    with pytest.raises(ValueError, match=f"^{PREFILL} of this MambaMixer itself would never be called: "):
        build_engine(model, PREFIX, **FIELDS)
    delattr(mixer, PREFILL)
    mixer.activation = "gelu"
    with pytest.raises(ValueError, match=r"^activation='gelu' of this MambaMixer is not SiLU: "):
        build_engine(model, PREFIX, **FIELDS)
    mixer.activation = "silu"
    mixer.forward = functools.partial(mixer.forward)  # as tools wrap it: below it is ours
    assert_same(answers(build_engine(model, PREFIX, **FIELDS)), plain("tiny"))


def test_a_prefill_that_calls_super_now_and_then_is_an_error_in_that_step(platform):
    model = model_with("tiny", MambaMixer, PREFILL, f"{SUPER} if self.training else args[0][..., : self.d_inner]")
    with pytest.raises(RuntimeError, match=r"^SlotMine did not call super\(\) in a prefill: its states are lost$"):
        answers(build_engine(model, PREFIX, **FIELDS))


EXACT = [
    *((base, "forward") for base in (MLP, torch.nn.RMSNorm, RowParallelLinear, SharedExpertMLP)),
    *((TopKRouter, name) for name in ("gating", "routing")),
    *((base, "_forward_impl") for base in (ColumnParallelLinear, RowParallelLinear)),
    *((SelfAttention, name) for name in ("flash_decode_and_prefill", "_apply_output_gate")),
]


@pytest.mark.parametrize(("base", "name"), EXACT)
def test_layers_of_exact_engines(platform, base, name):
    prefix = HybridPrefixConfig(mamba_gb=0.01, exact="bits")
    preset = "tiny-nemotron-3" if "moe" in base.__module__ else "tiny"
    with pytest.raises(ValueError, match=rf"^exact='bits': [\w.]+: Mine\.{name} would never be called$"):
        build_engine(model_with(preset, base, name, "None"), prefix, **FIELDS)
    build_engine(model_with(preset, base, "extra_repr", "None"), prefix, **FIELDS)


def ENGINE(model: Any, context: type = DynamicInferenceContext, **classes: type) -> Any:
    """As a script builds it, with classes of its own."""
    made = context(model.config, CONFIG(model, enable_chunked_prefill=True, max_tokens=128))
    wrapper = classes.get("wrapper", GPTInferenceWrapper)(model, made)
    wrapper.prep_model_for_inference()
    controller = classes.get("controller", TextGenerationController)(wrapper, TOKENIZER)
    return classes.get("engine", DynamicInferenceEngine)(controller, made)


Wrapper = mine(GPTInferenceWrapper, "run_one_forward_step", f"-{SUPER}")
Controller = mine(TextGenerationController, "_dynamic_step_sample_logits", f"(setattr(self, 'ran', True), {SUPER})[1]")


@pytest.mark.parametrize("classes", [{"wrapper": Wrapper}, {"controller": Controller}], ids=["wrapper", "controller"])
def test_a_scripts_wrapper_and_controller_are_honoured(tiny, classes):
    off = answers(ENGINE(tiny, **classes))
    with installed(PREFIX):
        engine = ENGINE(tiny, **classes)
    found = answers(engine)
    assert_same(found, off)
    assert [answer["cached_tokens"] for answer in found] == [0, 2 * BLOCK]
    assert isinstance(engine.controller, HybridPrefixController)
    assert getattr(engine.controller, "ran", False) == ("controller" in classes)
    assert (found[0]["tokens"] == plain("tiny")[0]["tokens"]) == ("controller" in classes)


def test_a_scripts_controller_engine_and_context_that_would_lose_something(tiny, capsys):
    name = "_dynamic_step_sample_logits"
    controller = mine(TextGenerationController, name, "None")
    plain_engine, context = mine(DynamicInferenceEngine, "", ""), mine(DynamicInferenceContext, "", "")
    with installed(PREFIX):
        with pytest.raises(TypeError, match=rf"^Mine\.{name} does not call super\(\)\.{name}: derive the class"):
            ENGINE(tiny, controller=controller)
        with pytest.raises(TypeError, match=r"^Mine must derive from HybridPrefixEngine"):
            ENGINE(tiny, engine=plain_engine)
        capsys.readouterr()
        engine = ENGINE(tiny, context=context)
    assert type(engine) is DynamicInferenceEngine and type(engine.context) is context
    said = "megatron_hybrid_prefix: no prefix cache: Mine does not derive from HybridPrefixContext\n"
    assert capsys.readouterr().err == said
    assert_same(answers(engine), plain("tiny"))


def test_a_coordinator_of_the_users_own_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(
        dynamic_engine, name := "DataParallelInferenceCoordinator", mine(getattr(dynamic_engine, name), "", "")
    )
    with pytest.raises(TypeError, match=r"^Mine is in the place of megatron's coordinator"):
        asyncio.run(build_engine(tiny, PREFIX, **FIELDS).start_listening_to_data_parallel_coordinator())


def test_a_plugins_layer(platform):
    """What its ``slot_class`` defines is refused, where that names no class; else extended. ``keeps`` are the user's."""

    class Layer(torch.nn.Module):
        helper = 1

        def forward(self, x):
            return x

    class Slots:
        def forward(self, x):
            return 2 * x

    class Kind(LayerKind):
        name, slot_class = "mine", Slots
        is_layer = components = chunk_tokens = invalidate = None

    helps, layer = mine(Layer, "helper", "2")(), mine(Layer, "forward", SCALES)()
    assert Kind().problem_of(Layer()) is None
    assert Kind().problem_of(layer) == "Mine.forward would never be called"
    assert Kind().problem_of(helps) == "Mine.helper would never be called"
    Kind.keeps = frozenset({"helper"})
    assert Kind().problem_of(helps) is None
    Kind.slot_class = type("LayerBySlots", (Slots, Layer), {})
    assert Kind().problem_of(layer) is None and Kind().put_on(layer) and layer(4) == 12
    assert Kind().problem_of(layer) is None and Kind().take_off(layer) and layer(4) == 6
