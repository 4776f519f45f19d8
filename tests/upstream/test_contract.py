"""`upstream/contract.py`: every row holds, changes of megatron are noticed, and our sources use nothing else."""

from __future__ import annotations

import enum
import inspect
import re
import sys
import tomllib
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.errors import PlatformError, UpstreamDriftError
from megatron_hybrid_prefix.platform import patches
from megatron_hybrid_prefix.upstream import check, contract
from megatron_hybrid_prefix.upstream import version as megatron_version
from megatron_hybrid_prefix.upstream.check import Entry, accepts, parameters_of, problem_of
from megatron_hybrid_prefix.upstream.contract import CONTRACT, check_contract
from megatron_hybrid_prefix.upstream.rebinding import resolve
from tests.upstream import contract_scan as scan

ROOT = Path(__file__).resolve().parents[2]
IN_SOURCE = ("attribute", "mark", "key")
CALLABLE = [entry for entry in CONTRACT if entry.signature is not None]
# Names that our sources put together, and how they stand there.
PUT_TOGETHER = {
    "_cpu_mamba_": "_cpu_mamba_{name}",
    "mamba_intermediate_": "mamba_intermediate_{name}_states",
    "mamba_conv_states": "mamba_{name}_states",
    "mamba_ssm_states": "mamba_{name}_states",
}
# Private names of others than megatron, and whose they are.
NOT_MEGATRONS = {
    "_exit": "os: a process that must end at once",
    "_replace": "NamedTuple",
    "_option_string_actions": "argparse has no other way to ask for a parser's flags",
    "_torchdynamo_orig_callable": "torch: what a compiled function was made of",
}
# Modules of megatron whose names are its way to build, shard and save models; a missing one is an ImportError.
DOCUMENTED = (
    "megatron.core.activations",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.validation",
    "megatron.core.fusions.fused_bias_dropout",
    "megatron.core.models.",
    "megatron.core.parallel_state",
    "megatron.core.process_groups_config",
    "megatron.core.ssm.mamba_layer",
    "megatron.core.ssm.mlp_layer",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.enums",
    "megatron.core.transformer.mlp",
    "megatron.core.transformer.module",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.spec_utils",
    "megatron.core.transformer.torch_norm",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.transformer_layer",
    "megatron.training",
)


def name_of(entry: Entry) -> str:
    return f"{entry.owner.rpartition(':')[2].rpartition('.')[2]}.{entry.name}"


@pytest.fixture(autouse=True)
def started(platform):
    """Megatron's modules are imported, and missing ones replaced."""


@pytest.fixture
def fresh():
    """Clears the results of earlier checks, before and after the test."""

    def forget() -> None:
        check._assigned_in.cache_clear()
        check_contract.cache_clear()
        megatron_version.check_version.cache_clear()

    forget()
    yield forget
    forget()


# -- the table ---------------------------------------------------------------------------------------------------------


def test_all_rows_hold(fresh):
    assert [f"{entry.symbol}: {problem}" for entry in CONTRACT if (problem := problem_of(entry))] == []
    check_contract()


def test_a_row_is_there_once_and_says_why():
    assert [key for key, count in Counter((e.owner, e.name) for e in CONTRACT).items() if count > 1] == []
    for entry in CONTRACT:
        assert entry.why
        assert (entry.signature is not None) == (entry.kind in ("overrides", "wraps", "calls"))


def test_a_row_names_modules_of_ours_that_use_the_name():
    wrong = []
    for entry in CONTRACT:
        stands_for = next((form for start, form in PUT_TOGETHER.items() if entry.name.startswith(start)), entry.name)
        used = {}
        for where in entry.where.split():
            text = (ROOT / "megatron_hybrid_prefix" / f"{where}.py").read_text(encoding="utf-8")
            made = entry.name == "__init__" and re.search(rf"\b{class_of(entry)}[()]", text)  # or derived from
            used[where] = stands_for in text or bool(made)
        # A row of several names has all modules that use one of them.
        if not (all if entry.signature else any)(used.values()):
            wrong.append(f"{entry.symbol} is not used there any more: {used}; mend the row, or take it out")
    assert wrong == [], "\n".join(wrong)


