"""`scripts/contract.py`: the contract is made of our sources, and the file with it is up to date."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_hybrid_prefix.upstream import capabilities
from megatron_hybrid_prefix.upstream.check import ContractRow, accepts, parameters_of, problem_of
from megatron_hybrid_prefix.upstream.contract import installed_contract, rows_in
from megatron_hybrid_prefix.upstream.rebinding import resolve
from scripts import contract as command
from scripts import contract_classes as classes
from scripts import contract_names as names
from scripts import contract_rows as maker
from scripts import contract_scan as scan
from scripts.contract_scan import Source, Use

ENGINE = names.RECEIVERS["engine"]
FAKE = """
from dataclasses import replace
from typing import Any
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron_hybrid_prefix.upstream.names import RequestOverflowError, SamplingParams
from megatron_hybrid_prefix.upstream import moe

class HybridPrefixContext:
    def method(self, other, engine, anything: DynamicInferenceRequest | None, request: list[int]):
        self._compute_prefix_match(); super().reset_tensors()                                                # 1
        self._never_heard_of = self._not_there                                                               # 2
        other._hidden = getattr(other, "_secret")                                                            # 3
        engine.evicted_request_count += engine.context.padded_active_token_count                             # 4
        anything.num_cached_tokens = request.status                                                          # 5
        made = SamplingParams(top_k=1); made.top_p = 0.5; made.never_heard_of = 1                            # 6
        if isinstance(other, InferenceConfig): replace(other, max_tokens=1).buffer_size_gb                   # 7
        mode = KVCacheManagementMode.OFFLOAD, Headers.ENGINE_REPLY                                           # 8
        raise RequestOverflowError(1)                                                                        # 9
        moe.SequentialMLP(1); mamba_mixer.HAVE_MAMBA_SSM                                                     # 10
        for name in NAMES: getattr(self, name)                                                               # 11
        for word in other: setattr(self, f"lifetime_{word}_count", 1)                                        # 12
        self.active_attn_metadata["mha_metadata"].state_data["max_seqlen_q"]                                 # 13
        other._mamba_num_matched_blocks = hasattr(parameter, "partition_sizes")                              # 14
        values = {"max_requests": 1}; InferenceConfig(**values)                                              # 15
        CudaGraphManager.global_mempool = None                                                               # 16

class Ours:
    def method(self, other):
        return self._own + other._own
    def __init__(self):
        self._own = 1
"""
FOUND = {
    1: {"_compute_prefix_match": "name", "reset_tensors": "name"},
    2: {"_not_there": "unknown"},  # the class defines the other one
    3: {"_hidden": "unknown", "_secret": "unknown"},
    4: {"evicted_request_count": "name", "context": "name", "padded_active_token_count": "name"},
    5: {"num_cached_tokens": "name"},
    6: {"top_k": "name", "top_p": "name"},
    7: {"max_tokens": "name"},
    8: {"OFFLOAD": "class", "ENGINE_REPLY": "class"},
    9: {"__init__": "class"},
    10: {"SequentialMLP": "through", "__init__": "class", "HAVE_MAMBA_SSM": "module"},
    11: {"paused_tokens": "name", "request_ids": "name"},
    12: {"lifetime_prefill_token_count": "name"},
    13: {"active_attn_metadata": "name", "mha_metadata": "key", "max_seqlen_q": "key"},
    14: {"_mamba_num_matched_blocks": "mark", "partition_sizes": "mark"},
    15: {"max_requests": "name"},
    16: {"global_mempool": "class"},
}


@pytest.fixture(autouse=True)
def started(platform):
    """Megatron's modules are imported, and missing ones replaced."""


@pytest.fixture(scope="module")
def found(platform):
    """All uses in our sources."""
    return maker.all_uses()


@pytest.fixture(scope="module")
def made(found):
    """The rows, and what is wrong with our sources."""
    return maker.rows_of(found)


def engine_use(name: str, how: str = "name") -> Use:
    return Use(resolve(ENGINE), name, "upstream/fake:1", how)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_our_sources_use_what_megatron_has_and_say_why_they_override(made):
    assert made[1] == []


def test_the_file_is_up_to_date(made):
    assert command.differences(installed_contract(), made[0]) == [], "run: python -m scripts.contract"


def test_no_class_in_a_function_derives_from_megatrons():
    assert [(source.name, nested) for source in scan.sources() if (nested := scan.nested_classes(source))] == [], (
        "put it into a module: overrides of a class in a function are not looked at"
    )
    text = "from megatron_hybrid_prefix.upstream.engine import EngineSeam\ndef f():\n    class Ours(EngineSeam): ..."
    assert scan.nested_classes(Source("fake", text, {"__name__": "fake"})) == ["Ours"]


