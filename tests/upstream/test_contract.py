"""The contract with the installed megatron-core: every row holds, and a change of megatron is noticed for every row.

Tests run over all rows and name those that fail. ``test_contract_rows.py`` compares the rows with our sources.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron_hybrid_prefix.errors import UpstreamDriftError
from megatron_hybrid_prefix.upstream import check, contract
from megatron_hybrid_prefix.upstream import version as megatron_version
from megatron_hybrid_prefix.upstream.check import ContractRow, accepts, parameters_of, problem_of
from megatron_hybrid_prefix.upstream.contract import check_contract, installed_contract
from megatron_hybrid_prefix.upstream.rebinding import resolve

IN_SOURCE = ("attribute", "mark", "key")
NOT_NOTICED = "not noticed"


@pytest.fixture(autouse=True)
def started(platform):
    """Megatron's modules are imported, and missing ones replaced."""


@pytest.fixture
def fresh():
    """A function that clears the results of earlier checks; also called before and after the test."""

    def forget() -> None:
        for function in (check._assigned_in, check_contract, megatron_version.check_version):
            function.cache_clear()

    forget()
    yield forget
    forget()


def rows(*kinds: str) -> list[ContractRow]:
    """Rows of these kinds. There are some of each."""
    found = [entry for entry in installed_contract() if entry.kind in kinds]
    assert {entry.kind for entry in found} == set(kinds)
    return found


def callables() -> list[ContractRow]:
    return rows("overrides", "wraps", "calls")


def row(name: str) -> ContractRow:
    """The only row with this name."""
    (found,) = [entry for entry in installed_contract() if entry.name == name]
    return found


# -- the rows ----------------------------------------------------------------------------------------------------------


def test_all_rows_hold(fresh):
    assert [f"{entry.symbol}: {problem}" for entry in installed_contract() if (problem := problem_of(entry))] == []
    check_contract()


def test_a_row_is_there_once_and_is_complete():
    assert len(installed_contract()) > 500
    found = Counter((entry.owner, entry.name, entry.kind) for entry in installed_contract())
    assert [key for key, count in found.items() if count > 1] == []
    for entry in installed_contract():
        assert entry.where, entry.symbol
        assert bool(entry.why) == (entry.kind in ("overrides", "wraps")), entry.symbol
        assert (entry.signature is not None) == (entry.kind in ("overrides", "wraps", "calls")), entry.symbol


# -- what changes in megatron is noticed ---------------------------------------------------------------------------------


def test_a_missing_name_is_noticed():
    missed = []
    for entry in installed_contract():
        if entry.kind not in IN_SOURCE:
            with pytest.MonkeyPatch.context() as patch:
                take_away(entry, patch)
                problem = problem_of(entry) or NOT_NOTICED
            # Without its own constructor a class has that of `object`.
            expected = "expected" if entry.name == "__init__" else "found nothing"
            if expected not in problem:
                missed.append(f"{entry.symbol} ({entry.kind}): {problem}")
    assert missed == []


def test_a_missing_attribute_mark_or_key_is_noticed(fresh, monkeypatch):
    """As if all lines with the name were missing from megatron's sources."""
    entries = rows(*IN_SOURCE)
    assert [entry.symbol for entry in entries if problem_of(entry)] == []
    fresh()
    names = re.compile(rf"\b({'|'.join({entry.name for entry in entries})})\b")
    read = check.read_source
    monkeypatch.setattr(check, "read_source", lambda module: names.sub("renamed_upstream", read(module)))
    missed = []
    for entry in entries:
        with pytest.MonkeyPatch.context() as patch:
            if entry.kind == "attribute":
                take_away(entry, patch)
            if "found nothing" not in (problem_of(entry) or NOT_NOTICED):
                missed.append(entry.symbol)
    assert missed == []


def take_away(entry: ContractRow, patch: pytest.MonkeyPatch) -> None:
    """Removes a name from a module, from an enum, or from a class and all its bases but Python's."""
    owner = resolve(entry.owner)
    if isinstance(owner, enum.EnumMeta):
        others = {member.name: member.value for member in owner if member.name != entry.name}
        module, _, name = entry.owner.partition(":")
        patch.setattr(sys.modules[module], name, enum.Enum(name, others))
        return
    for holder in [owner] if inspect.ismodule(owner) else inspect.getmro(owner):
        if entry.name in vars(holder) and getattr(holder, "__module__", "") != "builtins":
            patch.delattr(holder, entry.name)


def test_a_missing_class_or_module_is_noticed():
    missed = []
    for entry in installed_contract():
        module, colon, name = entry.owner.partition(":")
        for renamed in (f"{module}_renamed{colon}{name}", *([f"{module}:{name}_renamed"] if colon else [])):
            if "_renamed" not in (problem_of(replace(entry, owner=renamed)) or NOT_NOTICED):
                missed.append(f"{entry.symbol} as {renamed}")
    assert missed == []