def class_of(entry: Entry) -> str:
    return entry.owner.rpartition(":")[2]


# -- what changes upstream is noticed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [entry for entry in CONTRACT if entry.kind not in IN_SOURCE], ids=name_of)
def test_a_missing_name_is_noticed(entry, monkeypatch):
    assert problem_of(entry) is None
    owner = resolve(entry.owner)
    if isinstance(owner, enum.EnumMeta):
        others = {member.name: member.value for member in owner if member.name != entry.name}
        module, _, name = entry.owner.partition(":")
        monkeypatch.setattr(sys.modules[module], name, enum.Enum(name, others))
    else:
        take_away(owner, entry.name, monkeypatch)
    problem = problem_of(entry)
    assert problem is not None, "not noticed"
    assert "expected" in problem
    if entry.name != "__init__":  # then it is object's
        assert "found nothing" in problem


@pytest.mark.parametrize(
    "owner", dict.fromkeys(e.owner for e in CONTRACT if e.kind in IN_SOURCE), ids=lambda o: o[-40:]
)
def test_missing_attributes_and_keys_are_noticed(owner, monkeypatch, fresh):
    """As if all lines with the name were missing from megatron's sources."""
    entries = [entry for entry in CONTRACT if entry.owner == owner and entry.kind in IN_SOURCE]
    assert [problem_of(entry) for entry in entries] == [None] * len(entries)
    fresh()
    names = re.compile(rf"\b({'|'.join(entry.name for entry in entries)})\b")
    read = check.read_source
    monkeypatch.setattr(check, "read_source", lambda module: names.sub("renamed_upstream", read(module)))
    for entry in entries:
        if entry.kind == "attribute":
            take_away(resolve(owner), entry.name, monkeypatch)
        assert "found nothing" in (problem_of(entry) or "not noticed"), entry.name