def test_a_file_that_is_out_of_date_is_named_by_row(made, found):
    rows = list(made[0])
    lost, changed, moved = (next(row for row in rows if row.kind == kind) for kind in ("calls", "overrides", "key"))
    old = [row for row in rows if row not in (lost, changed, moved)]
    old += [replace(changed, signature="(self, gone)"), replace(moved, where=("elsewhere",))]
    old += [replace(lost, name="not_used")]
    said = "\n".join(command.differences(old, rows))
    assert f"{lost.symbol} (calls): has no row" in said
    assert f"{changed.symbol} (overrides): expected (self, gone), found (self" in said
    assert f"{moved.symbol} (key): ('elsewhere',)" in said
    assert "not_used (calls): not used any more" in said
    assert said.count("\n") == 3
    more, _ = maker.rows_of([*found, engine_use("evicted_request_count")])
    assert [text.split()[0].rpartition(".")[2] for text in command.differences(rows, more)] == ["evicted_request_count"]


def test_the_command(made, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(maker, "all_uses", list)
    monkeypatch.setattr(maker, "rows_of", lambda found: made)
    path = tmp_path / "contract.json"
    monkeypatch.setattr(command.contract, "PATH", path)
    assert command.main(["--check"]) == 1
    assert f"{made[0][0].symbol} (class): has no row" in capsys.readouterr().err
    assert command.main([]) == 0
    assert rows_in(path) == tuple(made[0])
    assert command.main(["--check"]) == 0
    capsys.readouterr()
    path.write_text(command.text_of(made[0][1:]))
    before = path.read_text()
    assert command.main(["--check"]) == 1
    assert f"{made[0][0].symbol} (class): has no row\nrun: python -m scripts.contract\n" in capsys.readouterr().err
    monkeypatch.setattr(maker, "rows_of", lambda found: (made[0], ["wrong"]))
    for words in (["--check"], []):
        assert command.main(words) == 1
        assert capsys.readouterr().err == "wrong\n"
    assert path.read_text() == before


def test_what_another_megatron_has_is_kept(made):
    """A row of a form that this one lacks, and another signature of a row of both."""
    row = next(row for row in made[0] if row.kind == "calls" and "*" not in row.signature)
    absent = next(name for name in sorted(capabilities._of_other_forms()))
    owner, _, name = absent.rpartition(".")
    foreign = ContractRow(owner=owner, name=name, kind="attribute", where=("upstream/fake",))
    other = replace(row, signature="(gone)")
    rows = command.merged([foreign, other], made[0])
    assert foreign in rows and len(rows) == len(made[0]) + 1
    both = next(found for found in rows if found.symbol == row.symbol and found.kind == "calls")
    assert (both.signature, both.others) == ("(gone)", (row.signature,)) and problem_of(both) is None
    assert problem_of(other) is not None
    longer = replace(other, others=(row.signature.removesuffix(")") + ", more_and_optional=None)",))
    again = next(found for found in command.merged([longer], made[0]) if found.symbol == row.symbol)
    assert again.others == (row.signature,)  # code written for it works with the longer one
    assert command.differences([foreign, *made[0]], made[0]) == []


# -- rows --------------------------------------------------------------------------------------------------------------


def test_an_override_without_a_reason_is_refused(monkeypatch):
    from megatron_hybrid_prefix.upstream.engine import EngineSeam

    use = engine_use("_handle_failed_request")
    assert maker.rows_of([use])[1] == []
    for text in (None, "", "See upstream.", "See upstream; see `refuse_request`."):
        monkeypatch.setattr(EngineSeam._handle_failed_request, "__doc__", text)
        (problem,) = maker.rows_of([use])[1]
        assert problem.startswith(
            "megatron.core.inference.engines.dynamic_engine.DynamicInferenceEngine._handle_failed_request"
        )
        assert "docstring" in problem
    monkeypatch.setattr(EngineSeam._handle_failed_request, "__doc__", "See upstream, and\n    `x`. For `y`: z. More.")
    assert maker.rows_of([use])[0][0].why == "For `y`: z"


def test_an_override_with_other_parameters_is_refused(monkeypatch):
    from megatron_hybrid_prefix.upstream.engine import EngineSeam

    def takes_another(self, request, more):
        """A reason."""

    monkeypatch.setattr(EngineSeam, "_handle_failed_request", takes_another)
    assert maker.rows_of([engine_use("_handle_failed_request")])[1] == [
        "megatron.core.inference.engines.dynamic_engine.DynamicInferenceEngine._handle_failed_request (overrides): "
        "megatron's takes (self, request_id), that of EngineSeam (self, request, more)"
    ]


def test_a_use_that_megatron_does_not_have_is_refused():
    uses = [engine_use("_gone", "unknown"), Use(None, "_exit", "cli/serve:1", "unknown")]
    assert maker.rows_of(uses)[1] == [
        "upstream/fake:1: neither our class nor megatron's DynamicInferenceEngine has _gone"
    ]
    assert "annotate the variable" in maker.rows_of([Use(None, "_gone", "upstream/fake:1", "unknown")])[1][0]


def test_the_row_of_an_optional_function_is_the_same_where_its_package_is_installed(monkeypatch):
    mixer = resolve("megatron.core.ssm.mamba_mixer")
    for value in (None, lambda x, weight: x):
        monkeypatch.setattr(mixer, "causal_conv1d_fn", value)
        rows, problems = maker.rows_of([Use(mixer, "causal_conv1d_fn", "upstream/packages:1", "module")])
        assert problems == [] and [(row.name, row.kind) for row in rows] == [("causal_conv1d_fn", "package")]


def test_the_kind_of_a_row(made):
    kinds = {(row.owner.rpartition(":")[2], row.name): row.kind for row in made[0]}
    assert {
        ("DynamicInferenceEngine", "_add_request"): "overrides",
        ("DynamicInferenceEngine", "post_process_requests"): "wraps",  # ours takes *args, **kwargs
        ("DynamicInferenceEngine", "step_modern"): "calls",
        ("DynamicInferenceEngine", "_generation_epoch"): "attribute",  # ours is a property
        ("DynamicInferenceRequest", "remaining_prompt_length"): "property",
        ("EngineState", "PAUSED"): "constant",
        ("CudaGraphManager", "global_mempool"): "constant",
        ("RequestOverflowError", "__init__"): "calls",
        ("InferenceConfig", "max_tokens"): "attribute",
    }.items() <= kinds.items()


def test_every_override_of_our_classes_has_a_row(made):
    """Found here on the classes alone."""
    rows = {(resolve(row.owner), row.name) for row in made[0]}
    ours = classes.our_classes()
    assert len(ours) >= 25
    lacking = [
        f"{cls.__name__}.{name}"
        for cls in ours
        for name in classes.overridden(cls)
        if (classes.bases_of(cls)[0], name) not in rows
    ]
    assert lacking == []


def test_names_that_a_class_has_from_megatron_are_overrides():
    base = resolve(names.RECEIVERS["context"])

    class Ours(base):
        def _update_for_nothing(self): ...

        def append_key_value_cache(self): ...

        total_request_count = None
        new_here = None

    assert classes.overridden(Ours) == ["append_key_value_cache", "total_request_count"]


def test_a_signature_is_written_so_that_it_can_be_read():
    async def function(a, /, b: int, c=1, *args, d, e=None, f=ENGINE.join, g=(1, "x"), h=float("inf"), **kwargs): ...

    text = maker.signature_of(function)
    assert text == "async (a, /, b, c=1, *args, d, e=None, f=..., g=(1, 'x'), h=..., **kwargs)"
    assert accepts(parameters_of(text), parameters_of(text), strict=True)


# -- the scan ----------------------------------------------------------------------------------------------------------


def test_every_way_to_use_a_name_is_found():
    lines = FAKE.splitlines()
    by_line: dict[int, dict[str, str]] = {}
    for use in scan.uses(
        Source("fake", FAKE, {"NAMES": ("paused_tokens", "request_ids")}), classes.megatrons_class_of_each()
    ):
        line = int(use.where.partition(":")[2])
        if "#" in lines[line - 1]:
            by_line.setdefault(int(lines[line - 1].rpartition("#")[2]), {})[use.name] = use.how
        else:
            assert use.how in ("module", "through"), use  # imports
    for number in itertools.count(1):
        if number not in FOUND:
            break
        assert by_line.pop(number, None) == FOUND[number], number
    assert by_line == {}


def test_folders_without_megatron_have_no_objects_of_it():
    text = "def f(engine):\n    return engine.context"
    for name, expected in (("mcore/fake", ["context"]), ("index/fake", [])):
        assert [use.name for use in scan.uses(Source(name, text), {})] == expected


def test_documented_names_need_no_row(platform):
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig, transformer_layer

    uses = [
        Use(parallel_state, "model_parallel_is_initialized", "platform/fake:1", "module"),
        Use(transformer_layer, "TransformerLayer", "models/fake:1", "module"),
        Use(TransformerConfig, "hidden_size", "models/fake:1", "name"),
    ]
    assert maker.rows_of(uses) == ([], [])
    private = Use(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", "platform/fake:1", "module")
    assert [row.name for row in maker.rows_of([*uses, private])[0]] == ["_TENSOR_MODEL_PARALLEL_GROUP"]
