"""`install`: scripts that only use megatron get this cache, and `uninstall` removes it. On the CPU with `tiny`.

The functions with capital names are users' scripts: they import and call only megatron.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.inference.apis import MegatronLLM
from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig, PrefixCachingEvictionPolicy
from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine, install, installed, uninstall
from megatron_hybrid_prefix.errors import UpstreamDriftError
from megatron_hybrid_prefix.mcore import HybridPrefixContext, HybridPrefixController, HybridPrefixEngine
from megatron_hybrid_prefix.mcore.context.reports import report_none_asked
from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
from megatron_hybrid_prefix.mcore.entrypoints import install as installation
from megatron_hybrid_prefix.mcore.entrypoints.build import build_upstream_engine
from megatron_hybrid_prefix.mcore.ranks.agreement import of_all_stages
from megatron_hybrid_prefix.mcore.state import layout
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer
from megatron_hybrid_prefix.upstream.rebinding import Rebinding
from tests.harness.engine_helpers import random_tokens
from tests.harness.gpt_model import as_gpt_model
from tests.harness.workers.launch import run_prepared

BLOCK = 64
TOKENIZER = ByteTokenizer(512)
PROMPT = random_tokens(4 * BLOCK + 10, seed=3)
PREFIX = HybridPrefixConfig(mamba_gb=0.01)


@pytest.fixture(autouse=True)
def nothing_installed():
    assert not installation._applied.rebindings
    yield
    uninstall()


def CONFIG(model: Any, **fields: Any) -> Any:
    values = {
        "max_sequence_length": 1024,
        "max_requests": 4,
        "max_tokens": 1024,
        "block_size_tokens": BLOCK,
        "buffer_size_gb": 0.05,
        "mamba_inference_state_config": MambaInferenceStateConfig.from_model(model),
    }
    return InferenceConfig(**values | fields)


def PARAMS(count: int = 8) -> Any:
    return SamplingParams(num_tokens_to_generate=count, top_k=1, termination_id=-1)


def ENGINE(model: Any, config: Any) -> Any:
    context = dynamic_context.DynamicInferenceContext(model.config, config)
    wrapper = GPTInferenceWrapper(model, context)
    wrapper.prep_model_for_inference()
    controller = TextGenerationController(inference_wrapped_model=wrapper, tokenizer=TOKENIZER)
    return DynamicInferenceEngine(controller=controller, context=context)


def TOKENS(engine: Any, times: int = 2) -> list[list[int]]:
    found = []
    for number in range(times):
        engine.add_request(number, PROMPT, PARAMS())
        while engine.has_unfinished_requests():
            for record in engine.step_modern()["finished_request_records"]:
                found.append(record.merge().generated_tokens)
    return found


def skipped(engine: Any) -> int:
    """Prompt tokens that were skipped, by megatron's own counter."""
    return 2 * len(PROMPT) - engine.context.lifetime_prefill_token_count


def upstream_classes() -> list[type]:
    return [DynamicInferenceContext, DynamicInferenceEngine, TextGenerationController]


def classes(engine: Any) -> list[type]:
    return [type(engine.context), type(engine), type(engine.controller)]


def our_classes(*, cached: bool = True) -> list[type]:
    return [HybridPrefixContext if cached else SlotContext, HybridPrefixEngine, HybridPrefixController]


def test_a_script_in_megatrons_words_gets_a_hit_and_the_same_tokens(tiny):
    before = ENGINE(tiny, CONFIG(tiny))
    expected = TOKENS(before)
    assert classes(before) == upstream_classes() and skipped(before) == 0
    install(PREFIX)
    engine = ENGINE(tiny, CONFIG(tiny))
    assert classes(engine) == our_classes()
    assert TOKENS(engine) == expected
    assert engine.context.prefix_stats().reused_tokens == skipped(engine) == 4 * BLOCK
    engine.context.check_integrity()


