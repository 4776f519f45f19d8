"""Finds what our sources use of megatron, by reading them. `upstream/contract.py` is compared with it.

Overrides are found on the classes. Names that are read, written or called are found in the syntax tree: those of
``self`` and ``super()`` in classes derived from megatron's, and those of variables whose name tells their class
(`RECEIVERS`). Private names are found on any variable. Not found: names that are built at run time, and objects of
megatron under another variable name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import megatron_hybrid_prefix
from megatron_hybrid_prefix.upstream.check import attributes_of
from megatron_hybrid_prefix.upstream.rebinding import resolve

ROOT = Path(__file__).resolve().parents[2]
_INFERENCE = "megatron.core.inference"
_CONTEXT = f"{_INFERENCE}.contexts.dynamic_context:DynamicInferenceContext"
_ENGINE = f"{_INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine"
_REQUEST = f"{_INFERENCE}.inference_request:DynamicInferenceRequest"
_ALLOCATOR = f"{_INFERENCE}.contexts.kv_block_allocator:KVBlockAllocator"
_METADATA = f"{_INFERENCE}.contexts.attention_context.mamba_metadata:MambaMetadata"

# How variables and attributes with megatron's objects are called in our sources.
RECEIVERS = {
    "context": _CONTEXT,
    "_context": _CONTEXT,
    "engine": _ENGINE,
    "_engine": _ENGINE,
    "controller": f"{_INFERENCE}.text_generation_controllers.text_generation_controller:TextGenerationController",
    "req": _REQUEST,
    "request": _REQUEST,
    "head": _REQUEST,
    "old": _REQUEST,
    "new": _REQUEST,
    "part": _REQUEST,
    "merged": _REQUEST,
    "record": f"{_INFERENCE}.inference_request:DynamicInferenceRequestRecord",
    "entry": f"{_INFERENCE}.engines.dynamic_engine:RequestEntry",
    "kv_block_allocator": _ALLOCATOR,
    "allocator": _ALLOCATOR,
    "blocks": _ALLOCATOR,
    "mamba_metadata": _METADATA,
    "metadata": _METADATA,
    "inference_config": f"{_INFERENCE}.config:InferenceConfig",
    "inference_wrapped_model": f"{_INFERENCE}.model_inference_wrappers.gpt.gpt_inference_wrapper:GPTInferenceWrapper",
    "cp": "megatron.core.ssm.mamba_context_parallel:MambaContextParallel",
    "communicator": f"{_INFERENCE}.engines.async_zmq_communicator:AsyncZMQCommunicator",
    "batch_dimensions": f"{_INFERENCE}.batch_dimensions_utils:InferenceBatchDimensions",
    "padded_batch_dimensions": f"{_INFERENCE}.batch_dimensions_utils:InferenceBatchDimensions",
    "_client": f"{_INFERENCE}.inference_client:InferenceClient",
}
# Made by Python for every class.
_OF_EVERY_CLASS = {
    *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"),
    *("__static_attributes__", "__abstractmethods__", "_abc_impl", "__slots__"),
    *("__dataclass_fields__", "__dataclass_params__", "__eq__", "__hash__", "__match_args__", "__repr__"),
}


class Use(NamedTuple):
    """One name in our sources.

    Attributes:
        owner: Class of megatron that has the name. None: the name is private, and its class is unknown.
        name: The name.
        where: File and line.
        known: Whether the owner has it in the installed version.
    """

    owner: type | None
    name: str
    where: str
    known: bool


def sources() -> list[Path]:
    """Sources of the package and the tools."""
    return [*sorted((ROOT / "megatron_hybrid_prefix").rglob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]


def is_upstream(cls: type) -> bool:
    """Whether megatron defines the class."""
    return cls.__module__.startswith("megatron.")


def bases_of(cls: type) -> list[type]:
    """Megatron's classes that the class derives from."""
    return [base for base in inspect.getmro(cls) if is_upstream(base)]


def our_classes() -> list[type]:
    """Classes of the package that derive from one of megatron's."""
    found: set[type] = set()
    for module_info in pkgutil.walk_packages(megatron_hybrid_prefix.__path__, "megatron_hybrid_prefix."):
        for value in vars(importlib.import_module(module_info.name)).values():
            if isinstance(value, type) and not is_upstream(value) and bases_of(value):
                found.add(value)
    return sorted(found, key=lambda cls: cls.__qualname__)


