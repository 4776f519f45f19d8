"""Experts in two grouped products: against a loop in float64, without host synchronisation, in checkpoints of either kind."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron_hybrid_prefix.layers.invariant import use_invariant_layers
from megatron_hybrid_prefix.models import build as models_build
from megatron_hybrid_prefix.models import build_hybrid_model, experts, get_preset, load_checkpoint, save_checkpoint
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from megatron_hybrid_prefix.ops.invariant import scope
from tests.distributed.test_expert_parallel import SHARED
from tests.harness.engine_helpers import unequal
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.naive_model import NaiveHybridModel
from tests.kernels.rounding import EXP, SILU, allowed, check

NUM_EXPERTS = 6


def build(platform, seed=0, **changes):
    return build_hybrid_model(get_preset("tiny-moe", **changes), seed=seed, platform=platform)


def layer_of(model):
    return model.decoder.layers[model.hybrid_config.layer_pattern.index("E")].mlp


# -- the products ------------------------------------------------------------------------------------------------------


def counts_of(name, num_experts):
    """Rows of each expert."""
    generator = torch.Generator().manual_seed(7)
    counts = {
        "some": torch.randint(1, 9, (num_experts,), generator=generator),
        "gaps": torch.randint(0, 2, (num_experts,), generator=generator) * 5,
        "first": torch.zeros(num_experts, dtype=torch.int64),
        "last": torch.zeros(num_experts, dtype=torch.int64),
        "one row": torch.zeros(num_experts, dtype=torch.int64),
        "none": torch.zeros(num_experts, dtype=torch.int64),
    }
    counts["first"][0], counts["last"][-1], counts["one row"][num_experts // 2] = 33, 33, 1
    return counts[name]


def inputs_of(layer, counts, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(int(counts.sum()), layer.config.hidden_size, generator=generator).to(dtype)
    return rows, counts, torch.rand(len(rows), generator=generator).to(dtype)


def one_by_one(layer, rows, counts, probs, activation, dtype=torch.float64):
    """Output of each row in ``dtype``, expert by expert; and its weighted condition in float64 (see `rounding`)."""
    outputs, conditions, at = [torch.zeros(0, rows.shape[1], dtype=dtype)], [torch.zeros(0, rows.shape[1]).double()], 0
    for number, count in enumerate(counts.tolist()):
        x, p = (part[at : at + count].to(dtype) for part in (rows, probs))
        first, second = (weights[number].to(dtype) for weights in (layer.linear_fc1_weight, layer.linear_fc2_weight))
        inner = x @ first.T
        off = (x.abs() @ first.abs().T).double() * (x.shape[1] + 1)
        if activation == "swiglu":
            gate, up = inner.chunk(2, dim=-1)
            gate_off, up_off = off.chunk(2, dim=-1)
            inner = F.silu(gate) * up
            # silu is nowhere steeper than 1.1.
            off = up.abs() * (1.1 * gate_off + SILU * F.silu(gate).abs()) + F.silu(gate).abs() * up_off + inner.abs()
        elif activation == "gelu":  # nowhere steeper than 1.2; erf counts for as much as exp
            off = 1.2 * off + (EXP + 5) * inner.abs()
            inner = F.gelu(inner)
        else:
            inner = F.relu(inner)
            off = 2 * inner.abs() * off + 2 * inner.square()
            inner = inner.square()
        inner, off = inner * p[:, None], (off + inner.abs()) * p[:, None].double()
        outputs.append(inner @ second.T)
        conditions.append((off + inner.abs().double() * (inner.shape[1] + 1)) @ second.abs().T.double())
        at += count
    return torch.cat(outputs), torch.cat(conditions)


@pytest.fixture(scope="module", params=["relu2", "gelu", "swiglu"])
def small(request, platform):
    """Experts, and their activation."""
    model = build(platform, layer_pattern="*E", num_moe_experts=NUM_EXPERTS, activation=request.param)
    return layer_of(model).experts, request.param


@pytest.fixture(scope="module")
def large(platform):
    """512 experts, as Qwen3-Next has."""
    changes = SHARED | {"num_moe_experts": 512, "moe_router_topk": 10, "moe_ffn_hidden_size": 32}
    return layer_of(build(platform, layer_pattern="*E", **changes))


def assert_right(layer, activation, counts, mutant=None):
    rows, counts, probs = inputs_of(layer, counts)
    exact, condition = one_by_one(layer, rows, counts, probs, activation)
    with torch.inference_mode():
        got, bias = layer(rows, counts if mutant is None else mutant(counts), probs)
    assert bias is None
    check(got, exact, allowed(exact, condition, torch.float32))


@pytest.mark.parametrize("name", ["some", "gaps", "first", "last", "one row", "none"])
def test_every_row_goes_through_its_expert(small, name):
    layer, activation = small
    assert_right(layer, activation, counts_of(name, NUM_EXPERTS))


@pytest.mark.parametrize("name", ["some", "gaps", "first", "last"])
def test_512_experts(large, name):
    assert_right(large.experts, "swiglu", counts_of(name, 512))


@pytest.mark.parametrize(
    "mutant",
    [
        lambda counts: counts.roll(1),
        lambda counts: counts - F.one_hot(torch.tensor(0), len(counts)) + F.one_hot(torch.tensor(1), len(counts)),
    ],
    ids=["the neighbour's expert", "one row too far"],
)
def test_a_row_at_a_wrong_expert_is_seen(small, mutant):
    layer, activation = small
    with pytest.raises(AssertionError, match="are off"):
        assert_right(layer, activation, counts_of("some", NUM_EXPERTS), mutant)


def test_bfloat16_is_as_near_as_a_loop_in_bfloat16(platform):
    layer = layer_of(build(platform, layer_pattern="*E", num_moe_experts=NUM_EXPERTS, dtype="bfloat16")).experts
    rows, counts, probs = inputs_of(layer, counts_of("gaps", NUM_EXPERTS), torch.bfloat16)
    exact, _ = one_by_one(layer, rows, counts, probs, "relu2")
    plain, _ = one_by_one(layer, rows, counts, probs, "relu2", torch.bfloat16)
    with torch.inference_mode():
        got, _ = layer(rows, counts, probs)
    assert got.dtype == torch.bfloat16
    assert 0 < (got - exact).abs().max() <= 2 * (plain - exact).abs().max()


# -- the layer ---------------------------------------------------------------------------------------------------------


def run_without_values(layer, count, monkeypatch):
    """A forward of ``count`` tokens that have a shape and no values; returns how many grouped products it had.

    What depends on a value raises: the size of a result, a number on the host. On a GPU the host would wait for it.
    """
    products = []

    def product(rows, weights, *, offs):
        products.append(len(offs))
        return rows.new_empty(len(rows), weights.shape[-1])

    mode = FakeTensorMode()
    values = [*layer.named_parameters(), *layer.named_buffers()]
    weights = {name: mode.from_tensor(value.data) for name, value in values}
    with monkeypatch.context() as patch, torch.no_grad(), mode:
        patch.setattr(F, "grouped_mm", product)
        hidden = torch.empty(count, 1, layer.config.hidden_size)
        answer, _ = torch.func.functional_call(layer, weights, (hidden,))
    assert answer.shape == (count, 1, layer.config.hidden_size)
    return products


@pytest.mark.parametrize("count", [1, 40])
def test_a_forward_of_512_experts_is_two_products_and_waits_for_no_value(large, count, monkeypatch):
    assert run_without_values(large, count, monkeypatch) == [512, 512]


def test_waiting_for_a_value_would_be_seen(large, monkeypatch):
    """With megatron's dispatcher, which takes sizes from the routing; the answer is the same."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    hidden = torch.randn(9, 1, large.config.hidden_size)
    with torch.inference_mode():
        right, _ = large(hidden)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        theirs = MoEAlltoAllTokenDispatcher(512, list(range(512)), config=large.config, pg_collection=groups)
        monkeypatch.setattr(large, "token_dispatcher", theirs)
        answer, _ = large(hidden)
    torch.testing.assert_close(answer, right)
    with pytest.raises(DataDependentOutputException):
        run_without_values(large, 9, monkeypatch)