def test_uninstalling_restores_megatron(tiny):
    owners = [(cls, vars(cls)["__init__"]) for cls in upstream_classes()]
    install(PREFIX)
    install(PREFIX)
    listed = installation._applied.rebindings
    assert listed == [*installation.CONSTRUCTORS] and len(listed) == 4
    assert all(isinstance(item, Rebinding) and item.why for item in listed)
    assert all(vars(cls)["__init__"] is not original for cls, original in owners)
    engine = ENGINE(tiny, CONFIG(tiny))
    uninstall()
    uninstall()
    assert all(vars(cls)["__init__"] is original for cls, original in owners)
    plain = ENGINE(tiny, CONFIG(tiny))
    assert classes(plain) == upstream_classes()
    assert TOKENS(engine) == TOKENS(plain)  # what was built in between goes on
    assert skipped(engine) == 4 * BLOCK and skipped(plain) == 0


def test_without_settings_the_scripts_own_count(tiny):
    install()
    assert classes(ENGINE(tiny, CONFIG(tiny))) == upstream_classes()
    engine = ENGINE(tiny, CONFIG(tiny, enable_prefix_caching=True, prefix_caching_mamba_gb=0.01))
    assert classes(engine) == our_classes()
    TOKENS(engine)
    assert skipped(engine) == 4 * BLOCK


@pytest.mark.parametrize("prefix", [None, PREFIX], ids=["for contexts that ask", "for all"])
def test_megatrons_own_engine_can_still_be_had(tiny, prefix):
    """What the commands compare with (``upstream``, and ``off``)."""
    own = {"enable_prefix_caching": True, "prefix_caching_mamba_gb": 0.01, "block_size_tokens": BLOCK}
    with installed(prefix):
        cached, off = build_engine(tiny, **own), build_upstream_engine(tiny)
    assert classes(cached) == classes(off) == upstream_classes()
    assert len(set(map(tuple, TOKENS(cached)))) == 1 and not hasattr(cached.context, "prefix_stats")


def test_a_cache_that_no_context_asks_for_is_one_line(tiny, monkeypatch, capsys):
    """Where the variable is set, as with NeMo-RL's defaults."""
    install()
    for value, expected in (("0", 0), ("1", 1)):
        monkeypatch.setenv("HYBRID_PREFIX_INSTALL", value)
        report_none_asked.cache_clear()
        for _ in range(2):
            assert classes(ENGINE(tiny, CONFIG(tiny))) == upstream_classes()
        said = capsys.readouterr().err
        assert said.count("a context without enable_prefix_caching has no prefix cache") == expected


def test_an_eviction_policy_of_megatrons_is_one_line(tiny, caplog):
    for policy, prefix in product(PrefixCachingEvictionPolicy, (None, HybridPrefixConfig(eviction_policy="lru"))):
        caplog.clear()
        with installed(prefix):
            ENGINE(tiny, CONFIG(tiny, enable_prefix_caching=True, prefix_caching_eviction_policy=policy))
        said = ["prefix_caching_eviction_policy=lru is ignored, eviction_policy is recompute_cost"]
        assert caplog.messages == (said if policy.value == "lru" and prefix is None else [])


def test_settings_arrive(tiny):
    install(HybridPrefixConfig(mamba_gb=0.01, state_dtype="bfloat16", decode_checkpoints=False))
    context = ENGINE(tiny, CONFIG(tiny)).context
    assert context.mamba_ssm_states.dtype == torch.bfloat16
    assert "decode off" in context.policy_report()
    with installed(PREFIX):
        assert "decode on" in ENGINE(tiny, CONFIG(tiny)).context.policy_report()
    assert "decode off" in ENGINE(tiny, CONFIG(tiny)).context.policy_report()