def test_a_changed_signature_is_noticed():
    missed, changes = [], Counter[str]()
    for entry in callables():
        entry = known_form(entry)
        for what, parameters, is_async, problem in changed(entry, parameters_of(entry.signature)):
            changes[what] += 1
            with pytest.MonkeyPatch.context() as patch:
                give(entry, parameters, patch, is_async=is_async)
                said = problem_of(entry)
            if (said is None) != (problem is None) or (problem or "") not in (said or ""):
                missed.append(f"{entry.symbol} ({entry.kind}), {what}: {said or NOT_NOTICED}")
    assert missed == []
    assert len(changes) == 8 and min(changes.values()) > 80, changes


def known_form(entry: ContractRow) -> ContractRow:
    """The row with the one signature that the installed megatron-core fits: a change may lead to that of another version."""
    for signature in (entry.signature, *entry.others):
        alone = replace(entry, signature=signature, others=())
        if problem_of(alone) is None:
            return alone
    raise AssertionError(problem_of(entry))


def changed(entry: ContractRow, found: list[Any]) -> Iterator[tuple[str, list[Any], bool, str | None]]:
    """What happens, the parameters then, whether it is a coroutine, and a part of what must be said; None: nothing."""
    assert entry.signature is not None
    is_async = entry.signature.startswith("async ")
    own = inspect.Parameter("new_one", inspect.Parameter.KEYWORD_ONLY)
    yield "nothing", found, is_async, None
    last = len(found) - any(parameter.kind is own.VAR_KEYWORD for parameter in found)
    yield "a parameter more", [*found[:last], own, *found[last:]], is_async, "new_one"
    optional = "new_one" if entry.kind == "overrides" else None
    yield "an optional parameter more", [*found[:last], own.replace(default=None), *found[last:]], is_async, optional
    yield "a coroutine, or one no more", found, not is_async, "expected"
    for index, parameter in enumerate(found):
        if parameter.name != "self" and parameter.kind not in check._VARIADIC:
            before, after = found[:index], found[index + 1 :]
            yield "a parameter less", [*before, *after], is_async, "expected"
            yield "a renamed parameter", [*before, parameter.replace(name="renamed"), *after], is_async, "renamed"
            default = "another" if parameter.default is parameter.empty else parameter.empty
            turned = [*before, parameter.replace(default=default), *after]
            if is_possible(turned):
                yield "a default more or less", turned, is_async, "expected"
            if parameter.default is not parameter.empty and f"{parameter.name}=..." not in entry.signature:
                yield "another default", [*before, parameter.replace(default="another"), *after], is_async, "another"


def is_possible(parameters: list[Any]) -> bool:
    """Whether Python allows them: a positional one without a default does not follow one with it."""
    has_default = [p.default is not p.empty for p in parameters if p.kind in check._POSITIONAL]
    return has_default == sorted(has_default)


def give(entry: ContractRow, parameters: list[Any], patch: pytest.MonkeyPatch, *, is_async: bool) -> None:
    """Gives megatron's function these parameters."""

    async def coroutine(*args: Any, **kwargs: Any) -> None: ...

    def function(*args: Any, **kwargs: Any) -> None: ...

    made: Any = coroutine if is_async else function
    made.__signature__ = inspect.Signature(parameters)
    owner = resolve(entry.owner)
    is_static = isinstance(owner, type) and (not parameters or parameters[0].name != "self")
    patch.setattr(owner, entry.name, staticmethod(made) if is_static else made)


def test_what_became_a_method_or_a_property_is_noticed():
    wrong = []
    for entry in rows("attribute", "property"):
        owner = resolve(entry.owner)
        now = [lambda self: 0] if entry.kind == "property" else [property(lambda self: 0), lambda self: 0]
        for value in now:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, entry.name, value, raising=False)
                if "found a" not in (problem_of(entry) or NOT_NOTICED):
                    wrong.append(entry.symbol)
    assert wrong == []


def test_a_function_of_an_optional_package_may_be_there_or_not(monkeypatch):
    """The contract is made on machines without compiled extensions, and checked on those that have them."""
    entries = rows("package")
    assert "megatron.core.ssm.mamba_mixer.causal_conv1d_fn" in [entry.symbol for entry in entries]
    for value, is_known in ((None, True), (lambda x, weight: x, True), (1, False)):
        for entry in entries:
            monkeypatch.setattr(resolve(entry.owner), entry.name, value)
        assert {problem_of(entry) is None for entry in entries} == {is_known}
    for entry in entries:
        monkeypatch.delattr(resolve(entry.owner), entry.name)
        assert problem_of(entry) == "expected a package, found nothing"


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