@pytest.fixture(scope="module")
def shared(platform):
    return build(platform, **SHARED)


@pytest.mark.parametrize(
    "wrong",
    [
        {"moe_shared_expert_gate": False},
        {"moe_shared_expert_intermediate_size": 0, "moe_shared_expert_gate": False},
        {"moe_router_topk": 4},
    ],
    ids=["no gate", "no shared expert", "four of five experts"],
)
def test_a_reference_without_a_part_differs(shared, wrong):
    prompt = tokens(1, 0, seed=5)
    right = NaiveHybridModel(shared, shared.hybrid_config).log_probs(prompt)
    other = NaiveHybridModel(shared, replace(shared.hybrid_config, **wrong)).log_probs(prompt)
    best = right.argmax(-1, keepdim=True)
    assert (right - other).abs().gather(1, best).median() >= 1e-3


# -- latent experts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latent(tiny_nemotron_3):
    """A layer whose experts see 32 of a token's 64 channels; the routers' biases are random, too."""
    generator = torch.Generator().manual_seed(11)
    for name, bias in tiny_nemotron_3.named_buffers():
        if name.endswith("expert_bias"):
            bias.copy_(torch.rand(bias.shape, generator=generator) - 0.5)
    yield layer_of(tiny_nemotron_3)
    for name, bias in tiny_nemotron_3.named_buffers():
        if name.endswith("expert_bias"):
            bias.zero_()


