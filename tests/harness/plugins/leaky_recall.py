"""A recurrent layer kind that the package does not know, in one file outside of it. For float32 models on the CPU.

It replaces a Mamba mixer in a model, and differs from it: no convolution, chunks of 24 tokens, and a state with two
components of two dtypes:

- ``trace``: a decaying sum of projections of all tokens, in float64;
- ``memory``: a decaying sum of outer products of keys and values, in float32.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.layers.base import LayerKind, register_layer_kind
from megatron_hybrid_prefix.layers.slot_layer import SlotLayer
from megatron_hybrid_prefix.pool.layout import StateComponent

TRACE, KEYS, VALUES = 12, 6, 10
TRACE_DECAY, MEMORY_DECAY = 0.98, 0.995
CHUNK = 24


class LeakyRecall(torch.nn.Module):
    """One layer: (tokens, 1, hidden) to (tokens, 1, hidden). No bias."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            values = torch.randn(rows, columns, generator=generator) * rows**-0.5
            return torch.nn.Parameter(values, requires_grad=False)

        self.trace_in, self.query = weight(hidden, TRACE), weight(hidden, KEYS)
        self.key, self.value = weight(hidden, KEYS), weight(hidden, VALUES)
        self.out = torch.nn.Parameter(0.3 * weight(TRACE + VALUES, hidden), requires_grad=False)
        self.resets = 0

    def forward(self, hidden_states: torch.Tensor, inference_context=None, packed_seq_params=None):
        raise NotImplementedError("only in an engine")


class LeakyRecallBySlots(SlotLayer):
    """Forward by slots, chunk by chunk. Within a chunk all tokens at once, from the state before it."""

    def slot_decode(self, inputs, states, slots):
        rows = slots >= 0
        outputs = torch.zeros_like(inputs)
        if rows.any():
            trace, memory = states["trace"][slots[rows]], states["memory"][slots[rows]]
            trace = TRACE_DECAY * trace + (inputs[rows] @ self.trace_in).double()
            outer = torch.einsum("bk,bv->bkv", inputs[rows] @ self.key, inputs[rows] @ self.value)
            memory = MEMORY_DECAY * memory + outer
            found = torch.einsum("bk,bkv->bv", inputs[rows] @ self.query, memory)
            outputs[rows] = torch.cat([trace.float(), found], dim=-1) @ self.out
            states["trace"][slots[rows]], states["memory"][slots[rows]] = trace, memory
        return outputs

    def slot_prefill(self, inputs, states, kept, step):
        chunks, outputs, writes = step.chunks[CHUNK], torch.zeros_like(inputs), []
        first, bounds, targets = chunks.first.tolist(), chunks.bounds.tolist(), chunks.slots.tolist()
        for sequence, (source, live) in enumerate(
            zip(step.source_slots.tolist(), step.live_slots.tolist(), strict=True)
        ):
            state = states["trace"][source].clone(), states["memory"][source].clone()
            for chunk in range(first[sequence], first[sequence + 1]):
                span = slice(bounds[chunk], bounds[chunk + 1])
                assert span.stop - span.start <= CHUNK
                outputs[span], state = self._chunk(inputs[span], *state)
                writes.append((kept, targets[chunk], state))
            writes.append((states, live, state))
        for target, slot, (trace, memory) in writes:
            if slot >= 0:
                target["trace"][slot], target["memory"][slot] = trace, memory
        return outputs

    def _chunk(self, x, trace, memory):
        n = len(x)
        age = torch.arange(n)[:, None] - torch.arange(n)
        seen, since = age >= 0, torch.arange(1, n + 1)
        traces = torch.where(seen, TRACE_DECAY ** age.clamp(min=0).double(), 0.0) @ (x @ self.trace_in).double()
        traces = traces + (TRACE_DECAY ** since.double())[:, None] * trace
        scores = (x @ self.query) @ (x @ self.key).T
        scores = scores * torch.where(seen, MEMORY_DECAY ** age.clamp(min=0).float(), 0.0)
        before = (MEMORY_DECAY ** since.float())[:, None] * ((x @ self.query) @ memory)
        found = scores @ (x @ self.value) + before
        left = (MEMORY_DECAY ** (n - since).float())[:, None] * (x @ self.key)
        memory = MEMORY_DECAY**n * memory + left.T @ (x @ self.value)
        return torch.cat([traces.float(), found], dim=-1) @ self.out, (traces[-1] if n else trace, memory)


class Kind(LayerKind):
    """What the package is told."""

    name = "leaky_recall"
    slot_class = LeakyRecallBySlots

    def is_layer(self, module):
        return isinstance(module, LeakyRecall)

    def components(self, module, *, state_dtype, window_dtype):
        return (
            StateComponent(name="trace", shape=(TRACE,), dtype="float64"),
            StateComponent(name="memory", shape=(KEYS, VALUES), dtype="float32", accumulates=True),
        )

    def chunk_tokens(self, module):
        return CHUNK

    def invalidate(self, module):
        module.resets += 1


register_layer_kind(Kind())
