"""`hybrid-prefix plan`: bytes of a model, and what a budget holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.cli import plan as command
from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.lab.budget import Usage, plan_budget
from megatron_hybrid_prefix.lab.capacity import sizes_of, sizes_of_config
from megatron_hybrid_prefix.models import PRESETS, build_hybrid_model
from megatron_hybrid_prefix.pool.pages import own_bytes

# Nemotron-H-8B under the names of two makers.
HUGGING_FACE = Path(__file__).parents[1] / "models" / "hf_configs" / "nemotron_h_old.json"
MEGATRON = {
    "hybrid-layer-pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-/*-/*-",
    "hidden-size": 4096, "num-attention-heads": 32, "group-query-attention": True, "num-query-groups": 8,
    "kv-channels": 128, "mamba-num-heads": 128, "mamba-head-dim": 64, "mamba-state-dim": 128, "mamba-num-groups": 8,
    "bf16": True,
}  # fmt: skip
STATE_BYTES = 24 * 2 * (128 * 64 * 128 + 4 * 10240)
TOKEN_BYTES = 2 * 4 * 8 * 128 * 2
ENTRY_BYTES = (128 * 64 + 8 * 128) * 2 + 2 * 128 * 4  # in a layer's ring: x and B; the step and the decay of each head
RING_BYTES, DRAFTING_RING_BYTES = (  # states are written every 16 tokens, for one token a step and for four
    24 * ((16 + 2 * step - 1) * ENTRY_BYTES + (3 + step) * 10240 * 2) for step in (1, 4)
)


def run(*arguments: Any) -> int:
    return command.main([str(argument) for argument in arguments])


def saved(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_one_model_under_three_names_is_one_model(tmp_path):
    yaml_text = "\n".join(f"{name}: {json.dumps(value)}" for name, value in MEGATRON.items())
    folder = tmp_path / "hub"
    folder.mkdir()
    # The file names float32 states, the preset none.
    config = json.loads(HUGGING_FACE.read_text()) | {"mamba_ssm_cache_dtype": None}
    saved(folder / "config.json", config)
    models = [
        "nemotron-h-8b",
        saved(tmp_path / "a.yaml", yaml_text),
        saved(tmp_path / "a.json", MEGATRON),
        saved(tmp_path / "flags.json", {f"--{name}": value for name, value in MEGATRON.items()}),
        folder,
        folder / "config.json",
    ]
    for model in models:
        sizes = sizes_of(str(model))
        assert (sizes.state_bytes, sizes.kv_token_bytes) == (STATE_BYTES, TOKEN_BYTES), model


def test_ranks_and_types():
    whole = sizes_of("nemotron-h-8b")
    assert 4 * sizes_of("nemotron-h-8b", tp=4).state_bytes == whole.state_bytes
    assert 4 * sizes_of("nemotron-h-8b", tp=4).kv_token_bytes == whole.kv_token_bytes
    wide = sizes_of("nemotron-h-8b", state_dtype="float32")
    assert wide.state_bytes - whole.state_bytes == 24 * 2 * 128 * 64 * 128, "windows stay as they are"
    of_rank = sizes_of("nemotron-h-8b", tp=4).rings(256, 0)
    assert of_rank.tokens == 16 and 4 * of_rank.bytes(1) == RING_BYTES
    assert whole.kv_block_bytes(256) == 256 * TOKEN_BYTES
    of_token = 128 * 64 + 8 * 128 + 128  # x, B and dt, beside the inputs of the convolution
    assert sizes_of("hybrid-4b").open_ring_bytes == 13 * 2 * (128 * of_token + 4 * (128 * 64 + 2 * 8 * 128))


def test_gated_delta_net(tmp_path, capsys):
    """Dimensions of Qwen3-Next-80B-A3B, under the names of megatron and as a preset; test_hf_dimensions.py has its file."""
    megatrons = {
        "hybrid-layer-pattern": "GEGEGE*E" * 12, "hidden-size": 2048, "num-attention-heads": 16,
        "group-query-attention": True, "num-query-groups": 2, "kv-channels": 256, "bf16": True,
    }  # fmt: skip
    per_layer = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2  # float32 matrices, bfloat16 windows
    for model in (str(saved(tmp_path / "a.json", megatrons)), "qwen3-next-80b-a3b"):
        sizes = sizes_of(model)
        assert (sizes.state_bytes, sizes.kv_token_bytes) == (36 * per_layer, 2 * 12 * 2 * 256 * 2)
    narrow = sizes_of(str(tmp_path / "a.json"), tp=2, state_dtype="bfloat16")
    assert 2 * narrow.state_bytes == 36 * (per_layer - 32 * 128 * 128 * 2)
    assert run("tiny-gdn", "--cache-gb", 1, "--block-size-tokens", 96) == 2
    assert capsys.readouterr().err == "error: KV blocks of 96 tokens: Gated DeltaNet layers need a multiple of 64\n"


def test_gated_delta_product(tmp_path, capsys):
    """The spec says that M layers are: the number of pairs is in every file of megatron's main."""
    module = "megatron.core.models.hybrid.hybrid_layer_specs"
    assert sizes_of(str(saved(tmp_path / "a.json", MEGATRON | {"gdp_num_householder": 3}))).state_bytes == STATE_BYTES
    given = {"spec": [module, "gdp_stack_spec"]}, {"spec": f"{module} gdp_stack_spec", "gdp-num-householder": 2}
    for pairs, more in zip((3, 2), given, strict=True):
        sizes, inner, keys = sizes_of(str(saved(tmp_path / "b.json", MEGATRON | more))), 128 * 64, 8 * 128
        windows = (pairs * (inner + keys) + keys) * 4 * 2
        assert sizes.state_bytes == 24 * (inner * 128 * 4 + windows) and sizes.open_ring_bytes is None
    assert run(tmp_path / "b.json", "--cache-gb", 40, "--block-size-tokens", 96) == 0
    assert run(tmp_path / "b.json", "--cache-gb", 40, "--block-size-tokens", 80) == 2
    said = "error: KV blocks of 80 tokens: Gated Delta Product layers need a multiple of 32\n"
    assert "exact=" not in (printed := capsys.readouterr()).out and printed.err == said