def latent_gap(layer, model, changed=None):
    """Of a layer's output to that of the float64 reference, in which a weight has other values."""
    hidden = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(4))
    naive = NaiveHybridModel(model, model.hybrid_config)
    naive.router_scores, prefix = [], "decoder.layers.1.mlp."
    for name, change in (changed or {}).items():
        naive.weights[prefix + name] = change(naive.weights[prefix + name])
    with torch.inference_mode():
        return float((layer(hidden)[0][:, 0] - naive._experts(hidden[:, 0].double(), prefix)).abs().max())


def test_latent_experts_say_what_the_reference_says(latent, tiny_nemotron_3):
    assert layer_of(tiny_nemotron_3) is latent and type(latent.experts) is experts.GroupedExperts
    assert latent.experts.linear_fc1_weight.shape == (16, 48, 32)
    assert latent_gap(latent, tiny_nemotron_3) <= 1e-5
    for name in (
        *("fc1_latent_proj.weight", "fc2_latent_proj.weight", "router.weight", "router.expert_bias"),
        *("shared_experts.linear_fc1.weight", "experts.linear_fc1_weight"),
    ):
        assert latent_gap(latent, tiny_nemotron_3, {name: lambda weight: weight.roll(1, dims=0)}) >= 1e-3, name


def test_a_forward_of_latent_experts_waits_for_no_value(latent, monkeypatch):
    assert run_without_values(latent, 9, monkeypatch) == [16, 16]


