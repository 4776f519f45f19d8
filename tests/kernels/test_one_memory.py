"""Every operation on KV and states, on views of one memory: the bits are those of contiguous tensors, nothing else is written.

Each also runs on views with more than 2^32 elements from their first to their last; rows of states are 256 bytes apart, and overlap. On the CPU the PyTorch versions run. On a GPU
the kernels run, megatron's too. With TRITON_INTERPRET=1 (``test_interpreted.py``) the kernels run on the host, and an
overflow of 32-bit integers is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.layers.components import (
    RINGS,
    gated_delta_net_components,
    gated_delta_product_components,
    mamba2_components,
    ring_entries,
    rings_of,
)
from megatron_hybrid_prefix.ops.checksum import checksum_rows
from megatron_hybrid_prefix.ops.convolution import convolve_from_slots, write_conv_windows
from megatron_hybrid_prefix.ops.delta_rule import scan_delta_rule, update_delta_rule
from megatron_hybrid_prefix.ops.mamba_decode import convolve_tokens, update_states
from megatron_hybrid_prefix.ops.mamba_scan import pass_states
from megatron_hybrid_prefix.ops.rings import RingRows
from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.platform.kernels import attention, attention_cuda, kv_append
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Tag
from megatron_hybrid_prefix.upstream.modules import COMMON_KERNELS
from tests.core.pools import a_mover
from tests.harness.one_memory import FAR_PAGE_BYTES, FAR_PAGES, PAGE_BLOCKS, OneMemory, bits, check_same
from tests.kernels.places import DEVICES, INTERPRETED
from tests.kernels.steps import SLOTS, Step
from tests.kernels.test_paged_attention import flash_attention_4

LAYER = 1  # that an operation gets, of several
SEEDS = 1 if INTERPRETED else 2
PLACES = [
    *([] if INTERPRETED else [("cpu", "near")]),  # the interpreter takes its time
    ("cpu", "far"),
    pytest.param(("cuda", "near"), marks=pytest.mark.gpu(gib=1)),
    pytest.param(("cuda", "far"), marks=pytest.mark.gpu(gib=27)),
]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def memory_on_device(request):
    device, distance = request.param
    if distance == "near":
        memory = OneMemory(page_bytes=24 * 1024, device=device)
    else:
        need = FAR_PAGES * FAR_PAGE_BYTES
        if device == "cuda" and torch.cuda.mem_get_info()[0] < 1.1 * need:
            pytest.skip("needs 22 GiB of a GPU")
        try:
            memory = OneMemory(page_bytes=FAR_PAGE_BYTES, device=device, sparse=True)
        except OSError as error:
            pytest.skip(f"the system reserves memory that is not written: {error}")
    return memory, device


@pytest.fixture
def place(memory_on_device):
    """A memory, and its device. Slots and blocks of a far memory are far apart; a near one is full of NaN."""
    memory, _ = memory_on_device
    if memory.page_bytes < FAR_PAGE_BYTES:
        memory.buffer.fill_(0xFF)
    return memory_on_device


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Makes Triton's interpreter check for overflows, use declared types of arguments, and leave tensors where they are."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter as of_triton
    from triton.runtime.jit import _normalize_ty

    def arguments(self, positional, named):
        types = {name: _normalize_ty(kind) for name, kind in self.fn.__annotations__.items()}

        def typed(name, value):
            if types.get(name) != "i64" or not isinstance(value, int):
                return value
            return tl.tensor(of_triton.TensorHandle(np.array([value], np.int64), tl.int64), tl.int64)

        names = [*self.arg_names[: len(positional)], *named]
        values = [typed(*pair) for pair in zip(names, [*positional, *named.values()], strict=True)]
        return values[: len(positional)], dict(zip(named, values[len(positional) :], strict=True))

    rewrite = of_triton.InterpretedFunction.rewrite

    def rewrite_with_annotations(self):
        function = rewrite(self)
        function.__annotations__.update(self.fn.__annotations__)
        return function

    monkeypatch.setattr(of_triton.GridExecutor, "_init_args_hst", arguments)
    monkeypatch.setattr(of_triton.GridExecutor, "_restore_args_dev", lambda *args: None)
    monkeypatch.setattr(of_triton.InterpretedFunction, "rewrite", rewrite_with_annotations)
    monkeypatch.setattr(of_triton.interpreter_builder, "options", of_triton.InterpreterOptions(debug=True))


def rand(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def fill(view: torch.Tensor, dim: int, indices: list[int], seed: int = 0) -> None:
    """Numbers in these slots or blocks; the others stay NaN, or zero where they are far."""
    at = torch.tensor(indices, device=view.device)
    shape = list(view.shape)
    shape[dim] = len(indices)
    view.index_copy_(dim, at, rand(view.device, *shape, seed=seed, dtype=view.dtype))


def far_step(seed: int, chunk_tokens: int) -> Step:
    """A prefill whose slots are the last of the memory."""
    step = Step.draw(seed, chunk_tokens, full=True)
    last = FAR_PAGES - SLOTS
    for slots in (step.source_slots, step.live_slots, step.chunk_slots):
        slots[:] = [slot + last if slot >= 0 else slot for slot in slots]
    return step


def step_at(at: Callable[..., torch.Tensor], step: Step, device: str) -> tuple[dict[str, torch.Tensor], ...]:
    """What a prefill is given, where slots are ``at(slots)``; and per token, its source and where its sequence starts."""
    sources, starts = step.of_tokens(device)
    slots = step.tensors(device, "source_slots", "live_slots", "chunk_slots")
    slots = {name: at(value) for name, value in slots.items()} | step.tensors(device, "first_chunks")
    return slots, {"sources": at(sources), "starts": starts, "wrong": torch.zeros_like(starts)}


HERE = [FAR_PAGES * PAGE_BLOCKS - 1 - block for block in (0, 7, 3, 40, 41, 2, 100)]


# -- KV ----------------------------------------------------------------------------------------------------------------


def test_append(place):
    memory, device = place
    append = kv_append.triton_append_key_value_cache
    if device == "cuda":
        from megatron.core.inference.contexts.fused_kv_append_kernel import triton_append_key_value_cache as append
    kv = some_states(memory).kv
    key, value = (rand(device, 6, 1, 2, 8, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    blocks = torch.tensor(HERE[:6], dtype=torch.int64, device=device)
    positions = torch.tensor([0, 1, 2, 3, 0, 1], dtype=torch.int64, device=device)
    check_same(memory, lambda at, kv: append(LAYER, key, value, kv, 5, blocks, positions), {"kv": kv})


def attend_by_triton(q, k, v, starts, lengths, longest, table):
    return attention_cuda.paged_attention(q, k, v, starts, lengths, longest, None, table)


def attend_by_torch(q, k, v, starts, lengths, longest, table):
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return attention.flash_attn_varlen_func(q, k, v, starts, ends, longest, 0, causal=True, block_table=table)


@pytest.mark.parametrize("attend", [attend_by_triton, attend_by_torch])
def test_attention(place, attend):
    memory, device = place
    if (attend is attend_by_torch) != (device == "cpu" and not INTERPRETED):
        pytest.skip("of the other device")
    shape = {"block": (4, 2, 64)} if device == "cuda" else {"dtype": torch.float32}
    kv = some_states(memory, **shape).kv
    page, dim = kv.shape[3], kv.shape[5]
    fill(kv, 2, HERE)
    lengths = torch.tensor([3 * page + 1, 2 * page], device=device)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    table = torch.tensor([HERE[:4], [*HERE[4:6], 0, 0]], dtype=torch.int32, device=device)
    q = rand(device, 4, 4, dim, seed=3, dtype=kv.dtype)
    check_same(memory, lambda at, kv: attend(q, kv[0, LAYER], kv[1, LAYER], starts, lengths, 3, table), {"kv": kv})


@pytest.mark.parametrize("dim", [128, 256])
def test_flash_attention_4(place, dim):
    memory, device = place
    if device == "cpu" or memory.page_bytes < FAR_PAGE_BYTES:
        pytest.skip("runs on GPUs, and its blocks of 256 tokens are larger than those that are near")
    kv = some_states(memory, block=(256, 2, dim)).kv
    fill(kv, 2, HERE)
    q, (q_lens, k_lens) = rand(device, 4, 8, dim, seed=3, dtype=kv.dtype), ([3, 1], [3 * 256 + 1, 2 * 256])
    table = torch.tensor([HERE[:4], [*HERE[4:6], 0, 0]], dtype=torch.int32, device=device)
    check_same(
        memory, lambda at, kv: flash_attention_4(q, kv[0, LAYER], kv[1, LAYER], table, q_lens, k_lens), {"kv": kv}
    )


def test_moves_and_comparisons_of_blocks(place):
    """A block moves, as `SharedMemory` does it; ``verify_hits`` reads blocks, as `verify_plan` does it."""
    memory, device = place
    shared = some_states(memory)
    fill(shared.kv, 2, HERE)
    ids = partial(torch.tensor, dtype=torch.int64, device=device)

    def move(at, kv, rows):
        copy_slots(rows, rows, ids([HERE[0], -1, HERE[1]]), ids([3, 4, HERE[6]]))
        return rows[:, ids([3, HERE[6]])], kv.index_select(2, ids(HERE[2:4]))

    check_same(memory, move, {"kv": shared.kv, "rows": shared.kv_rows})


# -- states ------------------------------------------------------------------------------------------------------------

CONV, SSM = (10, 4), (4, 3, 8)  # (channels, taps); (heads, channels, width)
SSM_OF_TRITON = (4, 16, 16)  # a matrix product takes 16 rows and more


def component(name: str, shape: tuple[int, ...], dtype: str = "float32") -> StateComponent:
    return StateComponent(name=name, shape=shape, dtype=dtype)


def some_states(memory: OneMemory, conv: str = "bfloat16", **fields: Any) -> SharedMemory:
    return memory.shared(component("conv", CONV, conv), component("ssm", SSM), **fields)


def test_copies_of_slots(place):
    memory, _ = place
    states = some_states(memory).states
    for seed, view in enumerate(states.values()):
        fill(memory.of_slots(view), 1, [FAR_PAGES - 1, 7, FAR_PAGES - 4], seed)

    def copy(at, **states):
        for view in states.values():
            copy_slots(view, view, at([FAR_PAGES - 1, 7, -1]), at([2, FAR_PAGES - 2, 3]))
            view[:, at([FAR_PAGES - 4])] = view.new_zeros(())

    check_same(memory, copy, {}, states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_of_mamba2(place, dtype, tokens):
    """One row flushes, one gives its state to another slot, one does both, and one is padding."""
    memory, device = place
    states = some_states(memory, dtype).states
    dtype, (heads, channels, width) = getattr(torch, dtype), SSM
    slots, kept = [-1, FAR_PAGES - 54, FAR_PAGES - 1, 17], [3, -1, 5, FAR_PAGES - 2]
    for seed, view in enumerate(states.values()):
        fill(memory.of_slots(view), 1, slots[1:], seed)
    positions, origins, ends = torch.tensor(
        [[0, 9, 5, 10], [0, 4, 2, 3], [0, 8, 2, 8]], dtype=torch.int32, device=device
    )
    x = rand(device, 4, tokens, CONV[0], seed=5, dtype=dtype)
    weight, bias = rand(device, *CONV, seed=6, dtype=dtype), rand(device, CONV[0], seed=7, dtype=dtype)
    xBC = rand(device, 4, tokens, heads * channels + 4 * width, seed=8)
    dt, D = rand(device, 4, tokens, heads, seed=9), rand(device, heads, seed=11)
    rates = {"A": -rand(device, heads, seed=10).abs(), "D": D, "dt_bias": D}
    recent = rand(device, 4, CONV[1] - 1 + tokens, CONV[0], seed=12, dtype=dtype)
    inputs = rand(device, 4, 8 + 2 * tokens, heads * channels + 2 * width, seed=13)
    steps = -rand(device, 4, 8 + 2 * tokens, 2, heads, seed=14).abs()

    def step(at, conv, ssm):
        rings = torch.arange(4, device=device)
        rows = RingRows(
            at(torch.tensor(slots, device=device)),
            rings,
            positions,
            origins,
            ends,
            at(torch.tensor(kept, device=device)),
        )
        return (
            convolve_tokens(x, conv[LAYER], weight, bias, recent=recent.clone(), rows=rows),
            update_states(xBC, dt, ssm[LAYER], rows, inputs=inputs.clone(), steps=steps.clone(), **rates),
        )

    check_same(memory, step, {}, states)


def test_decode_of_gated_delta_net(place):
    memory, device = place
    states = memory.shared(component("matrix", SSM)).states
    slots = torch.tensor([FAR_PAGES - 1, 0, -1, 17], device=device)
    fill(memory.of_slots(states["matrix"]), 1, slots[slots >= 0].tolist())
    rows, tokens, entries, (heads, keys, values) = len(slots), 2, ring_entries(4, 2), SSM
    q, k = (rand(device, rows, tokens, 2, keys, seed=seed) for seed in (1, 2))
    v, decay, beta = (rand(device, rows, tokens, heads, *size, seed=3) for size in ((values,), (), ()))
    sizes = {"keys": (2, keys), "written": (heads, values), "decays": (heads,)}
    rings = {name: -rand(device, rows, entries, *size, seed=4).abs() for name, size in sizes.items()}
    kept = torch.tensor([5, FAR_PAGES - 2, 3, -1], device=device)
    positions, origins, ends = torch.tensor(
        [[9, 6, 9, 7], [4, 4, 4, 4], [8, 4, 8, 4]], dtype=torch.int32, device=device
    )

    def step(at, matrix):
        own = RingRows(at(slots), torch.arange(rows, device=device), positions, origins, ends, at(kept))
        inputs, ring = (q, k, v, -decay.abs(), beta.sigmoid()), {name: x.clone() for name, x in rings.items()}
        return update_delta_rule(*inputs, matrix[LAYER], own, **ring, normalise=True), *ring.values()

    check_same(memory, step, {}, states)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_prefill_of_mamba2(place, seed):
    memory, device = place
    states = some_states(memory, "float32").states
    step = far_step(seed, 8)
    for number, view in enumerate(states.values()):
        fill(memory.of_slots(view), 1, sorted(set(step.source_slots)), number)
    bounds = torch.tensor(step.bounds, dtype=torch.int32, device=device)
    inputs = rand(device, step.bounds[-1], CONV[0], seed=1)
    weight, bias = rand(device, *CONV, seed=2), rand(device, CONV[0], seed=3)
    heads, channels, width = SSM
    x, B = (rand(device, step.bounds[-1], *shape, seed=4) for shape in ((heads, channels), (1, width)))
    log_decay = -rand(device, heads, len(step.lengths), 8, seed=5).abs()

    def prefill(at, conv, ssm):
        slots, per_token = step_at(at, step, device)
        convolved = convolve_from_slots(inputs, conv[LAYER], weight, bias, **per_token)
        write_conv_windows(inputs, conv[LAYER], chunk_bounds=bounds, **slots)
        before = pass_states(x, -log_decay, B, log_decay, bounds, ssm[LAYER], **slots)
        return convolved, before[: step.first_chunks[-2]]

    check_same(memory, prefill, {}, states)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_prefill_of_gated_delta_net(place, seed):
    memory, device = place
    states = memory.shared(component("conv", CONV), component("matrix", SSM_OF_TRITON)).states
    step = far_step(seed, 64)
    for number, view in enumerate(states.values()):
        fill(memory.of_slots(view), 1, sorted(set(step.source_slots)), number)
    bounds = torch.tensor(step.bounds, dtype=torch.int32, device=device)
    tokens, (heads, keys, values) = step.bounds[-1], SSM_OF_TRITON
    inputs, weight = rand(device, tokens, CONV[0], seed=1), rand(device, *CONV, seed=2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # these kernels take minutes to compile for float32
    q, k = (rand(device, tokens, 2, keys, seed=seed, dtype=dtype) for seed in (3, 4))
    v, decay = rand(device, tokens, heads, values, seed=5, dtype=dtype), -rand(device, tokens, heads, seed=6).abs()
    beta = rand(device, tokens, heads, seed=7).sigmoid()

    def prefill(at, conv, matrix):
        slots, per_token = step_at(at, step, device)
        convolved = convolve_from_slots(inputs, conv[LAYER], weight, None, **per_token)
        write_conv_windows(inputs, conv[LAYER], chunk_bounds=bounds, **slots)
        return convolved, scan_delta_rule(
            q, k, v, decay, beta, matrix[LAYER], normalise=True, chunk_bounds=bounds, **slots
        )

    check_same(memory, prefill, {}, states)


def test_a_plugins_layer(place, request):
    """Its decode and its flush are left to `SlotLayer` and `LayerKind`: one `slot_decode` after another, and copies."""
    memory, device = place
    if device == "cpu" and not INTERPRETED:
        request.getfixturevalue("platform")  # before megatron is imported
    from megatron_hybrid_prefix.layers.base import LayerKind
    from megatron_hybrid_prefix.layers.slot_layer import SlotLayer

    class Adding(SlotLayer):
        def slot_decode(self, inputs, states, slots):
            states["sum"][slots[slots >= 0]] += inputs[slots >= 0]
            return inputs

        def slot_prefill(self, inputs, states, kept, step):
            raise NotImplementedError

    states = memory.shared(component("sum", (16,))).states
    slots, kept = (torch.tensor(each, device=device) for each in ([FAR_PAGES - 1, -1, 3], [2, 4, FAR_PAGES - 2]))
    fill(memory.of_slots(states["sum"]), 1, [FAR_PAGES - 1, 3])
    inputs, after = (rand(device, 3, 3, 16, seed=seed) for seed in (1, 2))
    positions, origins = torch.tensor([[9, 9, 4], [8, 9, 4]], dtype=torch.int32, device=device)

    def step(at, sum):
        of_layer, ring = {"sum": sum[LAYER]}, {"sum_after": after.clone()}
        rows = RingRows(at(slots), torch.arange(3, device=device), positions, origins, origins, at(kept))
        Adding().slot_decode_rows(inputs, of_layer, ring, rows)
        LayerKind.flush(None, of_layer, ring, {"sum": rows._replace(positions=positions + 2, ends=positions + 2)})
        return ring["sum_after"]

    check_same(memory, step, {}, states)


@pytest.mark.parametrize("device", DEVICES)
def test_a_flush_of_all_layers_is_that_of_each(device, platform):
    """Two kinds in one memory: each component has strides of its own."""
    from megatron_hybrid_prefix.layers.kinds import KINDS  # all of them
    from megatron_hybrid_prefix.mcore.state.memory import StateMemory

    of_delta = {"channels": 112, "taps": 3, "heads": 4, "key_dim": 8, "value_dim": 20, "window_dtype": "float32"}
    components = {
        "mamba2": mamba2_components((96, 4), "float32", (4, 16, 16), "float32"),
        "gated_delta_net": gated_delta_net_components(**of_delta, state_dtype="float32"),
    }
    del of_delta["channels"]
    of_pairs = of_delta | {"pairs": 3, "groups": 2, "state_dtype": "float32"}
    components["gated_delta_product"] = gated_delta_product_components(**of_pairs)
    names = "gated_delta_net", "mamba2", "gated_delta_product", "mamba2", "gated_delta_net", "mamba2"
    slots = SlotLayout(
        tuple(StateLayout(kind=kind, layers=names.count(kind), components=of) for kind, of in components.items())
    )
    rings = rings_of(slots, RINGS, block_tokens=16, step_tokens=1, dtype="float32")
    shared = SharedMemory(slots, own_slots=8, rings=rings, requests=4, device=device)
    shared.buffer.view(torch.float32).copy_(rand(device, len(shared.buffer) // 4))
    kinds = SimpleNamespace(quanta=(16,), kind_of_layer=names, slots=slots)
    states = StateMemory(kinds, shared, max_requests=4, live_states=False, block_tokens=16, max_tokens=16)
    states.decodes.origins[:] = 16, 32, 16, 48
    live, ends, kept, before = [3, 0, 2], [53, 24, 16], [5, -1, 7], shared.buffer.clone()
    ints, origins = partial(torch.tensor, device=device), states.decodes.origins[live].tolist()
    rows = RingRows(ints(live), ints(live), ints(ends), ints(origins), ints(ends), ints(kept))
    for name, layer, ring in zip(names, states.layers, states.rings, strict=True):
        KINDS[name].flush(layer, ring, dict.fromkeys(layer, rows))
    wanted, moved = shared.buffer.clone(), (shared.buffer != before).any()
    shared.buffer.copy_(before)
    states.flush(live, ends, kept)
    assert moved and torch.equal(shared.buffer, wanted) and states.decodes.origins.tolist() == [24, 32, 16, 53]


# -- the host ----------------------------------------------------------------------------------------------------------


def test_checksums_of_slots(place):
    memory, _ = place
    shared = some_states(memory)
    fill(memory.of_slots(shared.states["ssm"]), 1, [FAR_PAGES - 1, FAR_PAGES - 2])
    words = memory.of_slots(shared.state_rows)[0, -2:, :800].view(torch.int64)  # a part of the last pages
    check_same(memory, lambda at, rows: checksum_rows(rows), {"rows": words})


@pytest.mark.parametrize("kind", [EntryKind.KV, EntryKind.STATE])
def test_to_the_host_and_back(place, kind):
    """KV as whole blocks, states by component."""
    memory, device = place
    shared = some_states(memory)
    kv, states = shared.kv_rows, list(shared.states.values())
    entry, other = (HERE[0], HERE[3]) if kind == EntryKind.KV else memory.rows([FAR_PAGES - 1, FAR_PAGES - 5]).tolist()
    own = [kv] if kind == EntryKind.KV else states
    for seed, view in enumerate(own):
        numbers = torch.randint(-99, 99, (len(view), 1, *view.shape[2:]), generator=torch.Generator().manual_seed(seed))
        view[:, [entry]] = numbers.to(device, view.dtype)
    mover = a_mover({EntryKind.KV: [kv], EntryKind.STATE: states}, device, pages=8, page_bytes=4096, least_pages=2)
    tag = Tag(kind=kind, key=b"k", depth_tokens=1, epoch=0)
    mover.carry_out([BlockTransfer(source=DEVICE, target=HOST, pages=(3, 5), tag=tag, device_id=entry)])
    mover.to_host.wait()
    load = mover.to_device.transfer(0)
    mover.carry_out([BlockTransfer(source=HOST, target=DEVICE, pages=(3, 5), tag=tag, device_id=other, load_id=0)])
    mover.to_device.wait_for(load)
    mover.drain_queues()
    assert not mover.to_device.is_wrong(load)
    for view in own:
        assert torch.equal(bits(view[:, entry]), bits(view[:, other]))
    mover.close()


@pytest.mark.skipif(not INTERPRETED, reason="only Triton's interpreter checks for overflows")
def test_an_overflow_is_seen(place, monkeypatch):
    """A kernel of megatron's, whose rows may be of 32 bits: a row times its stride overflows."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    conv, row = some_states(place[0], "float32").states["conv"][LAYER], place[0].rows([FAR_PAGES - 1])
    kernel = import_module(f"{COMMON_KERNELS}.causal_conv1d_triton").causal_conv1d_update
    update = partial(kernel, torch.ones(1, 1, CONV[0]), conv, torch.ones(CONV), None, "silu")
    update(row)
    with pytest.raises(Exception, match="overflow"):
        update(row.int())
