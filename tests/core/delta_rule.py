"""A second recurrent layer kind, for tests only: a delta rule with a key window and a memory matrix, in float64.

The package does not know this kind. Its state has other components than Mamba2's, with other shapes and dtypes:

- ``key_window``: the last inputs of a short convolution over keys, newest first, in float32;
- ``memory``: one matrix per head, in float64. Each token corrects it towards the token's value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.pool.layout import StateComponent, StateLayout

HEADS, KEY_DIM, VALUE_DIM, WINDOW, HIDDEN, VOCABULARY = 2, 4, 3, 3, 12, 31
RECURRENT_LAYERS = 2

LAYOUT = StateLayout(
    kind="delta_rule",
    layers=RECURRENT_LAYERS,
    components=(
        StateComponent(name="key_window", shape=(WINDOW, HEADS * KEY_DIM), dtype="float32"),
        StateComponent(name="memory", shape=(HEADS, VALUE_DIM, KEY_DIM), dtype="float64"),
    ),
)


def _random(generator, *shape, scale=None):
    scale = shape[-2] ** -0.5 if scale is None else scale
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


class DeltaRule:
    """One layer. Keys and queries: (HEADS, KEY_DIM); values: (HEADS, VALUE_DIM)."""

    def __init__(self, generator: torch.Generator) -> None:
        self.key = _random(generator, HIDDEN, HEADS * KEY_DIM)
        self.query = _random(generator, HIDDEN, HEADS * KEY_DIM)
        self.value = _random(generator, HIDDEN, HEADS * VALUE_DIM, scale=1.0)
        self.rate = _random(generator, HIDDEN, HEADS)
        self.taps = _random(generator, 1 + WINDOW, HEADS * KEY_DIM, scale=1.0)
        self.out = _random(generator, HEADS * VALUE_DIM, HIDDEN)

    def step(self, x, key_window, memory):
        """One token, (HIDDEN,), and the state before it. Returns the output and the state after it."""
        raw = (x @ self.key).float()  # the window is float32, so its inputs are, wherever they are read
        taps = torch.cat([raw[None], key_window]).double()
        key = F.normalize((taps * self.taps).sum(0).view(HEADS, KEY_DIM), dim=-1)
        value, rate = (x @ self.value).view(HEADS, VALUE_DIM), 0.3 * torch.sigmoid(x @ self.rate)[:, None]
        missing = value - torch.einsum("hvk,hk->hv", memory, key)
        memory = memory + torch.einsum("hv,hk->hvk", rate * missing, key)
        y = torch.einsum("hvk,hk->hv", memory, (x @ self.query).view(HEADS, KEY_DIM))
        return y.reshape(-1) @ self.out, torch.cat([raw[None], key_window[:-1]]), memory

    def whole(self, x):
        """All tokens, (tokens, HIDDEN), from the start. Written without a state, as an independent check of `step`."""
        raw = F.pad((x @ self.key).float().double(), (0, 0, WINDOW, 0))
        keys = sum(raw[WINDOW - lag : WINDOW - lag + len(x)] * self.taps[lag] for lag in range(1 + WINDOW))
        keys = F.normalize(keys.view(len(x), HEADS, KEY_DIM), dim=-1)
        values, rates = (x @ self.value).view(len(x), HEADS, VALUE_DIM), 0.3 * torch.sigmoid(x @ self.rate)
        queries = (x @ self.query).view(len(x), HEADS, KEY_DIM)
        eye, memory, outputs = torch.eye(KEY_DIM, dtype=x.dtype), x.new_zeros(HEADS, VALUE_DIM, KEY_DIM), []
        for k, v, b, q in zip(keys, values, rates, queries, strict=True):
            b = b[:, None, None]
            memory = memory @ (eye - b * k[:, :, None] * k[:, None, :]) + b * v[:, :, None] * k[:, None, :]
            outputs.append((memory @ q[:, :, None]).reshape(-1))
        return torch.stack(outputs) @ self.out


class Attention:
    """One layer with one head. Its KV is (2, HIDDEN) per token."""

    def __init__(self, generator: torch.Generator) -> None:
        self.qkv = _random(generator, HIDDEN, 3 * HIDDEN)

    def step(self, x, kv):
        """One token, (HIDDEN,), and the KV, (tokens, 2, HIDDEN). Fills in the last KV, which is its own."""
        query, kv[-1, 0], kv[-1, 1] = (x @ self.qkv).split(HIDDEN)
        return torch.softmax(kv[:, 0] @ query * HIDDEN**-0.5, 0) @ kv[:, 1]

    def whole(self, x):
        """All tokens (tokens, HIDDEN)."""
        query, key, value = (x @ self.qkv).split(HIDDEN, dim=-1)
        scores = (query @ key.T * HIDDEN**-0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        return scores.softmax(-1) @ value


class DeltaHybrid:
    """Delta rule, attention, delta rule."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = _random(generator, VOCABULARY, HIDDEN, scale=1.0)
        self.layers = [DeltaRule(generator), Attention(generator), DeltaRule(generator)]
        self.head = _random(generator, HIDDEN, VOCABULARY, scale=1.0)

    def step(self, token, kv, states):
        """One token. Replaces ``states`` ([key_window, memory] of each recurrent layer) by the states after the token."""
        x, recurrent = self.embedding[token], 0
        for layer in self.layers:
            if isinstance(layer, Attention):
                x = x + layer.step(x, kv)
            else:
                y, *states[recurrent] = layer.step(x, *states[recurrent])
                x, recurrent = x + y, recurrent + 1
        return x @ self.head

    def whole(self, tokens):
        """Logits after every token, (tokens, VOCABULARY), of an uninterrupted run."""
        x = self.embedding[tokens]
        for layer in self.layers:
            x = x + layer.whole(x)
        return x @ self.head
