"""`keep_kernels`: where FlashAttention 4 and Triton keep compiled kernels."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.transformer.enums import InferenceCudaGraphScope

from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
from megatron_hybrid_prefix.platform import start
from megatron_hybrid_prefix.platform.kernel_caches import keep_kernels, kernel_folders

VARIABLES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "TRITON_CACHE_DIR")
IS_ON, FA4, TRITON = VARIABLES


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder, FA4 installed, and none of the variables."""
    for name in (
        *VARIABLES,
        "TRITON_CACHE_AUTOTUNING",
        "MAMBA_DETERMINISTIC",
        "XDG_CACHE_HOME",
        "TRITON_HOME",
        "LOCAL_RANK",
    ):
        monkeypatch.setenv(name, "")  # restored at the end, whatever is set meanwhile
        monkeypatch.delenv(name)
    home, package = tmp_path / "home", tmp_path / "site" / "flash_attn"
    home.mkdir(mode=0o700)
    (package / "cute").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    find = importlib.util.find_spec
    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "flash_attn" else find(name))
    return home


def chosen() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in VARIABLES)


def test_by_default_they_are_kept_below_the_home_folder(home, caplog):
    keep_kernels()
    folder, triton = home / ".cache" / "megatron_hybrid_prefix" / "flash_attention_4", home / ".triton" / "cache"
    assert chosen() == ("1", str(folder), str(triton)) and folder.stat().st_mode & 0o777 == 0o700
    assert triton.is_dir()  # Triton's default
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "1"
    keep_kernels()
    assert chosen() == ("1", str(folder), str(triton)) and not caplog.messages
    assert kernel_folders() == f"Triton's in {triton}, FlashAttention 4's in {folder}"


@pytest.mark.parametrize(
    ("variable", "torch_is", "kept"), [("", False, True), ("", True, False), ("0", True, True), ("1", False, False)]
)
def test_fastest_configurations_are_not_kept_where_megatron_chooses_by_size(
    variable, torch_is, kept, home, monkeypatch
):
    monkeypatch.setenv("MAMBA_DETERMINISTIC", variable)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: torch_is)
    keep_kernels()
    assert os.environ.get("TRITON_CACHE_AUTOTUNING") == ("1" if kept else None)


