"""Which kernels of a step give a row the same bits alone and beside others. Usage: ``bits_kernels.py``, on a GPU.

(On a machine without one it tries the layers only, with the kernels of the CPU, whose bits may differ.) Products, norms
log-probs, routes and experts of 1 to 4,096 rows; a Mamba2 and a Gated DeltaNet layer that prefill sequences packed, alone, in spans
that end on the grid, and padded, and decode in batches; attention that prefills, prefills in spans and decodes. A line
for each, and the exit code is 1 if bits differ. The last line is the control, cuBLAS, which must differ.
"""

from __future__ import annotations

import itertools
import sys

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.ops.delta_gates import gates
from megatron_hybrid_prefix.ops.experts import experts_of_few
from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm
from megatron_hybrid_prefix.ops.invariant.linear_triton import linear
from megatron_hybrid_prefix.ops.invariant.log_softmax import log_softmax
from megatron_hybrid_prefix.ops.invariant.norm import rms_norm
from megatron_hybrid_prefix.ops.invariant.route import largest, route
from megatron_hybrid_prefix.ops.rings import RingRows
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from tests.harness.named_models import named

COUNTS = (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 200, 256, 257, 1000, 4095, 4096)
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
QUANTA, BLOCK_TOKENS, RING = (64, 128), 256, 16
SEQUENCES = ((0, 1), (256, 63), (0, 128), (512, 300), (128, 700), (0, 1000))  # first position, tokens