def test_granite(capsys):
    """Dimensions of Granite-4.0-H-Small, whose Mamba heads are one group."""
    sizes = sizes_of("granite-4.0-h-small")
    matrices, windows = 128 * 64 * 128 * 2, (128 * 64 + 2 * 128) * 4 * 2  # of a layer, all in bfloat16
    assert (sizes.state_bytes, sizes.kv_token_bytes) == (36 * (matrices + windows), 2 * 4 * 8 * 128 * 2)
    assert run("granite-4.0-h-small", "--cache-gb", 1, "--tp", 2) == 2
    assert capsys.readouterr().err == "error: granite-4.0-h-small: tp=2 does not divide mamba_num_groups=1\n"


@pytest.mark.parametrize(
    ("preset", "drafts"),
    [
        *(("tiny", 0), ("tiny-mtp", 0), ("tiny-mtp", 3), ("tiny-gdn", 0), ("tiny-gdn-mtp", 3), ("tiny-qwen3-next", 0)),
        *(("tiny-nemotron-3", 0), ("tiny-nemotron-3", 3), ("tiny-granite", 0), ("tiny-qwen3-5", 0)),
        *(("tiny-gdp", 0), ("tiny-gdp-mtp", 3)),
    ],
)
def test_bytes_are_those_that_megatron_allocates(request, monkeypatch, preset, drafts):
    from megatron_hybrid_prefix.mcore.entrypoints.build import build_engine
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config

    model = request.getfixturevalue(preset.replace("-", "_"))
    monkeypatch.setitem(PRESETS, preset, model.hybrid_config)  # not all of them are presets
    sizes = sizes_of(preset)
    assert sizes.state_bytes == mamba_state_config(model).states.slots.slot_bytes
    engine = build_engine(
        model,
        max_requests=4,
        max_tokens=256,
        buffer_size_gb=0.02,
        max_sequence_length=256,
        num_speculative_tokens=drafts,
    )
    context = engine.context
    assert context.block_size_bytes == sizes.kv_block_bytes(context.block_size_tokens)
    rings = sizes.rings(context.block_size_tokens, drafts)
    assert context.rings.tokens == rings.tokens
    assert context.states.memory.buffer.numel() == own_bytes(sizes.state_bytes, rings, own_slots=4, requests=4)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["nemotron-h-8b", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"])
def test_bytes_of_real_dimensions_are_those_that_megatron_allocates(platform, preset):
    """Of a layer of each kind; in bfloat16, with states in the dtype that the model says."""
    from megatron_hybrid_prefix.mcore.entrypoints.build import build_engine
    from megatron_hybrid_prefix.models import build_hybrid_model

    whole, drafts = PRESETS[preset], {"mtp_num_layers": 0, "mtp_layer_pattern": "", "mtp_use_repeated_layer": False}
    config = replace(whole, layer_pattern="M*", vocab_size=512, **drafts)
    model = build_hybrid_model(config, platform=platform)
    fields = {"max_requests": 4, "max_tokens": 256, "buffer_size_gb": 0.1, "max_sequence_length": 256}
    context, sizes = build_engine(model, **fields).context, sizes_of(preset)
    own = own_bytes(sizes.state_bytes, sizes.rings(context.block_size_tokens, 0), own_slots=4, requests=4)
    assert context.states.memory.buffer.numel() * whole.count("M") == own
    assert context.block_size_bytes * whole.count("*") == sizes.kv_block_bytes(context.block_size_tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid-layer-pattern": None}, "hybrid_layer_pattern is missing"),
        ({"hybrid-layer-pattern": "M-M-"}, "layer_pattern='M-M-' has no attention layer"),
        ({"hidden-size": None}, "hidden_size is missing"),
        ({"hidden-size": "4096"}, "hidden_size is '4096', not a whole number"),
        ({"mamba-state-dim": True}, "mamba_state_dim is True, not a whole number"),
    ],
)
def test_what_a_file_lacks_is_named(tmp_path, changes, message):
    data = {name: value for name, value in (MEGATRON | changes).items() if value is not None}
    path = saved(tmp_path / "config.json", data)
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        sizes_of(str(path))