@pytest.mark.parametrize("whose", ["ours", "subclass", "instance", "hook", "pre-hook", "gelu", "wrapped"])
def test_few_tokens_go_unsorted_to_experts_of_ours_alone(latent, tiny_nemotron_3, monkeypatch, whose):
    given, called, own = [], [], latent.experts

    def of_few(x, chosen, probs, up, down, top_k):
        assert chosen.shape == probs.shape == (40, 16) and int(chosen.sum()) == 40 * top_k
        given.append(len(x))
        inner = F.relu(torch.einsum("th,ewh->tew", x, up)) ** 2 * (probs * chosen)[..., None]
        return torch.einsum("tew,ehw->th", inner, down)

    class Other(experts.GroupedExperts):
        def forward(self, rows, *others):
            called.append(len(rows))
            return super().forward(rows, *others)

    class Wrapped(torch.nn.Module):
        def forward(self, *rows):
            called.append(len(rows[0]))
            return own(*rows)

    monkeypatch.setattr(experts, "experts_of_few", of_few)
    monkeypatch.setattr(experts, "can_run", lambda tokens: len(tokens) == 40)
    hook = None
    if whose == "subclass":
        monkeypatch.setattr(own, "__class__", Other)
    elif whose == "instance":
        monkeypatch.setattr(own, "forward", lambda *rows: called.append(len(rows[0])) or type(own).forward(own, *rows))
    elif whose == "wrapped":
        wrapped = Wrapped()
        wrapped._parameters = own._parameters
        monkeypatch.setitem(latent._modules, "experts", wrapped)
    elif whose == "gelu":
        monkeypatch.setattr(latent.config, "activation_func", lambda x: called.append(len(x)) or F.relu(x) ** 2)
    elif "hook" in whose:
        register = own.register_forward_hook if whose == "hook" else own.register_forward_pre_hook
        hook = register(lambda _, rows, *output: called.append(len(rows[0])))
    try:
        assert latent_gap(latent, tiny_nemotron_3) <= 1e-5
    finally:
        if hook:
            hook.remove()
    assert (given, called) == (([40], []) if whose == "ours" else ([], [160]))


def test_replayed_routes_that_name_an_expert_twice_are_sorted(platform, monkeypatch):
    """Zeros for padding do. The kernels of few tokens would add what was in memory before for such a token."""
    layer = layer_of(build_hybrid_model("tiny-moe", seed=0, platform=platform, moe_enable_routing_replay=True))
    monkeypatch.setattr(experts, "can_run", lambda tokens: True)
    monkeypatch.setattr(experts, "experts_of_few", lambda x, *_: torch.full_like(x, torch.nan))
    replay, outputs = layer.router.router_replay, []
    replay.set_target_indices(torch.zeros(9, layer.config.moe_router_topk, dtype=torch.int64))
    for action in (RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD):
        replay.set_router_replay_action(action)
        with torch.inference_mode():
            outputs.append(layer(torch.ones(9, 1, layer.config.hidden_size))[0])
    assert outputs[0].isnan().all() and outputs[1].isfinite().all()


def test_exact_rows_that_are_sorted_go_to_the_kernels_as_tokens_of_one_expert(platform, monkeypatch):
    """Replayed routes do; and where no kernel runs, experts say the same one by one."""
    layer = layer_of(build_hybrid_model("tiny-moe", seed=0, platform=platform, moe_enable_routing_replay=True))
    use_invariant_layers(layer)
    given, replay, outputs = [], layer.router.router_replay, []

    def of_few(x, chosen, probs, up, down, top_k):
        given.append((len(x), top_k))
        assert (chosen.sum(1) == top_k).all()
        inner = F.relu(torch.einsum("th,ewh->tew", x, up)) ** 2 * (probs * chosen)[..., None]
        return torch.einsum("tew,ehw->th", inner, down)

    monkeypatch.setattr(experts, "experts_of_few", of_few)
    hidden = torch.randn(9, 1, layer.config.hidden_size, generator=torch.Generator().manual_seed(5))
    for action, kernel in ((RouterReplayAction.RECORD, 1), (RouterReplayAction.REPLAY_FORWARD, 1), (None, 0)):
        replay.set_router_replay_action(action)
        replay.set_target_indices(replay.get_recorded_indices())
        monkeypatch.setattr(experts, "can_run", lambda tokens, kernel=kernel: bool(kernel))
        with torch.inference_mode(), scope.invariant():
            outputs.append(layer(hidden)[0])
    assert given == [(9, 2), (18, 1)]
    torch.testing.assert_close(outputs[1:], outputs[:1] * 2)