def rand(*shape, seed=0, dtype=DTYPE):
    """Values of very different sizes."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randn(*shape, generator=g, device=DEVICE)
    return (values * torch.exp(torch.randn(*shape, generator=g, device=DEVICE))).to(dtype)


def rows_differ(function, *inputs):
    """For how many of `COUNTS` the rows differ from those of the largest; ``inputs`` have as many rows."""
    whole, wrong = function(*inputs), 0
    for count in COUNTS:
        for first in {0, max(COUNTS) - count}:
            got = function(*(x[first : first + count] for x in inputs))
            parts = zip(
                got if isinstance(got, tuple) else (got,), whole if isinstance(whole, tuple) else (whole,), strict=True
            )
            wrong += not all(torch.equal(a, b[first : first + count]) for a, b in parts)
    return wrong


def row_cases():
    """{name: a function without arguments that counts differences} of what computes rows."""
    most = max(COUNTS)

    def product(columns, depth, multiply=linear):
        x, weight = rand(most, depth), rand(columns, depth, seed=1)
        return lambda: rows_differ(lambda rows: multiply(rows, weight), x)

    def log_probs(vocabulary):
        logits = rand(most, vocabulary, dtype=torch.float32)
        return lambda: rows_differ(log_softmax, logits)

    def kept_log_probs():
        """What is kept of a boundary is computed from one row of a step's logits, the answer's from all of them in float32."""
        logits = rand(256, 32768)
        whole = log_softmax(logits.float())
        return sum(not torch.equal(log_softmax(row[None])[0], own) for row, own in zip(logits, whole, strict=True))

    norm_weight, a_log, dt_bias = rand(128, seed=2), rand(64, seed=3, dtype=torch.float32), rand(64, seed=4)
    cases = {
        f"product {columns} x {depth}": product(columns, depth)
        for columns, depth in ((768, 4096), (4096, 1024), (200, 21504), (18560, 256), (1, 1024))
    }
    cases |= expert_cases()
    cases |= {
        f"norm of {size}": lambda size=size: rows_differ(
            lambda x: rms_norm(x, rand(size, seed=5), 1e-5), rand(most, size)
        )
        for size in (128, 1024, 4096, 5000)
    }
    cases |= {f"log-softmax of {size}": log_probs(size) for size in (32768, 50257)}
    cases["log-softmax of rows in bfloat16, as in float32"] = kept_log_probs
    cases["head norm"] = lambda: rows_differ(
        lambda y, z: gated_rms_norm(y, norm_weight, z, 1e-6, 128, True), rand(most, 2048), rand(most, 2048, seed=6)
    )
    cases["gates"] = lambda: rows_differ(
        lambda alpha, beta: gates(alpha, beta, a_log, dt_bias), rand(most, 64), rand(most, 64, seed=7)
    )
    return cases, product(768, 4096, F.linear)


def expert_cases():
    """The same for routers and experts."""

    def routes(experts, top_k, groups=None, of_groups=None, **fields):
        """Logits of few digits: many scores are equal."""
        logits = rand(max(COUNTS), experts, seed=3).float().round(decimals=1)
        sizes = top_k, groups, of_groups
        return rows_differ(lambda x: route(x, lambda scores: largest(scores, *sizes)[1], **fields), logits)

    def made(experts, width, hidden, parts, top_k):
        shapes = (max(COUNTS), hidden), (experts, parts * width, hidden), (experts, hidden, width)
        x, up, down = (rand(*shape, seed=seed) for seed, shape in enumerate(shapes))
        probs = torch.rand(len(x), experts, generator=torch.Generator(DEVICE).manual_seed(4), device=DEVICE)
        chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(top_k).indices, True)
        return x, chosen, (probs * chosen).to(DTYPE), up, down, top_k

    def alone(*sizes):
        x, chosen, probs, *weights = made(*sizes)
        return rows_differ(lambda *some: experts_of_few(*some, *weights), x, chosen, probs)

    def sorted_by_expert(*sizes):
        """As rows of other ranks are: tokens of one expert each."""
        x, chosen, probs, up, down, top_k = given = made(*sizes)
        numbers = chosen.nonzero()[:, 1]
        order = numbers.argsort(stable=True)
        one = numbers[order, None] == torch.arange(sizes[0], device=DEVICE)
        rows = experts_of_few(x[order // top_k], one, one * probs[order // top_k], up, down, 1)
        together = torch.empty_like(rows).index_copy_(0, order, rows).view(len(x), top_k, -1).sum(1)
        return int(not torch.equal(together, experts_of_few(*given)))

    real = {"squared ReLU": (32, 1856, 2688, 1, 6), "SwiGLU": (64, 512, 2048, 2, 10)}
    weight = rand(128, 2688, seed=1)
    scores = {"sigmoid": {"score_function": "sigmoid", "scaling_factor": 2.5}, "softmax": {"score_function": "softmax"}}
    scores["sigmoid, in groups"] = scores["sigmoid"] | {"groups": 8, "of_groups": 2}
    return {
        "product in float32": lambda: rows_differ(lambda x: linear(x, weight, dtype=torch.float32), rand(4096, 2688)),
        **{f"routes by {name}": lambda own=own: routes(512, 10, **own) for name, own in scores.items()},
        **{f"experts, {name}": lambda own=own: alone(*own) for name, own in real.items()},
        **{f"experts, {name}, sorted": lambda own=own: sorted_by_expert(*own) for name, own in real.items()},
    }


def steps_of(spans, *, padded_tokens=0, padded_sequences=0):
    """A `PrefillStep` on the GPU."""
    tokens = sum(span.tokens for span in spans) + padded_tokens
    sequences = len(spans) + padded_sequences
    step = PrefillStep(
        quanta=QUANTA, block_tokens=BLOCK_TOKENS, max_tokens=tokens, max_sequences=sequences, device=DEVICE
    )
    step.prepare(spans, tokens=tokens, sequences=sequences)
    step.copy()
    step.show()
    if ON_GPU:
        torch.cuda.synchronize()
    return step


def layer_cases(model):
    """The same for recurrent layers."""
    from megatron_hybrid_prefix.layers.kinds import recurrent_modules, use_slot_mixers

    use_slot_mixers(model)
    first_of = {kind.name: (kind, module) for kind, module in reversed(list(recurrent_modules(model)))}
    starts = [0, *itertools.accumulate(tokens for _, tokens in SEQUENCES)]
    count, total = len(SEQUENCES), starts[-1]

    def states_of(module, kind, slots):
        parts = kind.components(module, state_dtype=torch.float32, window_dtype=None)
        return {part.name: 0.1 * rand(slots, *part.shape, seed=8, dtype=getattr(torch, part.dtype)) for part in parts}

    def prefill(module, states, x, step):
        if hasattr(module, "slot_prefill"):
            return module.slot_prefill(x, states, states, step).reshape(len(x), -1)
        conv, ssm = states.values()
        return module.prefill(x.unsqueeze(1), step, conv, ssm).reshape(len(x), -1)

    def spans(chosen):
        """Sequence i starts from slot i, and ends in slot ``count + i``."""
        return [
            PrefillSpan(start_tokens=SEQUENCES[i][0], tokens=SEQUENCES[i][1], source_slot=i, live_slot=count + i)
            for i in chosen
        ]

    def check_prefill(kind, module):
        width = module.in_proj.weight.shape[0]
        x, clean = rand(total, width, seed=9), states_of(module, kind, 2 * count + 1)

        def run(chosen, **padding):
            own = {part: state.clone() for part, state in clean.items()}
            rows = torch.cat([x[starts[i] : starts[i + 1]] for i in chosen])
            padded = torch.cat([rows, rand(padding.get("padded_tokens", 0), width, seed=10)])
            return prefill(module, own, padded, steps_of(spans(chosen), **padding))[: len(rows)], own

        def in_spans(i):
            own = {part: state.clone() for part, state in clean.items()}
            start, tokens = SEQUENCES[i]
            outputs, at = [], 0
            while at < tokens:
                end = min(tokens, (start + at) // 128 * 128 + 128 * (1 + len(outputs) % 2) - start)
                span = PrefillSpan(
                    start_tokens=start + at, tokens=end - at, source_slot=count + i if at else i, live_slot=count + i
                )
                outputs.append(prefill(module, own, x[starts[i] + at : starts[i] + end], steps_of([span])))
                at = end
            return torch.cat(outputs), own

        def same(got, truth, i):
            (y, own), (wanted, states_wanted) = got, truth
            return torch.equal(y, wanted) and all(
                torch.equal(own[part][count + i], states_wanted[part][count + i]) for part in own
            )

        alone = [run([i]) for i in range(count)]
        wrong = 0
        for chosen in (range(count), [3, 0, 5], [5, 4, 3, 2, 1, 0], [4]):
            y, own = run(list(chosen), padded_tokens=37 * len(chosen), padded_sequences=len(chosen) - 1)
            at = 0
            for i in chosen:
                tokens = SEQUENCES[i][1]
                wrong += not same((y[at : at + tokens], own), alone[i], i)
                at += tokens
        return wrong, sum(not same(in_spans(i), alone[i], i) for i in range(count))

    def check_decode(kind, module):
        """The last of so many steps that each row has flushed once; in it some do."""
        width, rows = module.in_proj.weight.shape[0], 64
        clean, phases = states_of(module, kind, rows + 1), torch.arange(rows, device=DEVICE) % RING
        parts = kind.components(module, state_dtype=torch.float32, window_dtype=None)
        like = kind.ring(parts, RING, 1, str(DTYPE).removeprefix("torch."))
        empty = {part.name: rand(rows, *part.shape, seed=12, dtype=getattr(torch, part.dtype)) for part in like}

        def run(states, rings, step, chosen, padding=0):
            states, rings = ({name: x.clone() for name, x in own.items()} for own in (states, rings))
            at = torch.tensor([*chosen, *[0] * padding], device=DEVICE)
            position = 4 * RING + phases[at] + step
            end, origin = (torch.maximum(4 * RING + phases[at], p // RING * RING) for p in (position, position - 1))
            slots = torch.where(torch.arange(len(at), device=DEVICE) < len(chosen), at, NO_SLOT)
            own = RingRows(slots, at, *(x.int() for x in (position, origin, end)), torch.full_like(at, NO_SLOT))
            inputs = torch.cat([rand(rows, width, seed=100 + step)[list(chosen)], rand(padding, width, seed=13)])
            decode = module.slot_decode_rows if hasattr(module, "slot_decode_rows") else module.decode
            y = decode(inputs.unsqueeze(1), states, rings, own)
            return y.reshape(len(at), -1)[: len(chosen)], states, rings

        for step in range(RING):
            _, clean, empty = run(clean, empty, step, range(rows))
        whole, *after = run(clean, empty, RING, range(rows))
        wrong = 0
        for chosen, padding in (([5], 0), ([5], 3), (range(7), 1), (range(40, 64), 0), ([9, 3, 60], 61)):
            y, *kept = run(clean, empty, RING, list(chosen), padding)
            alike = (
                torch.equal(x[list(chosen)], b[name][list(chosen)])
                for a, b in zip(kept, after, strict=True)
                for name, x in a.items()
            )
            wrong += not (all(alike) and torch.equal(y, whole[list(chosen)]))
        return wrong

    cases = {}
    for name, own in first_of.items():
        cases[f"{name} prefill, packed"] = lambda own=own: check_prefill(*own)[0]
        cases[f"{name} prefill, in spans"] = lambda own=own: check_prefill(*own)[1]
        cases[f"{name} decode"] = lambda own=own: check_decode(*own)
    return cases


def attention_cases():
    """The same for attention over pages."""
    from megatron.core.transformer import attention

    lengths, pages = (1000, 130, 513, 1, 256), 8

    def check(heads, kv_heads, size, compare):
        k, v = (rand(len(lengths) * pages + 1, BLOCK_TOKENS, kv_heads, size, seed=s) / 4 for s in (14, 15))
        q = [rand(tokens, heads, size, seed=16 + i) / 4 for i, tokens in enumerate(lengths)]
        table = torch.arange(len(lengths) * pages, device=DEVICE, dtype=torch.int32).view(len(lengths), pages) + 1

        def attend(parts):
            """``parts``: (sequence, first position, end)."""
            rows = [end - first for _, first, end in parts]
            starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], device=DEVICE, dtype=torch.int32)
            used = torch.tensor([end for _, _, end in parts], device=DEVICE, dtype=torch.int32)
            out, _ = attention.flash_attn4_varlen_func(
                torch.cat([q[i][first:end] for i, first, end in parts]),
                k,
                v,
                cu_seqlens_q=starts,
                max_seqlen_q=max(rows),
                max_seqlen_k=pages * BLOCK_TOKENS,
                seqused_k=used,
                page_table=table[[i for i, _, _ in parts]].contiguous(),
                softmax_scale=size**-0.5,
                causal=True,
                window_size=(-1, -1),
                num_splits=0,
            )
            return torch.split(out, rows)

        alone = [attend([(i, 0, tokens)])[0] for i, tokens in enumerate(lengths)]

        def differ(parts):
            return sum(
                not torch.equal(y, alone[i][first:end]) for y, (i, first, end) in zip(attend(parts), parts, strict=True)
            )

        whole = [(i, 0, tokens) for i, tokens in enumerate(lengths)]
        decodes = [(i, tokens - 1, tokens) for i, tokens in enumerate(lengths)]
        if compare == "packed":
            return differ(whole) + differ(whole[::-1])
        if compare == "in spans":
            cuts = (0, 1, 64, 127, 128, 300, 640, 1000)
            return sum(differ([(0, a, b)]) + differ([(0, a, b), whole[2]]) for a, b in itertools.pairwise(cuts))
        return differ(decodes) + sum(differ([part]) for part in decodes) + differ([decodes[0], whole[1]])

    return {
        f"attention {heads}/{kv_heads} of {size}, {compare}": lambda a=(heads, kv_heads, size, compare): check(*a)
        for heads, kv_heads, size in ((32, 8, 128), (16, 8, 64), (16, 2, 256))
        for compare in ("packed", "in spans", "a decode as in a prefill")
    }


def main():
    print(ensure_platform().describe(), flush=True)
    from megatron_hybrid_prefix.layers.invariant_cuda import cuda_problem

    model = build_hybrid_model(named("small-mixed" if ON_GPU else "tiny-mixed"), seed=0, cuda_graph_impl="none")
    cases, control = layer_cases(model), None
    if ON_GPU:
        print(f"problem of this machine: {cuda_problem(model)}", flush=True)
        products, control = row_cases()
        cases = products | cases | attention_cases()
    wrong = []
    with torch.inference_mode():
        for name, case in cases.items():
            count = case()
            wrong += [name] * bool(count)
            print(f"{name}: {count or 'same bits'}", flush=True)
        if control is not None:
            count = control()
            wrong += [] if count else ["the control has the same bits"]
            print(f"control: cuBLAS: {count} differ", flush=True)
    shut_down()
    sys.exit("; ".join(wrong) or None)


if __name__ == "__main__":
    main()
