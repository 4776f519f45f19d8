"""`upstream/check.py`: each method that this package overrides is in the installed megatron-core, and a change of it is noticed."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any, override

import pytest

import megatron_hybrid_prefix
from megatron_hybrid_prefix.errors import UpstreamDriftError
from megatron_hybrid_prefix.upstream import check, version
from megatron_hybrid_prefix.upstream.check import check_overrides


def bases_of(cls: type) -> list[type]:
    """Megatron's classes that a class derives from."""
    return [base for base in cls.__mro__ if base.__module__.startswith("megatron.")]


@pytest.fixture(scope="module")
def classes(platform) -> list[type]:
    """All classes of this package that derive from megatron's."""
    modules = [
        module.name for module in pkgutil.walk_packages(megatron_hybrid_prefix.__path__, "megatron_hybrid_prefix.")
    ]
    values = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    found = {value for value in values if isinstance(value, type) and value.__module__ in modules and bases_of(value)}
    assert len(found) > 25
    return sorted(found, key=lambda cls: cls.__qualname__)


def overridden(classes: list[type]) -> Iterator[tuple[type, str, type]]:
    """Class, method, and megatron's class with the method."""
    for cls in classes:
        for name in sorted(
            {name for ours in cls.__mro__ if ours.__module__.startswith("megatron_hybrid") for name in vars(ours)}
        ):
            base = next((base for base in bases_of(cls) if inspect.isfunction(vars(base).get(name))), None)
            if base is not None and not name.startswith("__"):
                yield cls, name, base


def problem_of(cls: type) -> str:
    """What is said about a class, or nothing."""
    check._checked.clear()
    try:
        check_overrides(cls)
    except UpstreamDriftError as error:
        return str(error)
    return ""


def test_all_methods_are_as_expected(classes):
    check_overrides(*classes)


def test_a_missing_method_is_noticed(classes):
    """So each method that replaces megatron's is marked."""
    missed, count = [], 0
    for cls, name, _ in overridden(classes):
        count += 1
        with pytest.MonkeyPatch.context() as patch:
            for base in cls.__mro__:
                if name in vars(base) and not base.__module__.startswith("megatron_hybrid"):
                    patch.delattr(base, name)
            if f".{name}, which" not in problem_of(cls) or "found nothing" not in problem_of(cls):
                missed.append(f"{cls.__name__}.{name}")
    assert missed == [] and count > 100


def test_a_missing_attribute_is_noticed(classes, monkeypatch):
    """Over which a property is defined."""
    monkeypatch.setattr(check, "is_there", lambda name: False)
    said = "".join(map(problem_of, classes))
    for name in ("_generation_epoch", "kv_hash_to_block_id", "block_ref_counts", "intermediate_chunk_indices"):
        assert f".{name}, which" in said
    assert "KVBlockAllocator.pool_avail" in said or "KVBlockAllocator.total_avail" in said


