"""One file outside the package adds a tier behind the host tier. It takes what the host evicts, and gives it back."""

from __future__ import annotations

import argparse
import importlib
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.mcore.entrypoints import arguments
from megatron_hybrid_prefix.plugins import PLUGINS_VARIABLE
from megatron_hybrid_prefix.tiers.base import Entry, TierBehind
from megatron_hybrid_prefix.tiers.registry import make_tier, register_tier
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag
from tests.harness.engine_helpers import LOG_PROB_NOISE, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, tokens
from tests.harness.selection import mostly_slow
from tests.harness.workers.launch import run_ranks

PLUGIN = Path(__file__).resolve().parents[1] / "harness" / "plugins" / "dictionary_tier.py"
HOST_GB = 0.0004  # a few states and blocks of `tiny`
NAME = "outside"
each_mode = pytest.mark.parametrize("mode", mostly_slow(MODES, "async"))


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


def small(model: Any, **fields: Any) -> EngineHarness:
    """Room for one request of seven blocks on the device, and for a little more on the host."""
    defaults = {"slots": 2, "blocks": 9, "host_gb": HOST_GB, "max_requests": 2, "tier_behind_host": NAME}
    return EngineHarness(model, **(defaults | fields))


def dictionary(served: EngineHarness) -> dict[tuple[EntryKind, bytes], tuple[Tag, bytearray, int]]:
    """The content of the tier behind the host."""
    return served.cache._store.host.behind.tier.entries


def push_out(served: EngineHarness, prompt: list[int], seed: int = 900) -> None:
    """Sends other prompts until neither the device nor the host has anything of the prompt."""
    keys = served.cache.chain(prompt).keys
    for number in range(30):
        if all(served.cache.node(key) is None for key in keys):
            return
        served.send(tokens(6, 7, seed=seed + number), count=1)
    raise AssertionError("the host is not small enough")


@each_mode
def test_what_the_host_evicted_comes_back_bit_by_bit(model, mode):
    served, off = small(model, async_sched_mode=mode), EngineHarness(model, slots=None, async_sched_mode=mode)
    prompt = tokens(4, 9, seed=1)
    without = off.send(prompt)
    cold, hit = served.send(prompt), served.send(prompt)
    push_out(served, prompt)
    assert (EntryKind.STATE, served.cache.chain(prompt).keys[-1]) in dictionary(served)
    before = served.context.prefix_stats()
    loaded = served.send(prompt)
    stats = served.context.prefix_stats()
    assert loaded.num_cached_tokens == 4 * BLOCK == stats.reused_tokens_host - before.reused_tokens_host
    for tier in ("host", NAME):
        assert stats.tiers[tier].loads - before.tiers[tier].loads == 5
    assert stats.tiers[NAME].stores >= 5 and stats.tiers[NAME].bytes_loaded > 0 < stats.tiers[NAME].bytes_stored
    assert stats.tiers[NAME].failed == 0 == stats.tiers[NAME].full and stats.fallbacks == {}
    assert without.generated_tokens == cold.generated_tokens == hit.generated_tokens == loaded.generated_tokens
    assert hit.generated_log_probs == loaded.generated_log_probs
    assert loaded.generated_log_probs == pytest.approx(without.generated_log_probs, abs=1e-5)
    served.check()
    served.check_drained()


def test_some_from_the_device_some_from_the_host_some_from_behind(model):
    """Sessions take turns with too little memory on the device and the host. The tier behind has the rest."""
    reused = {}
    for name, fields in {"unlimited": {"slots": 99, "blocks": 99, "host_gb": 0.0}, "behind": {}, "alone": {}}.items():
        served = small(model, **({"tier_behind_host": NAME if name == "behind" else None} | fields))
        history = {session: tokens(2, 9, seed=50 + session) for session in range(5)}
        for turn in range(3):
            for session in history:
                answer = served.send(history[session], count=6)
                history[session] += [*answer.generated_tokens, *random_tokens(44, seed=1000 + 10 * session + turn)]
        served.check()
        served.check_drained()
        stats = served.context.prefix_stats()
        assert stats.fallbacks == {}
        reused[name] = stats.reused_tokens
    assert reused["behind"] == reused["unlimited"] > reused["alone"]


