"""Shared fixtures. The platform is started once a process; tests that need another layout start their own processes.

``MHP_TEST_THREADS`` is the number of threads that PyTorch computes with (1 unless set), here and in the processes that
tests start. Rounding depends on it: see ``scripts/instruction_sets.sh``.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.harness.limits import THREADS
from tests.harness.tested_megatron import tested_megatron

os.environ["OMP_NUM_THREADS"] = str(THREADS)
if not torch.cuda.is_available():
    # megatron decorates functions with torch.compile, which imports the whole of inductor where megatron is imported before the
    # platform, as in modules of tests: 1.5 of 5.4 s. On the CPU no test calls a compiled function.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
settings.register_profile("no time limit", deadline=None)  # no test judges speed
settings.load_profile("no time limit")


# Folders whose files take longest: they run first, so that at the end no process waits long for the other.
_FIRST = ("packaging", "distributed", "serve", "cli", "engine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and collects without the garbage collector, which would look at all modules again and again: 4 of 13 s."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest folders first. Skips ``gpu`` tests without a GPU, and ``clients`` outside of scripts/clients.sh."""
    order = {folder: place for place, folder in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    if "MHP_CLIENTS_PYTHON" not in os.environ:
        for item in items:
            if "clients" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs the clients: scripts/clients.sh"))

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a folder's name is a keyword, too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which megatron-core was tested. Not in pytest's header, which ``-q`` leaves out."""
    terminalreporter.write_line(tested_megatron())


@pytest.fixture(scope="session")
def platform():
    """The CPU platform with tp=1 and pp=1, even if there is a GPU. Tests marked ``gpu`` start their own processes."""
    from megatron_hybrid_prefix.platform import ensure_platform

    torch.set_num_threads(THREADS)
    started = ensure_platform(device="cpu")
    gc.freeze()  # megatron collects at each suspension, and would look at all modules and tests: 0.15 s
    return started


@pytest.fixture(scope="module", autouse=True)
def levels_of_logs(request):
    """Those of a new process. ``serve`` sets others, and tests of the server share a process with the rest."""
    if "serve" not in request.path.parts:
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger("megatron_hybrid_prefix").setLevel(logging.NOTSET)


@pytest.fixture
def own_models(platform: Any) -> Callable[[str], tuple[Any, Any]]:
    """Makes a model that a test may modify, and what a trainer makes of it."""
    from megatron_hybrid_prefix.models import build_hybrid_model
    from tests.harness.named_models import named

    return lambda name: tuple(build_hybrid_model(named(name), seed=seed, platform=platform) for seed in (5, 6))


@pytest.fixture(scope="session")
def engine_imported(platform):
    """Imports the engine before a test captures stderr, because megatron uses stderr's file number at import."""
    import megatron.core.inference.engines  # noqa: F401


def _built(name: str, platform: Any) -> Any:
    """A model of `tests.harness.named_models`, with random weights of seed 0."""
    from megatron_hybrid_prefix.models import build_hybrid_model
    from tests.harness.named_models import named

    return build_hybrid_model(named(name), seed=0, platform=platform)


def _tiny(name: str) -> Any:
    """A session's one."""
    return pytest.fixture(scope="session")(lambda platform: _built(name, platform))


tiny = _tiny("tiny")
tiny_gdn = _tiny("tiny-gdn")
tiny_gdn_mtp = _tiny("tiny-gdn-mtp")
tiny_gdp = _tiny("tiny-gdp")
tiny_gdp_mtp = _tiny("tiny-gdp-mtp")
tiny_granite = _tiny("tiny-granite")
tiny_granite_dense = _tiny("tiny-granite-dense")
tiny_olmo_hybrid = _tiny("tiny-olmo-hybrid")
tiny_large_states = _tiny("tiny-large-states")
tiny_mixed = _tiny("tiny-mixed")
tiny_moe = _tiny("tiny-moe")
tiny_mtp = _tiny("tiny-mtp")
tiny_nemotron_3 = _tiny("tiny-nemotron-3")
tiny_qwen3_5 = _tiny("tiny-qwen3-5")
tiny_qwen3_next = _tiny("tiny-qwen3-next")


@pytest.fixture(scope="session")
def tiny_gdp_mixed(platform):
    """Mamba2, Gated Delta Product and attention: the symbol of the first two is the same."""
    built, other = (_built(name, platform) for name in ("tiny-gdp", "tiny"))
    built.decoder.layers[0].mixer = other.decoder.layers[0].mixer
    return built


@pytest.fixture
def model(tiny):
    """``tiny`` for the engines of one test. Tests of other modules get it with megatron's mixers again."""
    from megatron_hybrid_prefix.mcore import restore_mixers

    yield tiny
    restore_mixers(tiny)


@pytest.fixture(scope="session")
def tiny_reference(tiny):
    """``tiny`` in float64."""
    from tests.harness.naive_model import NaiveHybridModel

    return NaiveHybridModel(tiny, tiny.hybrid_config)