def test_a_latent_size_that_grouped_products_do_not_take_works_one_by_one(platform):
    changes = {"layer_pattern": "*E", "moe_latent_size": 30}
    config = get_preset("tiny-nemotron-3", **changes)
    model = build_hybrid_model(config, platform=platform)
    layer = layer_of(model)
    assert type(layer.experts).__name__ == "SequentialMLP"
    naive = NaiveHybridModel(model, config)
    for number in (1, 2):
        names = [
            f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc{number}.weight" for expert in range(16)
        ]
        stack = torch.stack([naive.weights[name] for name in names])
        naive.weights[f"decoder.layers.1.mlp.experts.linear_fc{number}_weight"] = stack
    naive.router_scores, hidden = [], torch.randn(40, 1, 64)
    with torch.inference_mode():
        wanted = naive._experts(hidden[:, 0].double(), "decoder.layers.1.mlp.")
        error = (layer(hidden)[0][:, 0] - wanted).abs().max()
    assert error <= 64 * torch.finfo(torch.float32).eps * wanted.abs().max()


class DuplicatedLinear(torch.nn.Linear):
    """Names and pieces of ``TELinear`` with ``parallel_mode="duplicated"``, which needs a GPU."""

    def __init__(self, columns, rows, *, parallel_mode, config, bias, **_):
        assert parallel_mode == "duplicated" and not bias
        super().__init__(columns, rows, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            dp_cp_group=metadata["dp_cp_group"],
        )


@pytest.fixture
def megatrons_latent(platform, monkeypatch):
    """A model of megatron's own latent layers, experts one by one."""
    from megatron.core.transformer.moe import moe_layer

    monkeypatch.setattr(moe_layer, "HAVE_TE", True)
    monkeypatch.setattr(moe_layer, "TELinear", DuplicatedLinear)
    monkeypatch.setattr(experts, "what_is_missing", lambda config, tp: "a reason")
    monkeypatch.setattr(experts, "ExpertsLayer", moe_layer.MoELayer)
    model = build_hybrid_model("tiny-nemotron-3", seed=6, platform=platform)
    monkeypatch.undo()
    assert type(layer_of(model)) is moe_layer.MoELayer
    return model


def test_latent_checkpoints_go_to_megatrons_layers_and_back(tiny_nemotron_3, megatrons_latent, platform, tmp_path):
    other = build_hybrid_model("tiny-nemotron-3", seed=6, platform=platform)
    assert unequal(other, megatrons_latent) == [] and unequal(other, tiny_nemotron_3)
    for saved, path in ((tiny_nemotron_3, tmp_path / "ours"), (megatrons_latent, tmp_path / "theirs")):
        save_checkpoint(saved, path)
    load_checkpoint(megatrons_latent, tmp_path / "ours")
    assert unequal(megatrons_latent, tiny_nemotron_3) == []
    for value in other.parameters():
        value.zero_()
    load_checkpoint(other, tmp_path / "theirs")
    assert unequal(other, build_hybrid_model("tiny-nemotron-3", seed=6, platform=platform)) == []


# -- one by one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sequential(platform, monkeypatch, caplog):
    """A model whose experts are megatron's, one by one."""
    monkeypatch.setattr(experts, "what_is_missing", lambda config, tp: "a reason")
    with caplog.at_level(logging.WARNING):
        model = build(platform, **SHARED)
    assert "experts are computed one by one: a reason" in caplog.text
    assert type(layer_of(model).experts).__name__ == "SequentialMLP"
    return model


def test_weights_do_not_depend_on_how_experts_are_computed(shared, sequential):
    assert unequal(shared, sequential) == []
    assert len(list(parameters_by_global_name(shared))) > 2 * 2 * SHARED["num_moe_experts"]
    hidden = torch.randn(30, 1, 64)
    with torch.inference_mode():
        torch.testing.assert_close(layer_of(shared)(hidden)[0], layer_of(sequential)(hidden)[0])