@pytest.mark.parametrize("name", ["tiny_gdn", "tiny_mixed"])
def test_layers_that_megatron_cannot_run(request, name):
    """A script in megatron's words runs them, with a cache and without; before `install`, and after `uninstall`, it cannot."""
    model = request.getfixturevalue(name)

    def refused():
        try:
            TOKENS(ENGINE(model, CONFIG(model)), times=1)
        except Exception:
            return True
        return False

    assert refused()
    install()
    plain = ENGINE(model, CONFIG(model))
    assert classes(plain) == our_classes(cached=False)
    expected = TOKENS(plain)
    with installed(PREFIX):
        engine = ENGINE(model, CONFIG(model))
    assert TOKENS(engine) == expected and skipped(engine) == 4 * BLOCK
    with installed(HybridPrefixConfig(mamba_gb=0.01, state_dtype="bfloat16")):
        tensors = ENGINE(model, CONFIG(model)).context.shared_memory.states
    assert str(tensors["gdn_state"].dtype) == "torch.bfloat16" and str(tensors["gdn_conv"].dtype) == "torch.float32"
    uninstall()
    assert refused()


@pytest.mark.parametrize("name", ["tiny", "tiny_gdn", "tiny_mixed"])
def test_a_config_older_than_the_settings_gets_their_state_dtype(request, name):
    def types(engine):
        return {
            name: str(part.dtype).removeprefix("torch.") for name, part in engine.context.shared_memory.states.items()
        }

    model = request.getfixturevalue(name)
    install()
    config = CONFIG(model)
    prefix = HybridPrefixConfig(mamba_gb=0.01, state_dtype="bfloat16")
    install(prefix)
    states = config.mamba_inference_state_config
    for engine in (ENGINE(model, config), build_engine(model, prefix, mamba_inference_state_config=states)):
        assert {types(engine).get(part, "bfloat16") for part in ("ssm", "gdn_state")} == {"bfloat16"}
        assert {types(engine).get(part, "float32") for part in ("conv", "gdn_conv")} == {"float32"}
        layout = engine.context.state_layout
        assert layout.slot_bytes == sum(part.nbytes for part in engine.context.shared_memory.state(0).values())
    install(PREFIX)
    assert set(types(ENGINE(model, config)).values()) == {"float32"}, "the config itself has not changed"


ASK_AGAIN = "use build_engine, or call install\\(\\) before the InferenceConfig is made"


LACKS = r"the InferenceConfig lacks this package's description of the layers \['G'\]"
MEGATRON_DESCRIBES_IT = hasattr(GatedDeltaNet, "mamba_state_shapes_per_request")
"""Whether megatron has a description of its own of a model with Gated DeltaNet; it then refuses it beside Mamba2."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny_gdn", LACKS if MEGATRON_DESCRIBES_IT else "gated_delta_net, the InferenceConfig describes none"),
        ("tiny_mixed", LACKS),
    ],
)
def test_a_config_made_before_install_is_refused_rather_than_fails_in_a_step(request, name, said):
    model = request.getfixturevalue(name)
    if MEGATRON_DESCRIBES_IT and name == "tiny_mixed":
        with pytest.raises(ValueError, match="does not support mixing Mamba and GDN layers"):
            CONFIG(model)
        return
    config = CONFIG(model)
    states = config.mamba_inference_state_config
    message = f"{said}: {ASK_AGAIN}"
    with installed(), pytest.raises(ValueError, match=message):
        ENGINE(model, config)
    with pytest.raises(ValueError, match=message):
        build_engine(model, mamba_inference_state_config=states)
    with installed(PREFIX), pytest.raises(ValueError, match=message):
        ENGINE(model, config)
    with pytest.raises(ValueError, match=ASK_AGAIN) as error:
        build_engine(model, PREFIX, mamba_inference_state_config=states)
    assert "\n" not in str(error.value)


class OtherMixer(torch.nn.Module):
    """Stands for a layer of megatron's that no kind describes."""

    chunk_size = 128

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (64, 4), (8, 16, 16)


