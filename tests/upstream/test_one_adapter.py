"""Another megatron-core needs another `upstream/` only: no other folder of this package knows megatron's internals.

So private names, internal modules, and names that megatron has in some versions only are used in `upstream/` alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re

import pytest

from megatron_hybrid_prefix.upstream.capabilities import CAPABILITIES
from scripts import contract_classes as classes
from scripts import contract_names as names
from scripts import contract_scan as scan
from scripts.contract_names import is_private
from scripts.contract_scan import Source, Use


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


# -- what has several forms ----------------------------------------------------------------------------------------------


def test_what_has_several_forms_is_used_in_upstream_alone():
    """Names that megatron has in some versions only, in our sources' text and among the uses that are found in it."""
    every = {name.replace(":", ".") for forms in CAPABILITIES.values() for names in forms.values() for name in names}
    assert len(every) > 10
    owners = [use for use in uses_outside() if isinstance(use.owner, type)]
    found = {
        f"{use.where}: {use.name}"
        for use in owners
        for base in inspect.getmro(use.owner)
        if f"{base.__module__}.{base.__qualname__}.{use.name}" in every
    }
    assert found == set()


def test_only_upstream_asks_for_a_form_or_a_version():
    asks = re.compile(r"\b(form_of|CAPABILITIES|megatron\.core\.__version__|package_info)\b")
    assert [source.name for source in sources_outside() if asks.search(source.text)] == []