def test_each_loads_the_checkpoint_of_the_other(platform, shared, sequential, tmp_path, monkeypatch):
    monkeypatch.undo()
    for saved, path in ((shared, tmp_path / "grouped"), (sequential, tmp_path / "single")):
        save_checkpoint(saved, path)
    other = build(platform, seed=4, **SHARED)
    first = layer_of(other).experts.linear_fc1_weight
    assert not torch.equal(first, layer_of(shared).experts.linear_fc1_weight)
    load_checkpoint(other, tmp_path / "single")
    assert unequal(other, shared) == []
    for value in sequential.parameters():
        value.zero_()
    load_checkpoint(sequential, tmp_path / "grouped")
    assert unequal(sequential, shared) == []


@pytest.mark.parametrize(
    ("changes", "tp", "missing"),
    [
        ({}, 2, None),
        ({"moe_ffn_hidden_size": 30}, 1, "moe_ffn_hidden_size/tp=30 is not a multiple of 4"),
        ({"moe_ffn_hidden_size": 48}, 3, None),
        ({"moe_ffn_hidden_size": 48}, 8, "moe_ffn_hidden_size/tp=6 is not a multiple of 4"),
        ({"moe_ffn_hidden_size": 48}, 5, "tp=5 does not divide moe_ffn_hidden_size=48"),
        ({"params_dtype": torch.bfloat16, "moe_ffn_hidden_size": 12}, 1, "=12 is not a multiple of 8"),
        ({"moe_latent_size": 30, "hidden_size": 64}, 1, "moe_latent_size=30 is not a multiple of 4"),
        ({"moe_latent_size": 32, "hidden_size": 62}, 1, None),
        ({"moe_latent_size": None, "hidden_size": 62}, 1, "hidden_size=62 is not a multiple of 4"),
        ({"params_dtype": torch.float64}, 1, "does not take torch.float64"),
        ({"add_bias_linear": True}, 1, "a bias"),
        ({"moe_apply_probs_on_input": True}, 1, "moe_apply_probs_on_input"),
    ],
)
def test_what_grouped_products_cannot_do(shared, changes, tp, missing, monkeypatch):
    config = layer_of(shared).config
    for name, value in changes.items():
        monkeypatch.setattr(config, name, value)
    found = experts.what_is_missing(config, tp)
    assert found is None if missing is None else missing in found


def test_a_width_that_grouped_products_do_not_take_works_one_by_one(platform):
    model = build(platform, moe_ffn_hidden_size=30)
    assert type(layer_of(model).experts).__name__ == "SequentialMLP"
    served = EngineHarness(model, slots=None)
    assert len(served.send(tokens(1, 0, seed=1)).generated_tokens) == 4


def test_graphs_of_experts_one_by_one_are_refused(shared, monkeypatch):
    config = layer_of(shared).config
    monkeypatch.setattr(config, "cuda_graph_impl", "local")
    monkeypatch.setattr(config, "moe_ffn_hidden_size", 30)
    with pytest.raises(
        ValueError, match=r"CUDA graphs with experts need grouped experts: .*=30 is not a multiple of 4"
    ):
        experts.build_experts(2, config, pg_collection=SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1)))


@pytest.mark.parametrize("count", [1, 2, 40])
def test_rows_of_a_token_are_summed_in_one_order(shared, count):
    """Experts in the order of their numbers, whatever the router's order was."""
    layer = layer_of(shared)
    probs, routing_map = layer.router(torch.randn(count, 1, 64, generator=torch.Generator().manual_seed(count)))
    dispatcher = layer.token_dispatcher
    dispatcher.dispatch_preprocess(torch.zeros(count, 1, 64), routing_map, probs)
    of_row = torch.repeat_interleave(torch.arange(16), routing_map.sum(0))
    by_token = torch.empty_like(of_row).index_copy_(0, dispatcher._order, of_row).view(count, -1)
    assert by_token.tolist() == [row.nonzero()[:, 0].tolist() for row in routing_map]


