"""The pages of the API reference: they have every public name. (`scripts/docs.sh` builds them.)"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import megatron_hybrid_prefix
from megatron_hybrid_prefix import errors, models, platform

PAGES = Path(__file__).resolve().parents[2] / "docs" / "api"
VERBS = {"chain", "match", "admit", "plan", "publish", "abandon", "append", "release", "invalidate"}
FOR_PLUGINS = {"EvictionPolicy", "LayerKind", "SlotLayer", "Tier"}
REGISTERS = {"register_eviction_policy", "register_layer_kind", "register_tier"}


def shown() -> dict[str, object]:
    """What the pages show, by the last part of its name; it is imported as Sphinx does."""
    found: dict[str, object] = {}
    for page in sorted(PAGES.glob("*.rst")):
        module = ""
        lines = re.sub(r",\n +", ", ", page.read_text()).splitlines()  # a list of members may take several lines
        for line in lines:
            if match := re.match(r"\.\. (?:currentmodule|automodule):: (\S+)", line):
                owner = megatron_hybrid_prefix if match[1] == "megatron_hybrid_prefix" else import_module(match[1])
                module = match[1]
            elif match := re.match(r"\.\. (?:auto(?:class|function)|py:data):: (\S+)", line):
                place, _, name = match[1].rpartition(".")
                owner = getattr(import_module(place or module), name)
                found[name] = owner
            elif match := re.match(r" +:members:(.*)", line):
                names = match[1].replace(",", " ").split() or [
                    name for name, value in vars(owner).items() if getattr(value, "__module__", "") == module
                ]
                found |= {name: getattr(owner, name) for name in names}
    return found


@pytest.mark.parametrize("package", [megatron_hybrid_prefix, models, platform], ids=lambda package: package.__name__)
def test_every_public_name_is_shown(package):
    pages = shown()
    assert [name for name in package.__all__ if pages.get(name) is not getattr(package, name)] == []


def test_what_plugins_derive_from_and_the_verbs_of_the_cache_are_shown():
    assert shown().keys() >= VERBS | FOR_PLUGINS | REGISTERS | {"Registry", "PrefixStats", "TierStats"}


def test_every_error_is_shown():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes and shown().keys() >= classes
