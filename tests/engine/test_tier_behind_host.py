"""One file outside the package adds a tier behind the host tier, by a URL of its own. It takes what is computed, and gives it back."""

from __future__ import annotations

import importlib
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.plugins import PLUGINS_VARIABLE
from megatron_hybrid_prefix.tiers.base import Entry
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.registry import parse_url, register_tier
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag
from tests.core.model import NAMESPACE, put_behind, tier_behind
from tests.distributed.test_prefix_parallel import model_of, session
from tests.harness.engine_helpers import assert_same
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, raising, tokens
from tests.harness.limits import HANG_S
from tests.harness.plugins.dictionary_tier import DictionaryTier
from tests.harness.shared_tiers import stats_of, tier_of, written
from tests.harness.workers.launch import run_play

PLUGIN = Path(__file__).resolve().parents[1] / "harness" / "plugins" / "dictionary_tier.py"
HOST_GB = 0.0004  # a few states and blocks of `tiny`
NAME = "outside"
URL = f"{NAME}://?min_tokens=0&wait_s={HANG_S}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    source = shutil.copy(PLUGIN, folder / "outside_tier.py")
    Path(source).write_text(Path(source).read_text().replace('"dictionary"', f'"{NAME}"'))
    return folder


@pytest.fixture(autouse=True)
def plugged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(PLUGINS_VARIABLE, "outside_tier")
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")


def small(model: Any, **fields: Any) -> EngineHarness:
    """Room for one request of seven blocks on the device, and for a little more on the host."""
    defaults = {"slots": 2, "blocks": 9, "host_gb": HOST_GB, "max_requests": 2, "shared": URL}
    return EngineHarness(model, **(defaults | fields))


def dictionary(served: EngineHarness) -> dict[tuple[EntryKind, bytes], tuple[Tag, bytearray, int]]:
    """The content of the tier behind the host, once all is written."""
    written(served)
    return {(kind, key): kept for (_, kind, key), kept in tier_of(served).entries.items()}


def push_out(served: EngineHarness, prompt: list[int], seed: int = 900) -> None:
    """Sends other prompts until neither the device nor the host has anything of the prompt."""
    keys = served.cache.chain(prompt).keys
    for number in range(30):
        written(served)  # before its pages are needed
        if all(served.cache.node(key) is None for key in keys):
            return
        served.send(tokens(6, 7, seed=seed + number), count=1)
    raise AssertionError("the host is not small enough")


def test_what_the_host_evicted_comes_back(model):
    served, prompt = small(model), tokens(4, 9, seed=1)
    cold = served.send(prompt)
    push_out(served, prompt)
    assert (EntryKind.STATE, served.cache.chain(prompt).keys[-1]) in dictionary(served)
    before = served.context.prefix_stats()
    loaded = served.send(prompt)
    stats = served.context.prefix_stats()
    assert loaded.num_cached_tokens == 4 * BLOCK == stats.reused_tokens_host - before.reused_tokens_host
    for tier in ("host", "shared"):
        assert stats.tiers[tier].loads - before.tiers[tier].loads == 5
    shared = stats.tiers["shared"]
    assert shared.stores >= 5 and shared.bytes_loaded > 0 < shared.bytes_stored
    assert shared.failed == 0 == shared.full and stats.fallbacks == {}
    assert cold.generated_tokens == loaded.generated_tokens
    served.finish()


@pytest.mark.parametrize("fault", ["refuses", "raises"])
def test_a_tier_that_takes_nothing_equals_no_tier(model, fault, monkeypatch):
    served = small(model)
    full = raising(OSError("no space left on device")) if fault == "raises" else lambda namespace, entry: False
    monkeypatch.setattr(tier_of(served), "put", full)
    prompt = tokens(4, 9, seed=1)
    served.send(prompt)
    push_out(served, prompt)
    assert served.send(prompt).num_cached_tokens == 0
    written(served)
    stats = served.context.prefix_stats()
    assert stats_of(served).full == stats_of(served).stores > 0 == stats_of(served).loads
    assert stats.fallbacks == {}
    served.finish()


def test_a_tier_that_always_raises_equals_no_tier(model, monkeypatch, caplog):
    served = small(model)
    tier, names = (
        tier_of(served),
        ("contains", "kv_depth", "state_depth", "put", "get", "remove", "wants", "use_namespace"),
    )
    for name in names:
        fails = raising(ConnectionError(f"no answer to {name}"))
        fails.__name__ = name
        monkeypatch.setattr(tier, name, fails)
    prompt = tokens(4, 9, seed=1)
    with caplog.at_level(logging.ERROR):
        served.send(prompt)
        push_out(served, prompt)
        assert served.send(prompt).num_cached_tokens == 0
        served.engine.invalidate()
        assert served.send(prompt).num_cached_tokens == 0
    for name in ("contains", "kv_depth", "wants", "use_namespace"):
        assert any(f"no answer to {name}" in record.getMessage() for record in caplog.records), name
    assert served.context.prefix_stats().fallbacks == {}
    served.check_drained()