def test_the_source_of_a_class_may_hold_anything(monkeypatch, tmp_path):
    source = "if True:\n    class Late:\n        def __init__(self, pair):\n            self.kept = 1\n            setattr(*pair)\n"
    (tmp_path / "odd_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import odd_module

    monkeypatch.setattr(odd_module.Late, "__module__", "odd_module")
    assert check._assigned(odd_module.Late).own == {"kept"}
    odd_module.Late.__name__ = "Renamed"
    assert check._assigned(odd_module.Late).own == frozenset()


# -- the check before the first engine -----------------------------------------------------------------------------------


def test_all_that_is_wrong_is_one_error(monkeypatch, fresh):
    names = ("_add_request", "_handle_failed_request", "post_process_requests")
    gone = [replace(row(name), name=f"gone{name}") for name in names]
    monkeypatch.setattr(contract, "installed_contract", lambda: (*installed_contract(), *gone))
    with pytest.raises(UpstreamDriftError) as raised:
        check_contract()
    text = str(raised.value)
    assert "\n" not in text and "in 3 of " in text
    for entry in gone:
        assert f"DynamicInferenceEngine.{entry.name} ({entry.kind}, for {', '.join(entry.where)})" in text
    assert f"expected {gone[2].signature}, found nothing" in text
    assert text.startswith(f"{megatron_version.check_version()} differs")
    assert text.endswith(f"To fix this, use one that the tests were run with: {', '.join(megatron_version.RUN)}")


def test_what_only_a_wing_uses_does_not_stop_an_engine(monkeypatch, fresh):
    gone = replace(row("_add_request"), name="gone", where=("serve/ranks", "bench/engines"))
    monkeypatch.setattr(contract, "installed_contract", lambda: (gone,))
    check_contract()
    fresh()
    monkeypatch.setattr(contract, "installed_contract", lambda: (replace(gone, where=("serve/ranks", "mcore/runner")),))
    with pytest.raises(UpstreamDriftError, match="gone"):
        check_contract()


def test_a_changed_coordinator_stops_no_engine_without_one(tiny, monkeypatch, fresh):
    """As in megatron's pull request 6497."""
    from megatron.core.inference.data_parallel_inference_coordinator.coordinator import DataParallelInferenceCoordinator

    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.mcore.ranks.coordinator import CoordinatorProcess

    monkeypatch.setattr(DataParallelInferenceCoordinator, "_send_to_engine", lambda self, identity, frames: None)
    engine = build_engine(tiny)
    assert len(engine.generate(["some words"])) == 1
    listens = engine.start_listening_to_data_parallel_coordinator
    for start in (lambda: asyncio.run(listens()), lambda: CoordinatorProcess(engine, "localhost")):
        with pytest.raises(
            UpstreamDriftError, match=r"in 1 of .*_send_to_engine .*found \(self, identity, frames\)"
        ) as e:
            start()
        assert "\n" not in str(e.value)


def test_changed_experts_stop_no_model_without_them(platform, monkeypatch, fresh):
    """As in megatron's pull request 6541."""
    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.upstream.moe import MoETokenDispatcher

    def dispatch_preprocess(self, tokens, routing_map, probs, shared_expert_input=None): ...

    monkeypatch.setattr(MoETokenDispatcher, "dispatch_preprocess", dispatch_preprocess)
    build_engine(build_hybrid_model("tiny", platform=platform))
    with pytest.raises(UpstreamDriftError, match=r"in 1 of .*dispatch_preprocess .*shared_expert_input=None") as error:
        build_hybrid_model("tiny-moe", platform=platform)
    assert "\n" not in str(error.value)


def test_checked_before_the_first_engine_and_once(tiny, monkeypatch, fresh):
    from megatron.core.inference.config import InferenceConfig

    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine, install, uninstall
    from megatron_hybrid_prefix.mcore import HybridPrefixContext, HybridPrefixEngine
    from megatron_hybrid_prefix.mcore.entrypoints import install as installation

    entry = replace(row("_add_request"), name="gone")
    monkeypatch.setattr(contract, "installed_contract", lambda: (entry,))
    prefix = HybridPrefixConfig(mamba_gb=0.01)
    for build in (
        lambda: build_engine(tiny),
        lambda: build_engine(tiny, prefix),
        lambda: install(prefix),
        lambda: HybridPrefixContext(tiny.config, InferenceConfig(max_sequence_length=64), prefix),
        lambda: HybridPrefixEngine(None, None),
    ):
        fresh()
        with pytest.raises(UpstreamDriftError, match=r"DynamicInferenceEngine\.gone"):
            build()
        assert not installation._applied.rebindings
    uninstall()
    asked: list[str] = []
    monkeypatch.setattr(contract, "problem_of", lambda entry: asked.append(entry.name))
    for _ in range(2):
        build_engine(tiny)
    assert asked == ["gone"]