def test_recurrent_layers_of_no_kind_are_named_by_a_cache_and_left_to_megatron_without(platform):
    model = build_hybrid_model("tiny", seed=0, platform=platform)
    for symbol, layer in layout.decoder_layers(model):
        if symbol == "M":
            layer.mixer = OtherMixer()
    message = r"^layer 1 \('M', OtherMixer\) is recurrent, and of none of the layer kinds \[.*'mamba2'.*\]$"
    with installed():
        assert classes(ENGINE(model, CONFIG(model))) == upstream_classes()
    with installed(PREFIX), pytest.raises(ValueError, match=message):
        ENGINE(model, CONFIG(model))
    with pytest.raises(ValueError, match=message):
        build_engine(model, PREFIX)


@pytest.mark.parametrize(
    "config", [{"layer_pattern": "G-*-G-G-*-"}, {"layer_pattern": "GE*EG-*-", "num_moe_experts": 4}]
)
def test_a_gpt_model(platform, config):
    """As Megatron-Bridge builds models with Gated DeltaNet layers: attention, and MLP or experts, in one layer."""
    hybrid = build_hybrid_model(get_preset("tiny-gdn", **config), seed=0, platform=platform)
    model = as_gpt_model(hybrid)
    expected = TOKENS(build_engine(hybrid, block_size_tokens=BLOCK))
    before = CONFIG(model)
    assert before.mamba_inference_state_config is None
    install()
    plain = ENGINE(model, CONFIG(model))
    assert classes(plain) == our_classes(cached=False)
    assert TOKENS(plain) == expected and skipped(plain) == 0
    with pytest.raises(ValueError, match=f"the InferenceConfig describes none: {ASK_AGAIN}"):
        ENGINE(model, before)
    with installed(PREFIX):
        engine = ENGINE(model, CONFIG(model))
        llm = MegatronLLM(model=model, tokenizer=TOKENIZER, inference_config=CONFIG(model), use_coordinator=False)
    assert classes(engine) == classes(llm.engine) == our_classes()
    assert TOKENS(engine) == expected and skipped(engine) == 4 * BLOCK
    assert [llm.generate(PROMPT, PARAMS())[0].generated_tokens for _ in range(2)] == expected
    assert skipped(llm.engine) == 4 * BLOCK


def test_a_gpt_model_without_recurrent_layers_stays_megatrons(tiny_gdn):
    config = copy.copy(tiny_gdn.config)
    config.num_layers = 2
    model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), 512, 512)
    install(PREFIX)
    assert CONFIG(model).mamba_inference_state_config is None
    assert classes(ENGINE(model, CONFIG(model))) == upstream_classes()


def test_from_model_is_megatrons_where_that_is_enough(tiny, tiny_gdn, monkeypatch):
    class Sub(MambaInferenceStateConfig):
        pass

    before = MambaInferenceStateConfig.from_model(tiny)
    install()
    with monkeypatch.context() as patch:
        patch.setattr(layout, "mamba_state_config", lambda *_: pytest.fail("asked for a model that megatron describes"))
        assert MambaInferenceStateConfig.from_model(tiny) == before
        assert type(MambaInferenceStateConfig.from_model(tiny)) is MambaInferenceStateConfig
        assert type(Sub.from_model(tiny)) is Sub
    ours = Sub.from_model(tiny_gdn)
    assert isinstance(ours, Sub) and ours.states == MambaInferenceStateConfig.from_model(tiny_gdn).states is not None
    assert classes(ENGINE(tiny_gdn, CONFIG(tiny_gdn, mamba_inference_state_config=ours))) == our_classes(cached=False)


def test_from_model_needs_no_parallel_state(monkeypatch, platform):
    """For attention alone megatron returns None, whatever runs."""
    model = build_hybrid_model(get_preset("tiny", layer_pattern="*-*-"), platform=platform)
    install()
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", None)
    monkeypatch.setattr(parallel_state, "_PIPELINE_MODEL_PARALLEL_GROUP", None)
    model.pg_collection = None
    assert MambaInferenceStateConfig.from_model(model) is None
    assert of_all_stages(5) == [5]


def test_models_without_recurrent_layers_stay_megatrons(tiny):
    install(PREFIX)
    config = CONFIG(tiny, mamba_inference_state_config=None)
    assert type(DynamicInferenceContext(tiny.config, config)) is DynamicInferenceContext