@pytest.mark.parametrize("fault", ["kv bit", "state bit", "checksum", "another state", "gone", "get raises"])
def test_a_fault_behind_the_host_costs_time_only(model, fault, caplog, monkeypatch):
    served = small(model)
    prompt = tokens(4, 9, seed=1)
    served.send(prompt)
    push_out(served, prompt)
    keys, entries = served.cache.chain(prompt).keys, dictionary(served)
    place = (EntryKind.KV if fault == "kv bit" else EntryKind.STATE, keys[-1])
    tier = served.cache._store.host.behind.tier
    if fault == "gone":
        monkeypatch.setattr(tier, "get", lambda tags, buffers: [None] * len(tags))
    elif fault == "get raises":
        monkeypatch.setattr(tier, "get", lambda tags, buffers: 1 / 0)
    elif fault == "checksum":
        tag, data, checksum = entries[place]
        entries[place] = (tag, data, checksum ^ 8)
    elif fault == "another state":
        _, data, checksum = next(
            kept for (kind, key), kept in entries.items() if kind == EntryKind.STATE and key != keys[-1]
        )
        entries[place] = (entries[place][0], data, checksum)
    else:
        entries[place][1][17] ^= 4
    with caplog.at_level(logging.ERROR):
        hit = served.send(prompt)
    monkeypatch.undo()
    stats = served.context.prefix_stats()
    assert hit.num_cached_tokens == 0 and stats.fallbacks == {"host_load_failed": 1}
    assert stats.tiers[NAME].failed == 5 == stats.tiers["host"].failed
    assert not [key for _, key in entries if key in keys], "not used again"
    assert sum("the request is recomputed" in record.message for record in caplog.records) == 1
    push_out(served, prompt, seed=1900)
    assert served.send(prompt).num_cached_tokens == 4 * BLOCK  # stored anew
    served.check()
    served.check_drained()


@pytest.mark.parametrize("fault", ["refuses", "raises"])
def test_a_tier_that_takes_nothing_equals_no_tier(model, fault, monkeypatch):
    served = small(model)

    def put(entries: list[Entry]) -> list[bool]:
        if fault == "raises":
            raise OSError("no space left on device")
        return [False] * len(entries)

    monkeypatch.setattr(served.cache._store.host.behind.tier, "put", put)
    prompt = tokens(4, 9, seed=1)
    served.send(prompt)
    push_out(served, prompt)
    assert served.send(prompt).num_cached_tokens == 0
    stats = served.context.prefix_stats()
    assert stats.tiers[NAME].full == stats.tiers[NAME].stores > 0 == stats.tiers[NAME].loads
    assert stats.fallbacks == {}
    served.check()
    served.check_drained()


def test_a_tier_that_always_raises_equals_no_tier(model, monkeypatch, caplog):
    served = small(model)
    tier = served.cache._store.host.behind.tier
    for name in ("contains", "kv_depth", "state_depth", "put", "get", "remove", "clear", "invalidate"):

        def fails(*arguments: Any, name: str = name) -> None:
            raise ConnectionError(f"no answer to {name}")

        fails.__name__ = name
        monkeypatch.setattr(tier, name, fails)
    prompt = tokens(4, 9, seed=1)
    with caplog.at_level(logging.ERROR):
        served.send(prompt)
        push_out(served, prompt)
        assert served.send(prompt).num_cached_tokens == 0
        served.engine.invalidate()
        assert served.send(prompt).num_cached_tokens == 0
    for name in ("contains", "kv_depth", "put", "invalidate"):
        assert any(f"no answer to {name}" in record.getMessage() for record in caplog.records)
    assert served.context.prefix_stats().fallbacks == {}
    served.check_drained()


def test_new_weights_invalidate_the_tier_behind_the_host(model):
    served = small(model)
    prompt = tokens(4, 9, seed=1)
    served.send(prompt)
    push_out(served, prompt)
    assert dictionary(served)
    served.engine.invalidate()
    assert not dictionary(served)
    assert served.send(prompt).num_cached_tokens == 0