def test_files_that_are_no_configuration(tmp_path):
    for name, text, message in (
        ("a.json", "{", "not JSON"),
        ("a.yaml", "a: [", "neither JSON nor YAML"),
        ("b.yaml", "- 1", "expected a mapping of names to values"),
        ("c.yaml", "hidden_size: 5", "hybrid_layer_pattern is missing"),
    ):
        with pytest.raises(InputError, match=message):
            sizes_of(str(saved(tmp_path / name, text)))
    with pytest.raises(InputError, match="neither a file nor a preset"):
        sizes_of("nothing")
    with pytest.raises(InputError, match="tp=3 does not divide"):
        sizes_of("tiny", tp=3)


def test_more_ranks_than_key_value_heads_hold_the_same_heads():
    config = replace(PRESETS["nemotron-h-8b"], num_query_groups=2)
    at_tp = {tp: sizes_of_config("m", config, tp=tp).kv_token_bytes for tp in (1, 2, 4, 8)}
    assert [at_tp[1] // size for size in at_tp.values()] == [1, 2, 2, 2]


# -- plans -------------------------------------------------------------------------------------------------------------


def plan(tmp_path: Path, *arguments: Any, model: str = "nemotron-h-8b") -> dict[str, Any]:
    assert run(model, *arguments, "--json", tmp_path / "plan.json") == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    return report | report["plan"] | report["plan"]["layout"]


def test_what_a_budget_holds(tmp_path, capsys):
    block = 256 * TOKEN_BYTES
    data = plan(tmp_path, "--cache-gb", 40, "--max-requests", 8)
    own = STATE_BYTES + 8 * RING_BYTES  # one slot is the engine's
    kv_blocks = (40 * 2**30 - own) // block - 1  # one block is megatron's dummy
    assert (data["total_blocks"], data["page_blocks"], data["cached_states"]) == (kv_blocks, 13, kv_blocks // 13)
    assert (data["checkpoint_bytes"], data["block_bytes"]) == (STATE_BYTES, block)
    assert data["next_logits_bytes"] == 2 * 131_072
    assert data["conversations"] == (kv_blocks - 8 * 13) // (32 + 13)
    assert data["kv_token_bytes"] == TOKEN_BYTES and data["host_states"] == data["host_conversations"] == 0
    assert data["ring_bytes"] == RING_BYTES and data["live_request_bytes"] == STATE_BYTES + RING_BYTES
    said = capsys.readouterr().out
    assert "log-probs of prompts" in said and f"{RING_BYTES:,} bytes, set aside for 8" in said

    drafting = plan(tmp_path, "--cache-gb", 40, "--max-requests", 8, "--num-speculative-tokens", 3)
    assert drafting["ring_bytes"] == DRAFTING_RING_BYTES
    assert drafting["total_blocks"] == (40 * 2**30 - STATE_BYTES - 8 * DRAFTING_RING_BYTES) // block - 1


def test_routes_of_experts_are_in_blocks(platform, tmp_path):
    """As many bytes as the engine's blocks have; above 256 experts two for each."""
    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine

    model = build_hybrid_model("tiny-moe", moe_enable_routing_replay=True)
    engine = build_engine(model, HybridPrefixConfig(cache_gb=0.02), max_requests=4, max_tokens=256)
    routes = "--enable-return-routed-experts"
    assert (
        plan(tmp_path, "--cache-gb", 0.02, routes, model="tiny-moe")["block_bytes"] == engine.context.layout.block_bytes
    )
    many = [plan(tmp_path, "--cache-gb", 40, *more, model="nemotron-3-super-120b-a12b") for more in ((), (routes,))]
    assert many[1]["kv_token_bytes"] - many[0]["kv_token_bytes"] == 40 * 22 * 2


def test_a_limit_of_the_checkpoints(tmp_path):
    """It bounds the states and what needs them, and leaves the KV as it is."""
    free, limited = (plan(tmp_path, "--cache-gb", 40, *more) for more in ((), ("--mamba-gb", 2)))
    assert limited["cached_states"] == limited["conversations"] == 2 * 2**30 // STATE_BYTES < free["conversations"]
    assert limited["total_blocks"] == free["total_blocks"]
    assert plan(tmp_path, "--cache-gb", 40, "--mamba-gb", 40)["conversations"] == free["conversations"]


def test_what_runs_has_a_state_more(tmp_path):
    """Also if all that is kept runs."""
    every, few = (plan(tmp_path, "--cache-gb", 2, "--max-requests", requests) for requests in (64, 1))
    assert every["conversations"] == every["total_blocks"] // (32 + 2 * 13)
    assert few["conversations"] == (few["total_blocks"] - 13) // (32 + 13) > every["conversations"]


def test_what_a_budget_holds_of_qwen3_next(tmp_path, capsys):
    """A state takes 74.25 MiB: as much as KV of 3,168 tokens."""
    found = plan(tmp_path, "--cache-gb", 30, model="qwen3-next-80b-a3b")
    assert found["checkpoint_bytes"] == 36 * (2**21 + 2**16) == int(74.25 * 2**20)
    assert found["block_bytes"] - found["block_padding_bytes"] == 256 * 2 * 12 * 2 * 256 * 2
    assert "3,168 tokens" in capsys.readouterr().out


def test_checkpoints_in_int8(tmp_path, capsys):
    """A page has a live state or two checkpoints. In bfloat16 they are as live states of this model."""
    kept = 24 * (128 * 64 * 128 + 2 * (128 * 64 + 128 * 128 + 4 * 10240))  # integers; scales, and the window
    given = "--cache-gb", 40, "--max-requests", 8, "--host-gb", 5, "--checkpoint-dtype"
    data = plan(tmp_path, *given, "int8")
    blocks, of_page = data["total_blocks"], (data["page_blocks"], data["page_live"], data["page_states"])
    assert (data["checkpoint_bytes"], data["live_request_bytes"]) == (kept, STATE_BYTES + RING_BYTES)
    assert of_page == (14, 1, 2) and "a live state or 2 checkpoints take 14 KV blocks" in capsys.readouterr().out
    assert blocks == (40 * 2**30 - STATE_BYTES - 8 * RING_BYTES) // (256 * TOKEN_BYTES) - 1
    assert data["cached_states"] == blocks // 14 * 2 and data["conversations"] == int((blocks - 8 * 14) / (32 + 14 / 2))
    assert data["host_states"] == 5 * 2**30 // kept
    assert data["host_conversations"] == 5 * 2**30 // (kept + 32 * 256 * TOKEN_BYTES)
    assert plan(tmp_path, *given, "int8", "--mamba-gb", 2)["cached_states"] == 2 * 2**30 // kept
    same, as_live = plan(tmp_path, *given, "bfloat16"), plan(tmp_path, *given[:-1])
    assert same | {"command": ""} == as_live | {"command": ""} and same["page_live"] == 0


@pytest.mark.parametrize(("drafts", "kept"), [(0, None), (2, None), (0, "int8")])
def test_the_budget_is_that_of_the_engine(tiny, tiny_mtp, drafts, kept):
    from megatron_hybrid_prefix import HybridPrefixConfig
    from megatron_hybrid_prefix.mcore.entrypoints.build import build_engine

    common = {"max_requests": 4, "block_size_tokens": 64}
    fields = common | {"max_tokens": 256, "max_sequence_length": 256, "num_speculative_tokens": drafts}
    engine = build_engine(
        tiny_mtp if drafts else tiny, HybridPrefixConfig(cache_gb=0.01, checkpoint_dtype=kept), **fields
    )
    usage = Usage(block_tokens=64, conversation_tokens=256, max_requests=4, drafts=drafts)
    cache_bytes = int(0.01 * 2**30)
    sizes = replace(sizes_of("tiny-mtp" if drafts else "tiny"), checkpoint_dtype=kept)
    planned = plan_budget(sizes, usage, cache_bytes=cache_bytes)
    assert planned.layout == engine.context.layout
    memory = engine.context.shared_memory
    assert sum(ring.nbytes for ring in memory.rings.values()) == 4 * planned.ring_bytes
    assert 0 <= cache_bytes - len(memory.buffer) < planned.layout.block_bytes


def test_a_host_tier(tmp_path, capsys):
    """States and blocks on the host have no padding."""
    data = plan(tmp_path, "--cache-gb", 3, "--host-gb", 5)
    assert data["host_states"] == 5 * 2**30 // STATE_BYTES
    assert data["host_conversations"] == 5 * 2**30 // (STATE_BYTES + 32 * 256 * TOKEN_BYTES)
    assert "on the host" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mamba-gb", "1"], "give --cache-gb or --gpu-gb, and only one of them"),
        (["--cache-gb", "x"], "argument --cache-gb: 'x' is not a number above 0"),
        (["--cache-gb", "9", "--trace", "t"], "unrecognized arguments: --trace t"),
        (["--cache-gb", "9", "--json", "/nowhere/t"], "cannot write /nowhere/t"),
        (["--cache-gb", "3", "--mamba-gb", "4"], "--mamba-gb 4: the most for checkpoints in --cache-gb 3, so"),
        (["--cache-gb", "3", "--buffer-gb", "2"], "unrecognized arguments: --buffer-gb 2"),
        (["--cache-gb", "3", "--gpu-gb", "2"], "give --cache-gb or --gpu-gb, and only one of them"),
        (["--cache-gb", "0.01"], "--cache-gb 0.01: a state, a KV block, and the rings of 64 requests need 0.697"),
        (["--cache-gb", "1e300"], "--cache-gb 1e+300: more than any machine has"),
        (["--cache-gb", "9", "--host-gb", "0.01"], "--host-gb 0.01: a state and a KV block take 0.0526 GiB"),
        (["--cache-gb", "9", "--enable-return-routed-experts"], "--enable-return-routed-experts: needs --hf"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert run("nemotron-h-8b", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") and said.count("\n") == 1
