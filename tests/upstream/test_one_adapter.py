"""Another megatron-core needs another `upstream/` only: no other folder of this package knows megatron's internals.

Tested with the changes of Megatron-LM's newest main (`megatron_main.py`): every name that our sources would have to use
differently is used in `upstream/` alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable

import pytest

from megatron_hybrid_prefix.platform import patches as platform_patches
from megatron_hybrid_prefix.upstream.check import ContractRow, accepts, parameters_of
from megatron_hybrid_prefix.upstream.contract import installed_contract
from megatron_hybrid_prefix.upstream.rebinding import resolve
from scripts import contract_classes as classes
from scripts import contract_names as names
from scripts import contract_scan as scan
from scripts.contract_names import is_private
from scripts.contract_rows import overriders
from scripts.contract_scan import Source, Use
from tests.upstream.megatron_main import RENAMED


@pytest.fixture(autouse=True)
def started(platform):
    """Megatron's modules are imported, and missing ones replaced."""


def sources_outside() -> list[Source]:
    """Our sources without `upstream/`."""
    found = [source for source in scan.sources() if not source.name.startswith("upstream/")]
    assert {"mcore/engine/engine", "mcore/context/context", "layers/mamba2", "platform/patches"} <= {
        source.name for source in found
    }
    return found


def uses(sources: list[Source]) -> list[Use]:
    of_our_class = classes.megatrons_class_of_each()
    return [use for source in sources for use in scan.uses(source, of_our_class)]


@functools.cache
def uses_outside() -> list[Use]:
    """Names of megatron in our sources without `upstream/`."""
    found = uses(sources_outside())
    assert {use.how for use in found} >= {"name", "class", "module", "through"}
    return found


def private_uses(found: list[Use]) -> list[str]:
    """Private names. Those that a module in `upstream/` gives another module under a name of ours are not meant."""
    return [
        f"{use.where}: {use.name}"
        for use in found
        if is_private(use.name) and use.name not in names.NOT_MEGATRONS and use.how != "through"
    ]


def test_only_upstream_uses_private_names():
    found = private_uses(uses_outside())
    assert found == [], "give it a neutral name in upstream/: " + "; ".join(found)


def private_overrides(cls: type) -> list[str]:
    return [name for name in classes.overridden(cls) if is_private(name) and name in vars(cls)]


def test_only_upstream_overrides_private_names():
    from megatron_hybrid_prefix.upstream.engine import EngineSeam

    modules = {f"megatron_hybrid_prefix.{source.name.replace('/', '.')}" for source in sources_outside()}
    ours = [cls for cls in classes.our_classes() if cls.__module__ in modules]
    assert {"HybridPrefixContext", "HybridPrefixEngine", "HybridPrefixController", "PrefixCoordinator"} <= {
        cls.__name__ for cls in ours
    }
    assert {cls.__name__: names for cls in ours if (names := private_overrides(cls))} == {}
    assert "_add_request" in private_overrides(EngineSeam)


def test_only_upstream_imports_internals():
    found = [
        f"{use.where}: {use.owner.__name__}.{use.name}"
        for use in uses_outside()
        if use.how == "module" and (is_private(use.name) or not names.is_documented(use.owner.__name__))
    ]
    assert found == [], "import it in upstream/: " + "; ".join(found)


def test_only_upstream_names_modules_of_megatron():
    """Also in strings, which name the objects to replace."""
    found = [
        f"{source.name}:{node.lineno}: {node.value}"
        for source in sources_outside()
        for node in ast.walk(ast.parse(source.text))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("megatron.core.")
        and " " not in node.value
    ]
    assert found == [], "put it into upstream/modules.py: " + "; ".join(found)


def test_a_private_use_is_found():
    text = """
class HybridPrefixEngine:
    def method(self, other):
        super()._add_request(other)
        other._prefix_coordination_waits += 1
        return self._loop, self._own, self.get_request(1)
    def __init__(self):
        self._own = 1
"""
    assert private_uses(uses([Source("fake", text)])) == [
        "fake:4: _add_request",
        "fake:5: _prefix_coordination_waits",
        "fake:6: _loop",
    ]


# -- what main has changed ---------------------------------------------------------------------------------------------


def row_of(symbol: str) -> ContractRow | None:
    dotted = symbol.replace(":", ".")
    return next((entry for entry in installed_contract() if entry.symbol == dotted), None)


def has_to_change(entry: ContractRow, what: str, now: str) -> list[str]:
    """Our modules whose code must change with the name.

    Not those that have it through a module of ours, which may give them what it was; nor a call, if only optional parameters
    were added; nor an override that passes on what it does not name.
    """
    ours = overriders(resolve(entry.owner), entry.name) if entry.kind in ("overrides", "wraps") else []
    passing_on = {cls.__module__ for cls in ours if takes_any(getattr(cls, entry.name))}
    how: dict[str, set[str]] = {}
    for use in uses_outside():
        if use.name == entry.name:
            how.setdefault(use.where.partition(":")[0], set()).add(use.how)
    users = [user for user in entry.where if how.get(user) != {"through"}]
    if what != "signature":
        return users
    assert entry.signature is not None
    users = [user for user in users if f"megatron_hybrid_prefix.{user.replace('/', '.')}" not in passing_on]
    if not accepts(parameters_of(entry.signature), parameters_of(now), strict=False):
        return users
    texts = {source.name: source.text for source in scan.sources()}
    return [user for user in users if entry.kind == "overrides" and f"def {entry.name}(" in texts[user]]


def takes_any(method: Callable[..., object]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    return bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


@pytest.mark.parametrize(("symbol", "what", "now"), RENAMED, ids=lambda value: value.rpartition(".")[2][:40])
def test_what_main_has_changed_is_used_in_upstream_alone(symbol, what, now):
    entry = row_of(symbol)
    if entry is None:  # a name that is replaced: who replaces it has its place from upstream/modules.py
        module, _, name = symbol.rpartition(".")
        tables = vars(platform_patches).values()
        rebindings = [r for table in tables if isinstance(table, tuple) for r in table if hasattr(r, "owner")]
        assert (module, name) in {(rebinding.owner, rebinding.name) for rebinding in rebindings}
        return
    outside = [user for user in has_to_change(entry, what, now) if not user.startswith("upstream/")]
    assert outside == [], f"{symbol} ({what}) is used beside the adapter"


def test_what_main_has_renamed_is_read_in_upstream_alone():
    """Checked in the sources themselves, whatever the rows say."""
    gone = {symbol for symbol, what, _ in RENAMED if what != "signature"}

    def gone_uses(found: list[Use]) -> list[str]:
        return [
            f"{use.where}: {use.name}"
            for use in found
            if isinstance(use.owner, type) and f"{use.owner.__module__}:{use.owner.__name__}.{use.name}" in gone
        ]

    assert gone_uses(uses_outside()) == []
    fake = Source("fake", "def counts(allocator):\n    return allocator.total_count")
    assert gone_uses(uses([fake])) == ["fake:2: total_count"]


def test_the_list_has_names_that_would_break_us():
    broken = {
        symbol: users
        for symbol, what, now in RENAMED
        if (row := row_of(symbol)) and (users := has_to_change(row, what, now))
    }
    assert len(broken) > 10
    assert broken["megatron.core.ssm.mamba_mixer:MambaMixer._dynamic_inference_prefill"] == ["upstream/mixer"]
    assert broken["megatron.core.inference.engines.dynamic_engine:DynamicInferenceEngine.add_request"] == [
        "upstream/engine"
    ]