@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_a_host_without_room_for_entries_from_behind(pages):
    """Four blocks and a state need five pages. What was fetched stays on the host; everything else is undone."""
    tier = make_tier(NAME)
    cache = HybridPrefixCache(
        CacheSettings(
            block_tokens=4, kv_blocks=9, state_slots=2, host_pages=pages, behind=TierBehind(NAME, tier), secret=b"test"
        )
    )
    chain = cache.chain(range(17))
    tags = [Tag(kind=EntryKind.KV, key=key, depth_tokens=4 * n, epoch=0) for n, key in enumerate(chain.keys, 1)]
    tags.append(Tag(kind=EntryKind.STATE, key=chain.keys[-1], depth_tokens=16, epoch=0))
    tier.put([Entry(tag, memoryview(b""), 0) for tag in tags])
    match = cache.match(chain)
    assert (match.kv_depth_blocks, match.loadable_blocks, match.resume_tokens) == (4, 4, 0)
    assert cache.loads.begin_load_back(1, match) is None
    cache.check_integrity()
    assert len(list(cache.nodes())) == cache.stats().tiers["host"].kv_blocks == pages
    assert [unit.tag for unit in cache.take_copies()] == tags[:pages]
    assert cache.admit(1, cache.match(chain)).resume_tokens == 0


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_and_flags_name_the_tier():
    config = HybridPrefixConfig(mamba_gb=1, host_gb=2, tier_behind_host=f"{NAME}:7")
    parser = arguments.add_hybrid_prefix_args(argparse.ArgumentParser(exit_on_error=False))
    flags = ["--hybrid-prefix-host-gb", "2", "--hybrid-prefix-tier-behind-host", f"{NAME}:7"]
    args = parser.parse_args([arguments.SWITCH, arguments.BUDGET, "1", *flags])
    assert arguments.hybrid_prefix_config_from_args(args) == config
    tier = make_tier(f"{NAME}:7")
    assert type(tier) is importlib.import_module("outside_tier").DictionaryTier and tier.most == 7


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match=r"tier_behind_host='disk': must be .*'outside'"):
        HybridPrefixConfig(mamba_gb=1, host_gb=1, tier_behind_host="disk:/tmp")
    with pytest.raises(ValueError, match="set host_gb above 0"):
        HybridPrefixConfig(mamba_gb=1, tier_behind_host=NAME)
    with pytest.raises(ValueError, match="needs a host tier"):
        HybridPrefixCache(
            CacheSettings(block_tokens=4, kv_blocks=4, state_slots=1, behind=TierBehind("x", make_tier(NAME)))
        )
    for name in ("a:b", "host", "device", ""):
        with pytest.raises(ValueError, match="tier_behind_host"):
            register_tier(name, lambda argument: make_tier(NAME))


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_ranks_agree_on_the_depth_that_all_of_them_hold():
    keys = [bytes([number]) for number in range(9)]
    states = [{0, 3, 6, 8}, {0, 4, 6, 7}]  # by rank: blocks whose end has a state
    tiers = []
    for of_rank in states:
        tier = make_tier(NAME)
        kept = [(EntryKind.STATE, number) for number in of_rank] + [
            (EntryKind.KV, number) for number in range(8 - len(tiers))
        ]
        tier.put(
            [Entry(Tag(kind=kind, key=keys[n], depth_tokens=n + 1, epoch=0), memoryview(b""), 0) for kind, n in kept]
        )
        tiers.append(tier)
    # Both ranks ask at the same time, so a collective sees what either would say next.
    other_limit = [9]

    def least(value: int) -> int:
        other_limit[0] = min(value, tiers[1].state_depth(keys, 0, other_limit[0]))
        return other_limit[0]

    assert TierBehind(NAME, tiers[0], least).state_depth(keys, 0, 9) == 7
    assert TierBehind(NAME, tiers[0], lambda value: min(value, tiers[1].kv_depth(keys, 0))).kv_depth(keys, 0) == 7


@pytest.mark.multi
def test_ranks_whose_tiers_differ_decide_alike(tmp_path, monkeypatch):
    """One rank's tier refuses entries that the other's keeps. If the ranks decided differently, the engine would raise."""
    monkeypatch.setenv(PLUGINS_VARIABLE, "tests.harness.plugins.dictionary_tier")
    ranks = run_ranks("tier_behind.py", tmp_path / "found.json")
    assert ranks[0]["kept"] > ranks[1]["kept"] > 0
    for found in (rank["behind"] for rank in ranks):
        assert found["decisions"] == ranks[0]["behind"]["decisions"]
        assert found["stats"]["tiers"]["dictionary"]["loads"] > 10 and found["stats"]["reused_tokens_host"] > 0
        assert found["stats"]["fallbacks"] == {}
        for answer, right in zip(found["answers"], ranks[0]["off"]["answers"], strict=True):
            assert answer["tokens"] == right["tokens"]
            assert answer["log_probs"] == pytest.approx(right["log_probs"], rel=0, abs=LOG_PROB_NOISE)
