"""The cache as flags of ``megatron.training``, and `examples/megatron_checkpoint.py`. Megatron's own parser is used."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest

from megatron_hybrid_prefix import HybridPrefixConfig, add_hybrid_prefix_args, hybrid_prefix_config_from_args, installed
from megatron_hybrid_prefix.mcore import build_engine_from_args
from megatron_hybrid_prefix.mcore.entrypoints import arguments
from megatron_hybrid_prefix.mcore.entrypoints.arguments import naming_flags
from tests.harness.engine_helpers import LOG_PROB_NOISE, random_tokens
from tests.harness.limits import HANG_S
from tests.harness.workers.launch import WORKERS, environments_of, run_prepared

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "examples" / "megatron_checkpoint.py"
SWITCH, BUDGET = arguments.SWITCH, arguments.BUDGET
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def own_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)


@pytest.fixture(scope="module")
def megatron_parser(platform):
    from megatron.training.arguments import add_megatron_arguments

    return add_hybrid_prefix_args(add_megatron_arguments(own_parser()))


@pytest.fixture(params=["megatron's parser", "a parser of one's own"])
def config_of(request, megatron_parser):
    """The settings of a command line."""
    parser = megatron_parser if request.param == "megatron's parser" else add_hybrid_prefix_args(own_parser())
    return lambda *argv: hybrid_prefix_config_from_args(parser.parse_args(argv))


def test_off_unless_asked_for(config_of):
    assert config_of() is None
    assert config_of(f"--no-{SWITCH[2:]}") is None


def test_one_flag_is_enough(config_of):
    assert config_of(SWITCH) == HybridPrefixConfig()


def test_the_budget_is_megatrons_flag(config_of):
    assert config_of(SWITCH, BUDGET, "3.5") == HybridPrefixConfig(mamba_gb=3.5)


# A value of each field that is not its default, as a flag.
VALUES: dict[str, tuple[list[str], Any]] = {
    "eviction_policy": (["lru"], "lru"),
    "verify_hits": (["0.25"], 0.25),
    "state_dtype": (["float32"], "float32"),
    "exact": (["bits"], "bits"),
    "checkpoint_dtype": (["int8"], "int8"),
    "retention_interval_tokens": (["512"], 512),
    "shared": (["auto"], None),  # needs host memory: test_shared_tier.py
}


def flag_and_value(field: dataclasses.Field[Any]) -> tuple[list[str], Any]:
    """Flag and value for any field: from the table, or from its type, so that new fields are tested, too."""
    flag = arguments.flag_of(field.name)
    kind = get_type_hints(HybridPrefixConfig)[field.name]
    if kind is bool:
        return ([f"--no-{flag[2:]}"], False) if field.default is True else ([flag], True)
    if field.name in VALUES:
        words, value = VALUES[field.name]
    elif getattr(kind, "__origin__", None) is Literal:
        value = next((choice for choice in kind.__args__ if choice != field.default), field.default)
        words = [value]
    else:
        value = {int: 1, float: 0.5, str: "x"}.get(kind, 1)
        words = [str(value)]
    return [flag, *words], value


def test_one_budget_and_a_cap(config_of):
    flag = arguments.flag_of("cache_gb")
    assert config_of(SWITCH, flag, "12.5") == HybridPrefixConfig(cache_gb=12.5)
    assert config_of(SWITCH, flag, "12.5", BUDGET, "1") == HybridPrefixConfig(cache_gb=12.5, mamba_gb=1)
    with pytest.raises(ValueError, match=f"^{BUDGET}=1.0 is a cap within cache_gb=0.5, and larger: [^\n]*$"):
        config_of(SWITCH, flag, "0.5", BUDGET, "1")
    for too_little in ("-1.0", "0.0"):
        with pytest.raises(ValueError, match=f"^{flag}={too_little}: must be above 0$"):
            config_of(SWITCH, flag, too_little)


OTHERS = [field for field in arguments.own_fields() if field.name != "cache_gb"]


@pytest.mark.parametrize("field", OTHERS, ids=lambda field: field.name)
def test_every_other_field_has_a_flag_with_help(config_of, megatron_parser, field):
    argv, value = flag_and_value(field)
    config = config_of(SWITCH, BUDGET, "1", *argv)
    assert config is not None and getattr(config, field.name) == value
    assert dataclasses.replace(config, **{field.name: field.default}) == HybridPrefixConfig(mamba_gb=1)
    action = megatron_parser._option_string_actions[arguments.flag_of(field.name)]
    assert len(action.help) > 40 and "default:" in action.help


# What our errors name, and the flag of megatron.training that sets it.
FLAGS = {
    "batch_invariant_mode": "--batch-invariant-mode",
    "block_size_tokens": "--inference-dynamic-batching-block-size",
    "buffer_size_gb": "--inference-dynamic-batching-buffer-size-gb",
    "inference_cuda_graph_scope": "--inference-cuda-graph-scope",
    "kv_cache_management_mode": "--rl-kv-cache-management-mode",
    "mamba_gb": BUDGET,
    "max_requests": "--inference-dynamic-batching-max-requests",
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor",
    "num_speculative_tokens": "--num-speculative-tokens",
    "static_kv_memory_pointers": "--rl-persist-cuda-graphs",
    "unified_memory_level": "--inference-dynamic-batching-unified-memory-level",
}


@pytest.fixture
def parsed(megatron_parser, monkeypatch):
    """megatron.training has parsed a command line, as in a script of Megatron-LM."""
    from megatron.training import global_vars

    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", megatron_parser.parse_args([]))


@pytest.mark.parametrize("field", FLAGS)
def test_an_error_names_the_flag_of_a_script(megatron_parser, parsed, field):
    assert FLAGS[field] in megatron_parser._option_string_actions
    with pytest.raises(ValueError) as caught, naming_flags():
        raise ValueError(f"{field}=7: no, use a=b")
    assert str(caught.value) == f"{FLAGS[field]}=7: no, use a=b"


@pytest.mark.parametrize("said", ["cache_gb=7: no", "layer 3 is odd", "prefix=... and enable_x=True"])
def test_other_errors_stay(parsed, said):
    with pytest.raises(ValueError) as caught, naming_flags():
        raise ValueError(said)
    assert str(caught.value) == said


def test_a_script_whose_context_cannot_be(tiny_gdn, parsed, monkeypatch):
    from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.training import global_vars

    def message() -> str:
        with installed(HybridPrefixConfig(cache_gb=0.01)), pytest.raises(ValueError) as caught:
            states = MambaInferenceStateConfig.from_model(tiny_gdn)
            config = InferenceConfig(max_sequence_length=512, block_size_tokens=96, mamba_inference_state_config=states)
            DynamicInferenceContext(tiny_gdn.config, config)
        return str(caught.value)

    why = "=96: layers of kind gated_delta_net need a multiple of 64"
    assert message() == FLAGS["block_size_tokens"] + why
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)  # a script that parses no such flags
    assert message() == "block_size_tokens" + why


def test_help_can_be_printed():
    """On a plain parser, because megatron 0.19's parser cannot print its help (it has an unescaped %)."""
    text = " ".join(add_hybrid_prefix_args(own_parser()).format_help().split())
    for field in arguments.own_fields():
        assert arguments.flag_of(field.name) in text
    assert "0 to 1, to compute without the cache and compare" in text


