"""Another megatron-core needs another `upstream/` only: no other folder of this package knows megatron's internals.

Tested with the changes of Megatron-LM's newest main (`megatron_main.py`): every name that our sources would have to use
differently is used in `upstream/` alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_hybrid_prefix.platform import patches as platform_patches
from megatron_hybrid_prefix.upstream.check import Entry, accepts, parameters_of
from megatron_hybrid_prefix.upstream.contract import CONTRACT
from tests.upstream import contract_scan as scan
from tests.upstream.megatron_main import RENAMED
from tests.upstream.test_contract import NOT_MEGATRONS, is_documented, ours_in

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def started(platform):
    """Megatron's modules are imported, and missing ones replaced."""


def sources_outside() -> dict[str, str]:
    """Our sources without `upstream/`: texts by module name."""
    texts = {
        path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("megatron_hybrid_prefix/"): path.read_text(
            "utf-8"
        )
        for path in scan.sources()
    }
    found = {name: text for name, text in texts.items() if not name.startswith("upstream/")}
    assert {"mcore/engine/engine", "mcore/context/context", "layers/mamba2", "platform/patches"} <= set(found)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_uses(text: str, where: str) -> list[str]:
    base_of = {base.__name__: scan.bases_of(cls)[0] for cls in scan.our_classes() for base in ours_in(cls)}
    return [
        f"{use.where}: {use.name}"
        for use in scan.uses(text, where, base_of)
        if is_private(use.name) and use.name not in NOT_MEGATRONS
    ]


def test_only_upstream_uses_private_names():
    found = [use for name, text in sources_outside().items() for use in private_uses(text, name)]
    assert found == [], "give it a neutral name in upstream/: " + "; ".join(found)


def private_overrides(cls: type) -> list[str]:
    return [name for name in scan.overridden(cls) if is_private(name) and name in vars(cls)]


def test_only_upstream_overrides_private_names():
    from megatron_hybrid_prefix.upstream.engine import EngineSeam

    modules = {f"megatron_hybrid_prefix.{name.replace('/', '.')}" for name in sources_outside()}
    classes = [cls for cls in scan.our_classes() if cls.__module__ in modules]
    assert {"HybridPrefixContext", "HybridPrefixEngine", "HybridPrefixController", "PrefixCoordinator"} <= {
        cls.__name__ for cls in classes
    }
    assert {cls.__name__: names for cls in classes if (names := private_overrides(cls))} == {}
    assert "_add_request" in private_overrides(EngineSeam)


def test_only_upstream_imports_internals():
    found = [
        f"{name}: {module}.{imported}"
        for name, text in sources_outside().items()
        for module, imported in scan.imports(text)
        if is_private(imported) or not is_documented(module)
    ]
    assert found == [], "import it in upstream/: " + "; ".join(found)


def test_only_upstream_names_modules_of_megatron():
    """Also in strings, which name the objects to replace."""
    found = [
        f"{name}:{node.lineno}: {node.value}"
        for name, text in sources_outside().items()
        for node in ast.walk(ast.parse(text))
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
    assert private_uses(text, "fake") == ["fake:4: _add_request", "fake:5: _prefix_coordination_waits", "fake:6: _loop"]


# -- what main has changed ---------------------------------------------------------------------------------------------


def row_of(symbol: str) -> Entry | None:
    dotted = symbol.replace(":", ".")
    return next((entry for entry in CONTRACT if entry.symbol == dotted), None)


def has_to_change(entry: Entry, what: str, now: str) -> list[str]:
    """Our modules whose code must change with the name. (A call need not change if only optional parameters were
    added.)
    """
    users = entry.where.split()
    if what != "signature":
        return users
    assert entry.signature is not None
    if not accepts(parameters_of(entry.signature), parameters_of(now), strict=False):
        return users
    texts = {user: (ROOT / "megatron_hybrid_prefix" / f"{user}.py").read_text(encoding="utf-8") for user in users}
    return [user for user, text in texts.items() if entry.kind == "overrides" and f"def {entry.name}(" in text]


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
    base_of = {base.__name__: scan.bases_of(cls)[0] for cls in scan.our_classes() for base in ours_in(cls)}

    def uses(texts: dict[str, str]) -> list[str]:
        return [
            f"{use.where}: {use.name}"
            for name, text in texts.items()
            for use in scan.uses(text, name, base_of)
            if use.owner is not None and f"{use.owner.__module__}:{use.owner.__name__}.{use.name}" in gone
        ]

    assert uses(sources_outside()) == []
    assert uses({"fake": "def counts(allocator):\n    return allocator.total_count"}) == ["fake:2: total_count"]


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