@pytest.mark.parametrize(
    ("dtype", "ep", "capability", "message"),
    [
        (torch.bfloat16, 1, (9, 0), None),
        (torch.bfloat16, 1, (10, 0), None),
        (torch.bfloat16, 2, (9, 0), "need ep=1, not ep=2"),
        (torch.float32, 1, (9, 0), "need bfloat16: .* in torch.float32"),
        (torch.bfloat16, 1, (8, 0), "need a Hopper or Blackwell GPU: .* on a GPU"),
    ],
)
def test_graphs_that_cannot_be_captured_are_refused(dtype, ep, capability, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    if message is None:
        experts.check_capture(dtype, ep, torch.device("cuda", 0))
        return
    with pytest.raises(ValueError, match=message) as error:
        experts.check_capture(dtype, ep, torch.device("cuda", 0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"layer_pattern": "M*E"}, True),
        ({"mtp_num_layers": 1, "mtp_layer_pattern": "*E", "layer_pattern": "M*-"}, True),
        ({"layer_pattern": "M*-"}, False),
    ],
)
def test_graphs_ask_for_the_layers_that_there_are(platform, monkeypatch, changes, asked):
    """``tiny-moe`` has four experts, even where no layer uses them."""

    class BuiltError(Exception):
        pass

    def built(*_):
        raise BuiltError

    found = []
    monkeypatch.setattr(experts, "check_capture", lambda *_: found.append("capture"))
    monkeypatch.setattr(type(platform), "check_cuda_graphs", lambda *_: None)
    monkeypatch.setattr(models_build, "_transformer_config", built)
    with pytest.raises(BuiltError):
        build_hybrid_model(get_preset("tiny-moe", **changes), platform=platform, cuda_graph_impl="local")
    assert found == ["capture"] * asked


# -- fields of megatron's config ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"moe_shared_expert_overlap": True}, "^moe_shared_expert_overlap=True is not supported"),
        (
            {"transformer_impl": "inference_optimized"},
            "^transformer_impl='inference_optimized' (needs a GPU|has experts of its own)",
        ),
    ],
)
def test_fields_that_megatrons_dispatcher_answers_are_refused(platform, shared, monkeypatch, overrides, message):
    """At the start, and in a layer of somebody else's model."""
    with pytest.raises(ValueError, match=message) as error:
        build_hybrid_model(get_preset("tiny-moe", **SHARED), platform=platform, **overrides)
    assert "\n" not in str(error.value)
    layer = layer_of(shared)
    for name, value in overrides.items():
        monkeypatch.setattr(layer.config, name, value)
    with pytest.raises(ValueError, match=message):
        experts.ExpertsLayer(layer.config, layer.submodules)


def test_a_layer_without_groups_has_megatrons(shared):
    layer, hidden = layer_of(shared), torch.randn(9, 1, 64)
    other = experts.ExpertsLayer(layer.config, layer.submodules, 2)
    other.load_state_dict(layer.state_dict())
    assert other.layer_number == 2 and isinstance(other.token_dispatcher, experts.ExpertDispatcher)
    with torch.inference_mode():
        assert torch.equal(other.eval()(hidden)[0], layer(hidden)[0])


@pytest.mark.parametrize("name", ["moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"])
def test_a_cache_is_refused_where_experts_drop_tokens(platform, monkeypatch, name):
    model = build(platform)
    monkeypatch.setattr(model.config, name, 1.0)
    EngineHarness(model, slots=None)
    with pytest.raises(ValueError, match=f"^{name}=1.0 does not go with prefix caching: .* is not exact") as error:
        EngineHarness(model)
    assert "\n" not in str(error.value)