def own_names(cls: type) -> set[str]:
    """Names that our part of the class defines."""
    ours = [base for base in inspect.getmro(cls) if base.__module__.partition(".")[0] != "builtins"]
    ours = ours[: next(index for index, base in enumerate(ours) if is_upstream(base))]
    return set().union(*(vars(base) for base in ours)) - _OF_EVERY_CLASS


def has(base: type, name: str) -> bool:
    """Whether megatron's class, or its objects, have this name."""
    return any(name in vars(cls) for cls in bases_of(base)) or name in attributes_of(base)


def overridden(cls: type) -> list[str]:
    """Names of megatron's class that our class defines again."""
    base = bases_of(cls)[0]
    return sorted(name for name in own_names(cls) if has(base, name))


def nested_classes() -> Iterator[tuple[str, str, type, set[str]]]:
    """Classes in functions and tools, which `our_classes` does not see: file, name, megatron's class, and their names."""
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        in_package = path.is_relative_to(ROOT / "megatron_hybrid_prefix")
        seen = set(tree.body) if in_package else set()
        imported = _imported(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or node in seen:
                continue
            for base in node.bases:
                cls = _value_of(base, imported)
                if isinstance(cls, type) and is_upstream(cls):
                    defined = {
                        item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                    }
                    yield path.name, node.name, cls, defined


def uses(text: str, where: str, base_of: dict[str, type]) -> Iterator[Use]:
    """Names of megatron's objects in a source.

    Args:
        text: Source text of a module.
        where: The module's name.
        base_of: Megatron's class of each of our classes, by name.
    """
    classes = {name: resolve(owner) for name, owner in RECEIVERS.items()}

    def visit(node: ast.AST, of_self: type | None, own: set[str]) -> Iterator[Use]:
        if isinstance(node, ast.ClassDef):
            of_self, own = base_of.get(node.name), _defined_in(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, of_self, own)
        found = _access(node)
        if found is None:
            return
        value, name = found
        line = f"{where}:{node.lineno}"  # type: ignore[attr-defined]
        is_private = name.startswith("_") and not name.startswith("__")
        if _is_self(value):
            if of_self is not None and (has(of_self, name) or (is_private and name not in own)):
                yield Use(of_self, name, line, has(of_self, name))
            return
        owner = classes.get(_last(value) or "")
        if owner is not None and has(owner, name):
            yield Use(owner, name, line, True)
        elif is_private and name not in of_this_module:  # another object of a class of ours
            yield Use(None, name, line, False)

    tree = ast.parse(text)
    classes_here = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name not in base_of]
    of_this_module = set().union(*map(_defined_in, classes_here))
    yield from visit(tree, None, set())


def imports(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of what a source imports from megatron at run time."""
    tree = ast.parse(text)
    imported = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            for alias in node.names:
                if not inspect.ismodule(getattr(_import(node.module or ""), alias.name, None)):
                    yield node.module or "", alias.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = imported.get(node.value.id)
            if inspect.ismodule(module):
                yield module.__name__, node.attr


def _imported(tree: ast.Module) -> dict[str, Any]:
    """What names are bound to by imports from megatron, anywhere in the module."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            module = _import(node.module or "")
            for alias in node.names:
                try:
                    value = getattr(module, alias.name)
                except AttributeError:
                    value = _import(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = value
    return found


def _import(name: str) -> Any:
    # megatron.training sets up what only training needs; its names are its documented entry points.
    return None if name.startswith("megatron.training") else importlib.import_module(name)


def _value_of(node: ast.expr, imported: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, imported), node.attr, None)
    return None


def _access(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Object and name of ``x.name``, ``getattr(x, "name")`` and the like."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and _last(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
        value, name = node.args[:2]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return value, name.value
    return None


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return _last(node.func) == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _last(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _defined_in(node: ast.ClassDef) -> set[str]:
    """Methods of a class, and names it assigns on the class or on ``self``."""
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and _is_self(item.value):
            found.add(item.attr)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
    return found