def take_away(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes a name from a module, or from a class and all its bases."""
    for holder in [owner] if inspect.ismodule(owner) else inspect.getmro(owner)[:-1]:
        if name in vars(holder):
            monkeypatch.delattr(holder, name)


@pytest.mark.parametrize("owner", dict.fromkeys(entry.owner for entry in CONTRACT), ids=lambda owner: owner[-40:])
def test_a_missing_class_or_module_is_noticed(owner):
    module, colon, name = owner.partition(":")
    for renamed in [f"{module}_renamed{colon}{name}", *([f"{module}:{name}_renamed"] if colon else [])]:
        for entry in CONTRACT:
            if entry.owner == owner:
                assert "_renamed" in (problem_of(replace(entry, owner=renamed)) or "not noticed")


@pytest.mark.parametrize("entry", CALLABLE, ids=name_of)
def test_a_changed_signature_is_noticed(entry, monkeypatch):
    found = list(inspect.signature(getattr(resolve(entry.owner), entry.name)).parameters.values())
    own = inspect.Parameter("new_one", inspect.Parameter.KEYWORD_ONLY)
    optional = own.replace(default=None)
    give(entry, [*found, own], monkeypatch)
    assert "new_one" in (problem_of(entry) or ""), "a parameter more"
    give(entry, [*found, optional], monkeypatch)
    is_noticed = problem_of(entry) is not None
    assert is_noticed == (entry.kind == "overrides"), "an optional parameter more"
    for index, parameter in enumerate(found):
        if parameter.name == "self" or parameter.kind in check._VARIADIC:
            continue
        give(entry, found[:index] + found[index + 1 :], monkeypatch)
        assert problem_of(entry) is not None, f"without {parameter.name}"
        give(entry, [*found[:index], parameter.replace(name="renamed"), *found[index + 1 :]], monkeypatch)
        assert "renamed" in (problem_of(entry) or ""), f"{parameter.name} under another name"
    give(entry, found, monkeypatch)
    assert problem_of(entry) is None
    give(entry, found, monkeypatch, is_async=not entry.signature.startswith("async "))
    assert problem_of(entry) is not None, "a coroutine, or one no more"


def give(entry: Entry, parameters: list[Any], monkeypatch: pytest.MonkeyPatch, is_async: bool | None = None) -> None:
    """Gives megatron's function these parameters."""

    async def coroutine(*args: Any, **kwargs: Any) -> None: ...

    def function(*args: Any, **kwargs: Any) -> None: ...

    made: Any = coroutine if (entry.signature.startswith("async ") if is_async is None else is_async) else function
    parameters = sorted(parameters, key=lambda p: p.kind)
    made.__signature__ = inspect.Signature(parameters)
    owner = resolve(entry.owner)
    is_method = isinstance(owner, type) and (not parameters or parameters[0].name != "self")
    monkeypatch.setattr(owner, entry.name, staticmethod(made) if is_method else made)


def test_what_became_a_method_or_a_property_is_noticed(monkeypatch):
    cls = resolve(contract.CONTEXT[0].owner)
    entry = next(entry for entry in contract.CONTEXT if entry.name == "total_request_count")
    for now in (property(lambda self: 0), lambda self: 0):
        monkeypatch.setattr(cls, "total_request_count", now, raising=False)
        assert "found a" in (problem_of(entry) or "")
    entry = next(entry for entry in contract.REQUESTS if entry.kind == "property")
    monkeypatch.setattr(resolve(entry.owner), entry.name, lambda self: 0)
    assert problem_of(entry) == "expected a property, found a function"


@pytest.mark.parametrize(
    ("expected", "found", "strict", "works"),
    [
        ("(self, a, b=1)", "(self, a, b=1)", True, True),
        ("(self, a, b=1)", "(self, a, b=2)", True, False),
        ("(self, a, b=...)", "(self, a, b=2)", True, True),
        ("(self, a, b=...)", "(self, a, b)", True, False),
        ("(self, a, b)", "(self, b, a)", False, False),
        ("(self, a)", "(self, a, b=1)", True, False),
        ("(self, a)", "(self, a, b=1)", False, True),
        ("(self, a)", "(self, b=1, a=2)", False, False),
        ("(self, a, b=1)", "(self, a, new=0, b=1)", False, False),
        ("(self, a)", "(self, a, *, b)", False, False),
        ("(self, a)", "(self, a, /)", False, False),
        ("(self, *, a)", "(self, *, b=1, a)", False, True),
        ("(self, *, a)", "(self, a)", False, False),
        ("(self, *args)", "(self, b=1, *args)", False, False),
        ("(self, a)", "(self, a, *args, **kwargs)", False, True),
        ("(self, a)", "(self, a, **kwargs)", True, False),
        ("(self, a, **kwargs)", "(self, a)", False, False),
    ],
)
def test_which_signatures_still_work(expected, found, strict, works):
    assert accepts(parameters_of(expected), parameters_of(found), strict=strict) is works


def test_signatures_are_read_as_python_does():
    def function(a, /, b, c=1, *args, d, e=None, **kwargs): ...

    written = "(a, /, b, c=1, *args, d, e=None, **kwargs)"
    assert parameters_of(written) == list(inspect.signature(function).parameters.values())


def test_all_that_is_wrong_is_one_error(monkeypatch, fresh):
    monkeypatch.setattr(contract, "CONTRACT", (*CONTRACT, *(replace(e, name=f"gone_{e.name}") for e in CONTRACT[:3])))
    with pytest.raises(UpstreamDriftError) as raised:
        check_contract()
    text = str(raised.value)
    assert "\n" not in text
    for entry in CONTRACT[:3]:
        assert f"DynamicInferenceContext.gone_{entry.name} (overrides, for {entry.where.replace(' ', ', ')})" in text
    assert f"expected {CONTRACT[2].signature}, found nothing" in text
    assert text.startswith(f"{megatron_version.check_version()} differs")
    assert text.endswith('To fix this, install a supported version: pip install "megatron-core>=0.19.1,<0.20"')


def test_checked_before_the_first_engine_and_once(tiny, monkeypatch, fresh):
    from megatron.core.inference.config import InferenceConfig

    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine, install, uninstall
    from megatron_hybrid_prefix.mcore import HybridPrefixContext, HybridPrefixEngine
    from megatron_hybrid_prefix.mcore.entrypoints import install as installation

    entry = replace(CONTRACT[0], name="gone")
    monkeypatch.setattr(contract, "CONTRACT", (entry,))
    prefix = HybridPrefixConfig(mamba_gb=0.01)
    for build in (
        lambda: build_engine(tiny),
        lambda: build_engine(tiny, prefix),
        lambda: install(prefix),
        lambda: HybridPrefixContext(tiny.config, InferenceConfig(max_sequence_length=64), prefix),
        lambda: HybridPrefixEngine(None, None),
    ):
        fresh()
        with pytest.raises(UpstreamDriftError, match=r"DynamicInferenceContext\.gone"):
            build()
        assert not installation.installed_rebindings()
    uninstall()
    asked: list[str] = []
    monkeypatch.setattr(contract, "problem_of", lambda entry: asked.append(entry.name))
    for _ in range(2):
        build_engine(tiny)
    assert asked == ["gone"]


# -- our sources use nothing beside the table ------------------------------------------------------------------------------


def in_table(base: type, name: str) -> bool:
    return any(resolve(entry.owner) in inspect.getmro(base) for entry in CONTRACT if entry.name == name)


def row_for(base: type, name: str) -> str:
    return f"add a row of {base.__module__}:{base.__name__} for {name!r} to upstream/contract.py"


def lacking_overrides(cls: type) -> list[str]:
    base = scan.bases_of(cls)[0]
    return [f"{cls.__qualname__}.{n}: {row_for(base, n)}" for n in scan.overridden(cls) if not in_table(base, n)]


def test_an_editable_installation_is_found(monkeypatch):
    """Its namespace package has a hook instead of a folder."""
    installed = megatron_version.find_megatron()
    monkeypatch.setattr(megatron_version, "_namespace", lambda: ["__editable__.megatron_core.finder.__path_hook__"])
    assert megatron_version.find_megatron() == installed


def test_the_source_of_a_class_may_hold_anything(monkeypatch, tmp_path):
    source = "if True:\n    class Late:\n        def __init__(self, pair):\n            self.kept = 1\n            setattr(*pair)\n"
    (tmp_path / "odd_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import odd_module

    monkeypatch.setattr(odd_module.Late, "__module__", "odd_module")
    assert check._assigned(odd_module.Late).own == {"kept"}
    odd_module.Late.__name__ = "Renamed"
    assert check._assigned(odd_module.Late).own == frozenset()


def test_every_override_is_in_the_table():
    classes = scan.our_classes()
    assert len(classes) >= 8, classes
    assert [problem for cls in classes for problem in lacking_overrides(cls)] == []
    nested = [(file, name) for file, name, _, _ in scan.nested_classes()]
    assert nested == [], "put them into a module: overrides of a class in a function are not looked at"


def test_an_override_that_the_table_lacks_is_found():
    base = resolve(contract.CONTEXT[0].owner)

    class Ours(base):
        def _update_for_nothing(self): ...

        def append_key_value_cache(self): ...

        kv_block_allocator = None

        def _allocate_mamba_cache(self): ...

        total_chunks = None

    theirs = {name for name in ("append_key_value_cache", "_allocate_mamba_cache") if scan.has(base, name)}
    assert theirs
    assert {text.partition(":")[0].rpartition(".")[2] for text in lacking_overrides(Ours)} == theirs


def test_every_override_in_the_table_is_ours_and_takes_what_it_says():
    by_base: dict[type, list[type]] = {}
    for cls in scan.our_classes():
        for base in scan.bases_of(cls):
            by_base.setdefault(base, []).append(cls)
    nested = {base: defined for _, _, base, defined in scan.nested_classes()}
    for entry in CALLABLE:
        if entry.kind == "calls":
            continue
        base = resolve(entry.owner)
        if entry.name in nested.get(base, ()):
            continue
        ours = [cls for cls in by_base.get(base, ()) if entry.name in scan.own_names(cls)]
        assert ours, f"{entry.symbol} is not overridden any more: take the row out, or say what it is now"
        taken = list(inspect.signature(getattr(ours[0], entry.name)).parameters.values())
        kinds = {parameter.kind for parameter in taken}
        passes_all_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
        assert passes_all_on == (entry.kind == "wraps"), f"{entry.symbol}: 'wraps' takes *args and **kwargs"
        if entry.name != "__init__" and not kinds & {*check._VARIADIC}:
            assert accepts(parameters_of(entry.signature), taken, strict=True), entry.symbol


def unknown_uses(text: str, where: str) -> list[str]:
    base_of = {base.__name__: scan.bases_of(cls)[0] for cls in scan.our_classes() for base in ours_in(cls)}
    names = {entry.name for entry in CONTRACT}
    found = []
    for use in scan.uses(text, where, base_of):
        if use.owner is None:
            if use.name not in names and use.name not in NOT_MEGATRONS:
                found.append(f"{use.where}: {use.name} is private: add a row to upstream/contract.py")
        elif not use.known:
            found.append(f"{use.where}: neither our class nor {use.owner.__name__} has {use.name}")
        elif not in_table(use.owner, use.name) and use.name not in ("__init__", "__dict__", "__class__"):
            found.append(f"{use.where}: {row_for(use.owner, use.name)}")
    return found


def ours_in(cls: type) -> list[type]:
    return [base for base in inspect.getmro(cls) if base.__module__.startswith("megatron_hybrid_prefix")]


@pytest.mark.parametrize("path", scan.sources(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_name_that_is_used_is_in_the_table(path):
    assert unknown_uses(path.read_text(encoding="utf-8"), path.name) == []


def test_a_use_that_the_table_lacks_is_found():
    text = """
class HybridPrefixContext:
    def method(self, other, engine):
        self._allocate_mamba_cache()
        super()._allocate_mamba_cache()
        self._never_heard_of = self._not_there
        other._hidden = getattr(other, "_secret")
        engine.evicted_request_count += self.total_request_count
        return engine.context.padded_active_token_count
class Ours:
    def method(self, other):
        return self._own + other._own
    def __init__(self):
        self._own = 1
"""
    found = unknown_uses(text, "fake")
    assert [(int(re.search(r"fake:(\d+)", problem)[1]), problem.count("contract.py")) for problem in found] == [
        *((4, 1), (5, 1), (6, 0), (7, 1), (7, 1), (8, 1), (9, 1)),
    ]
    for name in ("_hidden", "_secret", "_not_there", "_allocate_mamba_cache", "padded_active_token_count"):
        assert any(name in problem for problem in found)


def test_every_import_from_megatrons_internals_is_in_the_table():
    owners = {entry.owner for entry in CONTRACT}
    rows = {(entry.owner, entry.name) for entry in CONTRACT}
    replaced = {(r.owner, r.name) for r in (*patches.HOST_MEGATRON, *patches.HOST_ATTENTION, *patches.FA4)}
    lacking = []
    for path in scan.sources():
        for module, name in scan.imports(path.read_text(encoding="utf-8")):
            value = getattr(sys.modules.get(module), name, None)
            defined_in = getattr(value, "__module__", module)
            places = {module, defined_in}
            if any((place, name) in rows | replaced or f"{place}:{name}" in owners for place in places):
                continue
            if name.startswith("_") or not is_documented(module):
                lacking.append(f"{path.name}: add a row of {module} for {name!r} to upstream/contract.py")
    assert lacking == [], "\n".join(lacking)


def is_documented(module: str) -> bool:
    return module.startswith("megatron.training.") or any(
        module == documented or (documented.endswith(".") and module.startswith(documented))
        for documented in DOCUMENTED
    )


# -- versions ----------------------------------------------------------------------------------------------------------


def package(folder: Path, version: str | None, metadata: str | None) -> Path:
    """An empty megatron-core. ``version`` is that of its sources, ``metadata`` that of pip."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    if version is not None:
        major, minor, patch, pre = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(.*)", version).groups()
        (core / "package_info.py").write_text(
            f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = '{pre}'\n"
        )
    if metadata is not None:
        (folder / "megatron_core-x.dist-info").mkdir()
        (folder / "megatron_core-x.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {metadata}\n"
        )
    return folder


@pytest.fixture
def only_this(monkeypatch, fresh):
    """Makes Python find only the megatron in this folder."""

    def use(folder: Path) -> None:
        monkeypatch.setitem(sys.modules, "megatron", types.SimpleNamespace(__path__=[str(folder / "megatron")]))
        monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
        monkeypatch.setattr(sys, "path", [str(folder)])
        fresh()

    return use


@pytest.mark.parametrize("version", ["0.19.1", "0.19.2", "0.19.3", "0.19.2+abc", "0.19.2rc1", "0.19.2.dev20260101+g1"])
def test_supported_versions(version, tmp_path, only_this):
    only_this(package(tmp_path, "0.19." + version[5], version))
    assert str(megatron_version.check_version()) == f"megatron-core {version}"


@pytest.mark.parametrize(
    "version", ["0.18.0", "0.19.0", "0.19.1rc0", "0.20.0", "0.20.0rc0", "0.20.0.dev20260101", "0.20.1", "1.0.0"]
)
def test_unsupported_versions(version, tmp_path, only_this):
    only_this(package(tmp_path, ".".join(re.findall(r"\d+", version)[:3]), version))
    assert refusal() == (
        f"megatron-core {version} is installed, supported is >=0.19.1,<0.20; "
        'install a supported version: pip install "megatron-core>=0.19.1,<0.20"'
    )


def refusal() -> str:
    """The one-line error of the two functions that start everything."""
    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.platform import ensure_platform

    said = []
    for start in (ensure_platform, lambda: build_engine(None)):
        check_contract.cache_clear()
        with pytest.raises(PlatformError) as raised:
            start()
        assert not isinstance(raised.value, UpstreamDriftError)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    return said[0]


def test_none_is_installed(tmp_path, only_this):
    only_this(tmp_path)
    assert refusal().startswith("megatron-core is not installed, supported is >=0.19.1,<0.20; install")


@pytest.mark.parametrize(
    ("sources", "metadata", "shown"),
    [
        ("0.19.2", None, "megatron-core 0.19.2 (a source build at {}, without package metadata)"),
        ("0.19.2", "main", "megatron-core 0.19.2 (a source build at {}, whose package metadata says 'main')"),
        ("0.19.3", "0.18.0", "megatron-core 0.19.3 (a source build at {}, which hides the installed 0.18.0)"),
    ],
)
def test_source_builds_in_range_are_left_to_the_table(sources, metadata, shown, tmp_path, only_this):
    only_this(package(tmp_path, sources, metadata))
    assert str(megatron_version.check_version()) == shown.format(tmp_path)


@pytest.mark.parametrize(
    ("sources", "metadata", "shown"),
    [
        ("0.20.0rc0", None, "megatron-core 0.20.0rc0 (a source build at {}, without package metadata)"),
        (None, None, "megatron-core of unknown version (a source build at {}, without package metadata)"),
        (None, "main", "megatron-core of unknown version (a source build at {}, whose package metadata says 'main')"),
        ("0.18.0", "0.19.2", "megatron-core 0.18.0 (a source build at {}, which hides the installed 0.19.2)"),
    ],
)
def test_other_source_builds_are_refused(sources, metadata, shown, tmp_path, only_this):
    only_this(package(tmp_path, sources, metadata))
    assert refusal().startswith(f"{shown.format(tmp_path)} is installed, supported is >=0.19.1,<0.20; install")


def test_pip_is_asked_for_the_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert megatron_version.REQUIREMENT in project["dependencies"]


def test_the_installed_version_is_found():
    import megatron.core

    found = megatron_version.find_megatron()
    assert found.source == ""
    assert megatron.core.__version__.partition("+")[0] == str(found.version)