def test_auto_stands_for_none(config_of):
    flags = ["--hybrid-prefix-state-dtype", "auto", "--hybrid-prefix-retention-interval-tokens", "auto"]
    assert config_of(SWITCH, BUDGET, "1", *flags) == HybridPrefixConfig(mamba_gb=1)


def test_adding_them_twice_does_nothing(megatron_parser):
    before = len(megatron_parser._actions)
    assert add_hybrid_prefix_args(megatron_parser) is megatron_parser
    assert len(megatron_parser._actions) == before
    parser = add_hybrid_prefix_args(add_hybrid_prefix_args(own_parser()))
    assert parser.format_help().count("--hybrid-prefix-verify-hits X") == 2  # in the usage, and with its help


CONTRADICTIONS = {
    "a setting without the switch": (
        ["--hybrid-prefix-verify-hits", "0.5"],
        f"verify-hits has no effect without {SWITCH}",
    ),
    "a switch-off without the switch": (["--no-hybrid-prefix-decode-checkpoints"], f"no effect without {SWITCH}"),
    "a budget without the switch": ([BUDGET, "1"], f"{BUDGET} has no effect without {SWITCH}"),
    "the static engine": ([SWITCH, "--use-legacy-static-engine"], "leave out --use-legacy-static-engine"),
    "an interval across blocks": (
        [SWITCH, "--hybrid-prefix-retention-interval-tokens", "300"],
        "--hybrid-prefix-retention-interval-tokens 300 is not a multiple of --inference-dynamic-batching-block-size 256",
    ),
    "two types of states": (
        [SWITCH, "--hybrid-prefix-state-dtype", "bfloat16", "--mamba-inference-ssm-states-dtype", "fp32"],
        "--hybrid-prefix-state-dtype bfloat16 contradicts --mamba-inference-ssm-states-dtype float32",
    ),
    "a share above 1": ([SWITCH, "--hybrid-prefix-verify-hits", "5"], "--hybrid-prefix-verify-hits=5.0: must be"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_one_line_that_names_the_flag(megatron_parser, name):
    argv, problem = CONTRADICTIONS[name]
    with pytest.raises(ValueError) as caught:
        hybrid_prefix_config_from_args(megatron_parser.parse_args(argv))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_megatrons_eviction_policy_and_another_one(megatron_parser):
    args = megatron_parser.parse_args([SWITCH, "--inference-dynamic-batching-prefix-caching-eviction-policy", "lru"])
    assert hybrid_prefix_config_from_args(args) is not None
    args.hybrid_prefix_eviction_policy = "other"
    with pytest.raises(ValueError, match=r"eviction-policy other contradicts .*eviction-policy lru"):
        hybrid_prefix_config_from_args(args)


def test_values_that_argparse_refuses(megatron_parser):
    for argv in (["--hybrid-prefix-state-dtype", "int8"], ["--hybrid-prefix-retention-interval-tokens", "often"]):
        with pytest.raises(argparse.ArgumentError):
            megatron_parser.parse_args([SWITCH, *argv])


def test_fields_of_the_future_get_flags(monkeypatch):
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Future(HybridPrefixConfig):
        """Settings."""

        host_gb: float = dataclasses.field(default=0.0, metadata={"help": "Memory on the host, 100 % of it pinned."})
        tier: Literal["ram", "disk"] = "ram"
        limit: int | None = None

    monkeypatch.setattr(arguments, "HybridPrefixConfig", Future)
    parser = add_hybrid_prefix_args(own_parser())
    argv = [SWITCH, "--hybrid-prefix-host-gb", "4", "--hybrid-prefix-tier", "disk", "--hybrid-prefix-limit", "9"]
    config = hybrid_prefix_config_from_args(parser.parse_args(argv))
    assert (config.host_gb, config.tier, config.limit) == (4.0, "disk", 9)
    assert "Memory on the host, 100 % of it pinned" in " ".join(parser.format_help().split())


# --- An engine, and the command --------------------------------------------------------------------------------------

MODEL = shlex.split(
    "--hidden-size 64 --num-attention-heads 4 --hybrid-layer-pattern M*-M*- --seq-length 1024 --max-position-embeddings 1024 "
    "--mamba-num-heads 8 --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 4 --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)
# With Gated DeltaNet layers. Their dimensions megatron does not take from a checkpoint.
DELTA_NET = shlex.split(
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 16"
)
GDN_MODEL = [*(word.replace("M*-M*-", "G*-MG*-") for word in MODEL), "--swiglu", *DELTA_NET]
INFERENCE = shlex.split(
    "--tokenizer-type NullTokenizer --vocab-size 511 --inference-max-seq-length 1024 "
    "--inference-dynamic-batching-buffer-size-gb 0.05 --inference-dynamic-batching-block-size 64 "
    "--inference-dynamic-batching-max-requests 4 --inference-dynamic-batching-max-tokens 1024 "
    "--mamba-inference-ssm-states-dtype fp32 --mamba-inference-conv-states-dtype fp32 --num-tokens-to-generate 6"
)
SHARED = random_tokens(200, seed=1, vocabulary=511)
PROMPTS = [" ".join(map(str, SHARED + own)) for own in ([], [7, 8])]


def prompt_arguments() -> list[str]:
    return [word for prompt in PROMPTS for word in ("--prompt-tokens", prompt)]


def test_an_engine_from_arguments(tiny, megatron_parser):
    import torch

    args = megatron_parser.parse_args(
        [SWITCH, "--enable-chunked-prefill", *INFERENCE[4:-2], "--hybrid-prefix-state-dtype", "bfloat16"]
    )
    args.mamba_inference_conv_states_dtype = torch.float32  # as validation does
    args.mamba_inference_ssm_states_dtype = torch.bfloat16
    args.return_log_probs = args.skip_prompt_log_probs = False
    engine = build_engine_from_args(tiny, args)
    assert engine.context.prefix_cache is not None
    assert engine.context.block_size_tokens == 64 and engine.context.max_requests == 4
    assert engine.enable_chunked_prefill
    assert engine.context.mamba_ssm_states.dtype == torch.bfloat16
    assert engine.context.mamba_conv_states.dtype == torch.float32
    args.hybrid_prefix_state_dtype = None
    args.inference_dynamic_batching_enable_prefix_caching = args.enable_chunked_prefill = False
    engine = build_engine_from_args(tiny, args)
    assert getattr(engine.context, "prefix_cache", None) is None and not engine.enable_chunked_prefill


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint of ``megatron.training``, and its model's answers to the prompts with caching off."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), MODEL)


def save_checkpoint(folder: Path, model: list[str]) -> tuple[Path, list[dict[str, Any]]]:
    """See `checkpoint`; ``model``: megatron's arguments."""
    files = (folder / "saved", folder / "said.json")
    (result,) = run_prepared(WORKERS / "megatron_checkpoint.py", *files, *model, *INFERENCE, *prompt_arguments())
    assert result.returncode == 0, result.stderr[-4000:]
    return folder / "saved", json.loads((folder / "said.json").read_text())


@pytest.mark.multi
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_megatron_training(checkpoint, tmp_path, tp):
    """The checkpoint describes its model, and one flag turns the cache on. Also in another layout."""
    check_checkpoint(*checkpoint, tmp_path, tp, [])


@pytest.mark.slow
@pytest.mark.multi
def test_a_checkpoint_with_gated_delta_net(tmp_path):
    check_checkpoint(*save_checkpoint(tmp_path, GDN_MODEL), tmp_path, 1, DELTA_NET)


def check_checkpoint(folder, expected, tmp_path, tp, more):
    flags = ["--load", folder, "--use-checkpoint-args", *more, *INFERENCE, *prompt_arguments(), SWITCH]
    flags += ["--tensor-model-parallel-size", tp, "--json", tmp_path / "out.json"]
    result, *others = run_prepared(TOOL, *flags, environments=({},) if tp == 1 else environments_of(tp))
    assert result.returncode == 0, result.stderr[-4000:]
    assert [(other.returncode, other.stdout) for other in others] == [(0, "")] * (tp - 1)
    data = json.loads((tmp_path / "out.json").read_text())
    assert [request["reused_tokens"] for request in data["requests"]] == [0, 192]
    assert data["prefix_stats"]["reused_tokens"] == 192
    for request, said in zip(data["requests"], expected, strict=True):
        assert request["generated"] == said["tokens"]
        assert request["log_probs"] == pytest.approx(said["log_probs"], abs=LOG_PROB_NOISE)
    assert "engine: ours" in result.stdout and "megatron" not in result.stdout.splitlines()[0]


BAD = {
    "no checkpoint": (["--prompt", "x"], "give --load, the folder of a Megatron checkpoint"),
    "an empty checkpoint": (["--prompt-tokens", "5", "--load", "{empty}"], "--load: there is no checkpoint"),
    "unknown flag": (["--colour", "red"], "unrecognized arguments: --colour red"),
    "contradiction": ([BUDGET, "1"], f"{BUDGET} has no effect without {SWITCH}"),
    "what megatron refuses": (["--save", "x"], "megatron.training refused the arguments: assert args.save_interval"),
    "ranks": (["--tensor-model-parallel-size", "3"], "tp=3"),
}


def test_bad_arguments_are_one_line(tmp_path):
    """One process each, because megatron keeps its arguments in globals."""
    for name, (argv, problem) in BAD.items():
        (result,) = run_prepared(TOOL, *MODEL, *(word.format(empty=tmp_path) for word in argv), *INFERENCE)
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.returncode == 2, (name, result.stderr[-2000:])
        assert len(lines) == 1 and problem in lines[0], (name, lines)
        assert "Traceback" not in result.stderr and not result.stdout, name


def test_help_needs_no_megatron():
    command = [sys.executable, str(TOOL), "--help"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert result.returncode == 0
    assert SWITCH in result.stdout and "--hybrid-prefix-verify-hits" in result.stdout
    assert result.stderr == ""
