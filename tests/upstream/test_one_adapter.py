"""Another megatron-core needs another `upstream/` only: no other folder of this package knows megatron's internals.

So private names, internal modules, and names that megatron has in some versions only are used in `upstream/` alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import megatron_hybrid_prefix
from megatron_hybrid_prefix.upstream.capabilities import CAPABILITIES

PACKAGE = Path(megatron_hybrid_prefix.__path__[0])
# Private names of others than megatron, and whose they are.
NOT_MEGATRONS = {
    "_exit": "os: a process that must end at once",
    "_replace": "NamedTuple",
    "_ActionsContainer": "argparse",
    "_option_string_actions": "argparse has no other way to ask for a parser's flags",
    "_torchdynamo_orig_callable": "torch: what a compiled function was made of",
}
# Modules of megatron whose names are its way to build, shard and save models; a missing one is an ImportError.
DOCUMENTED = re.compile(
    r"megatron\.(training\.|core\.models\.|core\.(activations|dist_checkpointing(\.validation)?|fusions\.fused_bias_dropout"
    r"|parallel_state|process_groups_config|ssm\.(mamba|mlp)_layer|tensor_parallel|transformer"
    r"(\.(attention|dot_product_attention|enums|mlp|module|multi_token_prediction|spec_utils|torch_norm|transformer_config"
    r"|transformer_layer))?)?$)"
)


def is_private(name: str) -> bool:
    """Whether a name is private; names of Python, such as ``__init__``, are not."""
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def sources_outside() -> dict[str, str]:
    """The text of our modules without `upstream/`, by name."""
    paths = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name: path.read_text("utf-8") for name, path in paths.items() if not name.startswith("upstream/")}
    assert {"mcore/engine/engine", "mcore/context/context", "layers/mamba2", "platform/patches"} <= found.keys()
    return found


def defined(text: str) -> Iterator[str]:
    """Names that a module defines, or assigns to its objects."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "made")
        ):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@functools.cache
def _defined_in(name: str) -> frozenset[str]:
    return frozenset(defined(sources_outside()[name]))


def private_uses(name: str, text: str) -> list[str]:
    """Private names of objects, and in ``getattr`` and the like, that no module of the folder defines."""
    folder = {other for other in sources_outside() if Path(other).parent == Path(name).parent}
    known = {*NOT_MEGATRONS, *defined(text)}.union(*(_defined_in(other) for other in folder))
    found = []
    for node in ast.walk(ast.parse(text)):
        used = ""
        if isinstance(node, ast.Attribute):
            used = node.attr
        elif (
            isinstance(node, ast.Call)
            and len(node.args) > 1
            and re.fullmatch("(get|set|has|del)attr", ast.unparse(node.func))
        ):
            used = str(getattr(node.args[1], "value", ""))
        if is_private(used) and used not in known:
            found.append(f"{name}:{node.lineno}: {used}")
    return found


def test_only_upstream_uses_private_names():
    found = [use for name, text in sources_outside().items() for use in private_uses(name, text)]
    assert found == [], "give it a neutral name in upstream/: " + "; ".join(found)


def test_a_private_use_is_found():
    text = """
class HybridPrefixEngine:
    def method(self, other):
        super()._add_request(other)
        other._prefix_coordination_waits += 1
        return self._loop, self._own, getattr(other, "_secret")
    def __init__(self):
        self._own = 1
"""
    assert sorted(private_uses("nowhere/fake", text)) == [
        "nowhere/fake:4: _add_request",
        "nowhere/fake:5: _prefix_coordination_waits",
        "nowhere/fake:6: _loop",
        "nowhere/fake:6: _secret",
    ]


def test_only_upstream_overrides_private_names(platform):
    found = []
    for name in sources_outside():
        if not name.startswith(("startup/", "__main__")):
            module = importlib.import_module(
                f"megatron_hybrid_prefix.{name.replace('/', '.').removesuffix('.__init__')}"
            )
            for cls in vars(module).values():
                if isinstance(cls, type) and cls.__module__ == module.__name__:
                    bases = [base for base in cls.__mro__ if base.__module__.startswith("megatron.")]
                    found += [f"{cls.__name__}.{name}" for name in vars(cls) for base in bases if name in vars(base)]
    assert "HybridPrefixEngine.async_step" in found
    ignored = ("_abc_impl",)
    assert [name for name in found if is_private(own := name.partition(".")[2]) and own not in ignored] == []


def test_only_upstream_imports_internals():
    found, count = [], 0
    for name, text in sources_outside().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                count += 1
                if (not DOCUMENTED.match(node.module) and node.module != "megatron.core") or any(
                    is_private(a.name) for a in node.names
                ):
                    found.append(f"{name}:{node.lineno}: {node.module}")
    assert found == [] and count > 10, "import it in upstream/: " + "; ".join(found)


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


# -- what has several forms ----------------------------------------------------------------------------------------------


def test_what_has_several_forms_is_used_in_upstream_alone():
    """Names that tell the forms apart, and methods that are marked with a form."""
    names = {re.split(r"[.:]", forms.name)[-1] for forms in CAPABILITIES.values() if ":" in forms.name}
    for path in PACKAGE.glob("upstream/*.py"):
        names |= {*re.findall(r"@only_in\(.*\n\s+def (\w+)", path.read_text())}
    assert {"pool_size", "ssm_decode", "total_avail"} <= names
    uses = re.compile(rf"\.({'|'.join(names)})\b")
    assert {name: found for name, text in sources_outside().items() if (found := uses.findall(text))} == {}


def test_only_upstream_asks_for_a_form_or_a_version():
    asks = re.compile(r"\b(form_of|only_in|CAPABILITIES|megatron\.core\.__version__|package_info)\b")
    assert [name for name, text in sources_outside().items() if asks.search(text)] == []