@pytest.mark.parametrize("number", range(3))
def test_a_constructor_that_changed_is_an_error_that_names_it(monkeypatch, number):
    cls = upstream_classes()[number]
    monkeypatch.setattr(cls, "__init__", lambda self, something_else: None)
    originals = [vars(cls)["__init__"] for cls in upstream_classes()]
    with pytest.raises(UpstreamDriftError, match=f"{cls.__name__}.__init__.*something_else"):
        install(PREFIX)
    assert [vars(cls)["__init__"] for cls in upstream_classes()] == originals
    assert not installation._applied.rebindings


def test_megatron_llm(tiny):
    expected = TOKENS(ENGINE(tiny, CONFIG(tiny)))
    with installed(PREFIX):
        llm = MegatronLLM(model=tiny, tokenizer=TOKENIZER, inference_config=CONFIG(tiny), use_coordinator=False)
    assert classes(llm.engine) == our_classes()
    answers = [llm.generate(PROMPT, PARAMS())[0] for _ in range(2)]
    assert [answer.generated_tokens for answer in answers] == expected
    assert [answer.num_cached_tokens for answer in answers] == [0, 4 * BLOCK]
    assert skipped(llm.engine) == 4 * BLOCK
    many = llm.generate([PROMPT[: 2 * BLOCK] + random_tokens(9, seed=s) for s in (1, 2, 3)], PARAMS(2))
    assert len(many) == 3 and all(answer.num_cached_tokens == 2 * BLOCK for answer in many[1:])
    llm.shutdown()


# It starts processes that import it again: so the main guard.
SCRIPT = """
from megatron_hybrid_prefix.platform import ensure_platform
ensure_platform(device="cpu")
from megatron_hybrid_prefix.models import build_hybrid_model
model = build_hybrid_model("tiny", seed=0)
import asyncio
from megatron.core.inference.apis import MegatronAsyncLLM, MegatronLLM  # before install: the classes are bound by now
from tests.engine.test_install import CONFIG, PARAMS, PREFIX, PROMPT, TOKENIZER
import megatron_hybrid_prefix
{line}
fields = dict(model=model, tokenizer=TOKENIZER, inference_config=CONFIG(model), use_coordinator={coordinator})

def show(answer):
    print("ANSWER", answer.num_cached_tokens, *answer.generated_tokens, flush=True)

def ask():
    with MegatronLLM(**fields) as llm:
        for _ in range(2):
            show(llm.generate(PROMPT, PARAMS())[0])

async def ask_async():
    async with MegatronAsyncLLM(**fields) as llm:
        for _ in range(2):
            show(await llm.generate(PROMPT, PARAMS()))

if __name__ == "__main__":
    {call}
"""
INSTALL = "megatron_hybrid_prefix.install(PREFIX)"
SCRIPTS = {
    "without": {"line": "", "coordinator": False, "call": "ask()"},
    "with": {"line": INSTALL, "coordinator": False, "call": "ask()"},
    "coordinator": {"line": INSTALL, "coordinator": True, "call": "ask()"},
    "async": {"line": INSTALL, "coordinator": True, "call": "asyncio.run(ask_async())"},
}


@pytest.mark.slow
@pytest.mark.multi
def test_one_line_in_a_script_also_behind_megatrons_coordinator(tmp_path):
    found = {}
    for name, parts in SCRIPTS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(SCRIPT.format(**parts))
        (result,) = run_prepared(path)
        assert result.returncode == 0, result.stderr[-3000:]
        lines = [text.split() for text in result.stdout.splitlines() if text.startswith("ANSWER")]
        found[name] = [(int(cached), tokens) for _, cached, *tokens in lines]
    tokens = found["without"][0][1]
    assert len(tokens) == 8
    assert found["without"] == [(0, tokens), (0, tokens)]
    assert found["with"] == found["coordinator"] == found["async"] == [(0, tokens), (4 * BLOCK, tokens)]