def test_a_changed_method_is_noticed(classes):
    missed = []
    for cls, name, base in overridden(classes):
        method = vars(base)[name]
        for what, parameters, is_async in changed(method, getattr(cls, name)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(base, name, made(parameters, is_async))
                if f".{name}, which" not in problem_of(cls):
                    missed.append(f"{cls.__name__}.{name}: {what}")
    assert missed == []


def made(parameters: list[inspect.Parameter], is_async: bool) -> Any:
    """A function with these parameters."""

    async def coroutine(*args: Any, **kwargs: Any) -> None: ...

    def function(*args: Any, **kwargs: Any) -> None: ...

    found: Any = coroutine if is_async else function
    found.__signature__ = inspect.Signature(parameters)
    return found


def changed(method: Any, ours: Any) -> Iterator[tuple[str, list[inspect.Parameter], bool]]:
    """What happens to megatron's method, its parameters then, and whether it is a coroutine."""
    found, is_async = [*inspect.signature(method).parameters.values()], inspect.iscoroutinefunction(method)
    mine = inspect.signature(ours).parameters
    yield "a coroutine, or one no more", found, not is_async
    kinds = {parameter.kind for parameter in mine.values()}
    new = inspect.Parameter("new_one", inspect.Parameter.KEYWORD_ONLY, default=None)
    if new.VAR_KEYWORD not in kinds:
        last = len(found) - any(parameter.kind is new.VAR_KEYWORD for parameter in found)
        yield "an optional parameter more", [*found[:last], new, *found[last:]], is_async
    for index, parameter in enumerate(found):
        if parameter.name in mine and parameter.name != "self" and parameter.kind not in check._PASSED_ON:
            before, after = found[:index], found[index + 1 :]
            yield "a parameter less", [*before, *after], is_async
            yield "a renamed parameter", [*before, parameter.replace(name="renamed"), *after], is_async
            if isinstance(parameter.default, bool | int | None):
                yield "another default", [*before, parameter.replace(default="another"), *after], is_async


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("(self, a, b=1)", "(self, a, b=1)", True),
        ("(self, a, b=1)", "(self, a, b=2)", False),
        ("(self, a, b=None)", "(self, a, b=object())", True),
        ("(self, a, b=1)", "(self, a, b)", False),
        ("(self, a, b)", "(self, b, a)", False),
        ("(self, a)", "(self, a, b=1)", False),
        ("(self, a, *args, **kwargs)", "(self, a, b=1)", True),
        ("(self, a, *args, **kwargs)", "(self, new, a)", False),
        ("(self, a, *args, **kwargs)", "(self, a, *, b)", True),
        ("(self, a, *args)", "(self, a, *, b)", False),
        ("(self, a, **kwargs)", "(self, a, b=1)", False),
        ("(self, *args, a, **kwargs)", "(self, b, a)", True),
        ("(self, *args, a, **kwargs)", "(self, b)", False),
        ("(self, *, a)", "(self, a)", False),
        ("(self, a)", "(self, a, *args)", False),
        ("(self)", "(self, a, /)", False),
    ],
)
def test_which_signatures_fit(ours, theirs, fits):
    defined: dict[str, Any] = {}
    exec(f"def ours{ours}: ...\ndef theirs{theirs}: ...", defined)
    assert (check._difference(defined["ours"], defined["theirs"]) is None) is fits


def test_what_became_something_else_is_noticed():
    problem = check._difference(test_all_methods_are_as_expected, property(lambda self: 0))
    assert problem is not None and problem.startswith("expected a function, found <property")
    assert check._difference(property(lambda self: 0), lambda self: 0).startswith(
        "expected a property, found <function"
    )


def test_what_a_form_lacks_is_not_missed(monkeypatch):
    from megatron_hybrid_prefix.upstream import capabilities
    from megatron_hybrid_prefix.upstream.engine import EngineSeam

    is_installed = capabilities.form_of("KV blocks") == "one pool"
    for form in ("one pool", "two pools"):

        @capabilities.only_in("KV blocks", form)
        def method_of_a_form(self): ...

        monkeypatch.setattr(EngineSeam, "method_of_a_form", method_of_a_form, raising=False)
        assert ("method_of_a_form" in problem_of(EngineSeam)) is ((form == "one pool") is is_installed)


def test_messages_that_the_coordinator_cannot_read_are_one_line(monkeypatch):
    """Names and signatures are the same then, and its processes would wait for each other."""
    from megatron_hybrid_prefix.mcore.ranks.coordinator import PrefixCoordinator

    monkeypatch.setattr(check, "form_of", lambda capability: "other")
    assert "CoordinatorSeam extends: coordinator's messages: expected of one frame, found other. To" in problem_of(
        PrefixCoordinator
    )


def test_with_optional_megatrons_own_coordinator_goes_on(monkeypatch, capsys):
    from megatron_hybrid_prefix.upstream.coordinator import CoordinatorSeam, _ours

    (theirs,) = bases_of(CoordinatorSeam)
    check._checked.clear()
    monkeypatch.setattr(check, "form_of", lambda capability: "other")
    with pytest.raises(UpstreamDriftError, match="found other"):
        _ours(theirs)
    monkeypatch.setenv("HYBRID_PREFIX_INSTALL", "optional")
    assert _ours(theirs) is theirs
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron_hybrid_prefix: megatron's own coordinator, HYBRID_PREFIX_INSTALL=optional: ")