@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_a_host_without_room_for_entries_from_behind(pages):
    """Four blocks and a state need five pages. What was fetched stays on the host; everything else is undone."""
    behind = tier_behind()
    cache = HybridPrefixCache(
        CacheSettings(block_tokens=4, kv_blocks=9, state_slots=2, host_pages=pages, behind=behind, secret=b"test")
    )
    chain = cache.chain(range(17))
    tags = put_behind(behind, chain)
    match = cache.match(chain)
    assert (match.kv_depth_blocks, match.loadable_blocks, match.resume_tokens) == (4, 4, 0)
    assert cache.loads.fetch(1, match) is None
    cache.check_integrity()
    assert len(list(cache.nodes())) == cache.stats().tiers["host"].kv_blocks == pages
    assert [unit.tag for unit in cache.take_copies()] == tags[:pages]
    admission = cache.admit(1, match, load=True)
    assert admission.load is None and admission.resume_tokens == 0
    cache.check_integrity()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_url_names_the_tier():
    kind, settings = parse_url(f"{NAME}:///7?wait_s=0.5&min_tokens=9")
    assert kind is importlib.import_module("outside_tier").DictionaryTier
    tier = kind(settings, block_tokens=4, make_ranking=None)
    assert (tier.most, tier.wait_s, tier.least_blocks) == (7, 0.5, 3)
    HybridPrefixConfig(mamba_gb=1, host_gb=2, shared=f"{NAME}:///7")


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match=r"must be a URL such as file:.* or mooncake:.* or outside://"):
        HybridPrefixConfig(mamba_gb=1, host_gb=1, shared="disk:///tmp")
    with pytest.raises(ValueError, match="set host_gb above 0"):
        HybridPrefixConfig(mamba_gb=1, shared=URL)
    with pytest.raises(ValueError, match="unknown parameter 'gb'"):
        HybridPrefixConfig(mamba_gb=1, host_gb=1, shared=f"{NAME}://?gb=1")
    with pytest.raises(ValueError, match="needs a host tier"):
        HybridPrefixCache(CacheSettings(block_tokens=4, kv_blocks=4, state_slots=1, behind=tier_behind()))
    for scheme in ("a:b", "A", "a b"):
        with pytest.raises(ValueError, match="not a valid scheme"):
            register_tier(scheme, DictionaryTier)
    with pytest.raises(ValueError, match="registered already"):
        register_tier("file", DictionaryTier)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_ranks_agree_on_the_depth_that_all_of_them_hold():
    keys = [bytes([number]) for number in range(9)]
    states = [{0, 3, 6, 8}, {0, 4, 6, 7}]  # by rank: blocks whose end has a state
    tiers = []
    for of_rank in states:
        behind = tier_behind()
        kept = [(EntryKind.STATE, number) for number in of_rank]
        kept += [(EntryKind.KV, number) for number in range(8 - len(tiers))]
        for kind, n in kept:
            tag = Tag(kind=kind, key=keys[n], depth_tokens=n + 1, epoch=0)
            behind.tier.put(NAMESPACE, Entry(tag, memoryview(b""), 0))
        tiers.append(behind)
    # Both ranks ask at the same time, so a collective sees what either would say next.
    other_limit = [9]

    def least(value: int) -> int:
        other_limit[0] = min(value, tiers[1].tier.state_depth(NAMESPACE, keys, 0, other_limit[0]))
        return other_limit[0]

    def agreed(agree: Callable[[int], int]) -> TierBehind:
        behind = TierBehind(tiers[0].tier, agree)
        behind.name_entries(lambda: NAMESPACE)
        return behind

    assert agreed(least).state_depth(keys, 0, 9) == 7
    assert agreed(lambda value: min(value, tiers[1].kv_depth(keys, 0))).kv_depth(keys, 0) == 7


@pytest.mark.multi
def test_ranks_whose_tiers_differ_decide_alike(tmp_path, monkeypatch):
    """One rank's tier refuses entries that the other's keeps; then each loses, spoils, and delays some of its own. If the
    ranks decided differently, the engine would raise."""
    monkeypatch.setenv(PLUGINS_VARIABLE, "tests.harness.plugins.dictionary_tier")
    late_s, rng, traffic = 0.2, random.Random(5), []
    prompts = [tokens(2 + number % 3, 9, seed=70 + number) for number in range(12)]
    # What one rank writes later, the other may lose.
    again = [event for _ in range(3) for prompt in prompts for event in (["sends", [prompt], 2], ["drain"])]
    for _ in range(60):  # requests begin and end beside each other
        prompt = rng.choice(prompts)
        kept = rng.choice([len(prompt), len(prompt) - 40])
        traffic.append(["ask", [*prompt[:kept], rng.randrange(99)], rng.choice([2, 9])])
        traffic.append(["go", rng.randrange(6)])
    traffic.append(["run"])

    def part(events: list[Any], *before: Any, wait_s: float) -> dict[str, Any]:
        shared = f"dictionary://?min_tokens=0&wait_s={wait_s}"
        fields = {"slots": 2, "blocks": 9, "host_gb": 0.0003, "check_ranks": True, "shared": shared}
        return session("M*-M*-", 2, 1, [*before, *events], **fields)

    parts = {
        "off": session("M*-M*-", 2, 1, again, without=True),
        "behind": part(again, ["last: refuse_every_third"], wait_s=HANG_S),
        "random, off": session("M*-M*-", 2, 1, traffic, without=True),
        "random": part(traffic, ["random_faults", late_s], wait_s=late_s),
    }
    ranks = run_play(tmp_path, {"sizes": {"tp": 2}, "model": model_of("M*-M*-", 1), "parts": parts})
    first, second = (rank["behind"] for rank in ranks)
    assert first["kept"] >= second["kept"] > 0 and second["refused"] > first["refused"] == 0
    for rank in ranks:
        found, random_one = rank["behind"], rank["random"]
        assert found["stats"]["tiers"]["shared"]["loads"] > 10 and found["stats"]["reused_tokens_host"] > 0
        assert found["stats"]["fallbacks"] == {}
        assert random_one["stats"]["reused_tokens_host"] > 0
        assert random_one["stats"]["fallbacks"].keys() & {"host_load_failed", "tier_load_missing", "tier_load_late"}
        for name, off in (("behind", "off"), ("random", "random, off")):
            assert rank[name]["decisions"] == ranks[0][name]["decisions"]
            assert_same(rank[name]["answers"], ranks[0][off]["answers"])