def test_where_the_environment_says(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "triton"))
    keep_kernels()
    triton = tmp_path / "triton" / ".triton" / "cache"
    assert chosen() == ("1", f"{tmp_path}/xdg/megatron_hybrid_prefix/flash_attention_4", str(triton))
    assert triton.is_dir() and not (home / ".triton").exists()
    monkeypatch.delenv(IS_ON)
    monkeypatch.setenv(FA4, str(tmp_path / "own"))
    keep_kernels()
    assert chosen()[:2] == ("1", str(tmp_path / "own")) and (tmp_path / "own").is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # its specification: ignore it
    for name in (IS_ON, FA4):
        monkeypatch.delenv(name)
    keep_kernels()
    assert chosen()[1].startswith(str(home))


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_is_set_is_left(value, home, tmp_path, monkeypatch, caplog):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(IS_ON, value)
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", value)
    for name in (FA4, TRITON):
        monkeypatch.setenv(name, str(tmp_path / "open"))
    keep_kernels()
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == value
    assert chosen() == (value, str(tmp_path / "open"), str(tmp_path / "open"))
    assert list(home.iterdir()) == [] and not caplog.messages
    place = f"in {tmp_path}/open" if value == "1" else "nowhere"
    assert kernel_folders() == f"Triton's in {tmp_path}/open, FlashAttention 4's {place}"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_others_can_write_is_not_used(rank, home, monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_RANK", rank)
    removed = []
    monkeypatch.setattr(
        atexit, "register", lambda function, *args, **options: removed.append((function, args, options))
    )
    home.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        keep_kernels()
        keep_kernels()
    is_on, _, triton = chosen()
    assert is_on == "0" and kernel_folders() == "Triton's nowhere, FlashAttention 4's nowhere"
    assert Path(triton).stat().st_mode & 0o777 == 0o700 and not Path(triton).is_relative_to(home)
    lines = [
        f"compiled kernels of {name} are not kept, each process compiles them again: others can write to {home}; name a "
        f"folder of your own in {variable}"
        for name, variable in (("FlashAttention 4", FA4), ("Triton", TRITON))
    ]
    assert caplog.messages == (lines if rank == "0" else [])
    ((function, args, options),) = removed
    function(*args, **options)
    assert not Path(triton).exists()


def test_a_link_is_followed_once(home, tmp_path, monkeypatch):
    """Who can change the link cannot change what Triton runs."""
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    keep_kernels()
    assert chosen()[1:] == (f"{home}/.cache/megatron_hybrid_prefix/flash_attention_4", f"{home}/.triton/cache")


def test_without_fa4_only_triton_is_looked_at(home, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    keep_kernels()
    assert chosen() == (None, None, f"{home}/.triton/cache") and not (home / ".cache").exists()
    assert kernel_folders() == f"Triton's in {home}/.triton/cache"


def test_chosen_before_megatron_is_imported_on_a_gpu_only(monkeypatch):
    calls = []
    monkeypatch.setattr(start, "keep_kernels", lambda: calls.append(True))
    with start.importing_megatron(use_cuda=True):
        assert calls == [True]
    with start.importing_megatron(use_cuda=False):
        assert calls == [True]


KINDS = [  # tokens, prompts, rows that decode
    InferenceBatchDimensions(*numbers)
    for numbers in (
        (64, 0, 64), (48, 0, 48), (8, 0, 8), (4, 0, 4), (1, 0, 1), (64, 2, 16), (64, 2, 0), (64, 1, 0), (32, 1, 0),
    )
]  # fmt: skip
UNLIKE = [KINDS[number] for number in (1, 3, 4, 5, 6, 8)]  # of two alike the later


@pytest.mark.parametrize(
    ("impl", "scope", "layers", "state", "launched"),
    [
        ("local", "layer", "local", "RUNNING", UNLIKE),
        ("local", "layer", "inference_optimized", "RUNNING", []),
        ("local", "layer", "local", "SUSPENDED", []),  # captured again
        ("local", "none", "local", "RUNNING", None),
        ("none", "layer", "local", "RUNNING", None),
    ],
)
def test_before_graphs_are_captured_a_line_and_kernels(impl, scope, layers, state, launched, home, monkeypatch, capsys):
    """Once of each kind of step for which kernels are compiled apart; nothing if no graphs are captured."""
    calls = []
    monkeypatch.setattr(
        DynamicInferenceEngine, "create_cuda_graphs", lambda self: calls.append(capsys.readouterr().err)
    )
    monkeypatch.setattr(
        "megatron_hybrid_prefix.mcore.engine.engine.launch_eagerly", lambda engine, kind, around: calls.append(kind)
    )
    engine = object.__new__(HybridPrefixEngine)
    engine.cuda_graph_impl, engine.inference_cuda_graph_scope = impl, InferenceCudaGraphScope[scope]
    engine.context = SimpleNamespace(cuda_graph_batch_dimensions_list=KINDS, states=None)
    monkeypatch.setattr(engine, "_prepare_for_reset", lambda: None)
    monkeypatch.setattr(engine, "_weights_at", lambda: [])
    engine.controller = SimpleNamespace(model_config=SimpleNamespace(transformer_impl=layers))
    engine.state = EngineState[state]
    engine.create_cuda_graphs()
    line = (
        f"megatron_hybrid_prefix: capturing CUDA graphs of {len(KINDS)} kinds of step; kernels that are missing are compiled first, "
        f"and kept: Triton's in {home}/.triton/cache, FlashAttention 4's nowhere\n"
    )
    assert calls == ([""] if launched is None else [*launched, line])