# -- the check before the first engine -----------------------------------------------------------------------------------


@pytest.fixture
def gone(monkeypatch):
    """Overrides of methods that megatron does not have."""
    from megatron_hybrid_prefix.upstream.context import ContextSeam
    from megatron_hybrid_prefix.upstream.engine import EngineSeam

    @override
    def gone(self): ...

    monkeypatch.setattr(EngineSeam, "gone", gone, raising=False)
    monkeypatch.setattr(ContextSeam, "gone_too", gone, raising=False)


def test_all_that_is_wrong_is_one_error(gone):
    with pytest.raises(UpstreamDriftError) as raised:
        check_overrides()
    assert str(raised.value) == (
        f"{version.check_version()} differs from what this package expects in 2 places: "
        "DynamicInferenceContext.gone_too, which ContextSeam overrides: found nothing; "
        "DynamicInferenceEngine.gone, which EngineSeam overrides: found nothing. "
        f"To fix this, use one that the tests were run with: {', '.join(version.RUN)}"
    )


def test_a_changed_coordinator_stops_no_engine_without_one(tiny, monkeypatch):
    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.mcore.ranks.client import ReplicaClient
    from megatron_hybrid_prefix.mcore.ranks.coordinator import CoordinatorProcess
    from megatron_hybrid_prefix.upstream.client import ClientSeam
    from megatron_hybrid_prefix.upstream.coordinator import CoordinatorSeam

    monkeypatch.setattr(bases_of(CoordinatorSeam)[0], "_remove_engine", lambda self, identity, frames: None)
    monkeypatch.delattr(bases_of(ClientSeam)[0], "_recv_task")
    engine = build_engine(tiny)
    assert len(engine.generate(["some words"])) == 1
    listens = engine.start_listening_to_data_parallel_coordinator
    for start in (lambda: asyncio.run(listens()), lambda: CoordinatorProcess(engine, "localhost")):
        with pytest.raises(
            UpstreamDriftError, match=r"in 1 .*_remove_engine.* found \(self, identity, frames\)"
        ) as error:
            start()
        assert "\n" not in str(error.value)
    with pytest.raises(UpstreamDriftError, match="_recv_task"):
        ReplicaClient("tcp://localhost:1", None)


def test_changed_experts_stop_no_model_without_them(platform, monkeypatch):
    """As in megatron's pull request 6541."""
    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.upstream.moe import MoETokenDispatcher

    def dispatch_preprocess(self, tokens, routing_map, probs, shared_expert_input=None): ...

    monkeypatch.setattr(MoETokenDispatcher, "dispatch_preprocess", dispatch_preprocess)
    build_engine(build_hybrid_model("tiny", platform=platform))
    with pytest.raises(UpstreamDriftError, match=r"in 1 .*dispatch_preprocess.*shared_expert_input=None") as error:
        build_hybrid_model("tiny-moe", platform=platform)
    assert "\n" not in str(error.value)


def test_checked_before_the_first_engine_and_once(tiny, monkeypatch, fresh, gone):
    from megatron.core.inference.config import InferenceConfig

    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine, install, uninstall
    from megatron_hybrid_prefix.mcore import HybridPrefixContext, HybridPrefixEngine
    from megatron_hybrid_prefix.mcore.entrypoints import install as installation

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
    asked: list[type] = []
    monkeypatch.setattr(check, "_problems", lambda cls: asked.append(cls) or [])
    build_engine(tiny)
    assert HybridPrefixEngine in asked and len(asked) == len({*asked})
    asked.clear()
    build_engine(tiny)
    assert asked == []


def test_a_missing_name_is_one_line(monkeypatch):
    """Names are imported before anything is checked."""
    from megatron.core.inference import inference_request

    from megatron_hybrid_prefix.upstream import names

    monkeypatch.delattr(inference_request, "DynamicInferenceRequest")
    with pytest.raises(UpstreamDriftError, match=f"DynamicInferenceRequest.*run with: {version.RUN[0]}") as found:
        importlib.reload(names)
    assert "\n" not in str(found.value)
