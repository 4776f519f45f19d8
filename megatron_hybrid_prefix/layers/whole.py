"""A trainer's forward with the bits of an engine's steps: each sequence of a batch is one prefill from a state of zeros.

`invariant_forward` says for which model. Its recurrent layers then run the functions of a prefill, its core attention that of a step,
over scratch memory; nothing of it is kept. A layer's gradient is that of megatron's ordinary forward at the same inputs, which a backward
computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.invariant.log_softmax import log_softmax
from megatron_hybrid_prefix.pool.layout import StateComponent
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.upstream.invariant import InferenceMode, gather_vocabulary

_ARGUMENTS = "input_ids", "position_ids", "attention_mask", "decoder_input", "labels"  # of a model's forward, by place
_WHOLE: ContextVar[WholeSequences | None] = ContextVar("whole sequences", default=None)

Compute = Callable[[torch.Tensor, Mapping[str, torch.Tensor], PrefillStep], tuple[torch.Tensor, torch.Tensor | None]]


def whole_sequences(inference_context: Any) -> WholeSequences | None:
    """What a layer of the running forward computes by; None: it is no trainer's, or not of the model of `invariant_forward`."""
    return _WHOLE.get() if inference_context is None and scope.is_on() else None


def is_whole(model: torch.nn.Module, inference_context: Any, args: Iterable[Any], named: Mapping[str, Any]) -> bool:
    """Whether a model's forward with these arguments is one of `invariant_forward`.

    Raises:
        ValueError: It is, and an argument is not covered.
    """
    whole = _WHOLE.get()
    if inference_context is not None or whole is None or whole.model is not model:
        return False
    whole.check(dict(zip(_ARGUMENTS, args, strict=False)) | dict(named))
    return True


class WholeSequences:
    """Right-padded sequences as prefills of a step: what comes after a token changes none of its bits.

    Args:
        model: The ``HybridModel``.
        layers: Its recurrent layers, each with its chunk quantum in tokens and the components of a state.
        block_tokens: Tokens of a KV block of the engine.
    """

    def __init__(
        self,
        model: Any,
        layers: Iterable[tuple[torch.nn.Module, int, Iterable[StateComponent]]],
        block_tokens: int,
    ) -> None:
        self.model, self._block_tokens = model, block_tokens
        self._device = next(model.parameters()).device
        self._quanta: set[int] = set()
        self._steps: dict[tuple[int, int], PrefillStep] = {}
        self._states: dict[int, dict[str, torch.Tensor]] = {}  # of one slot, of zeros: nothing writes there
        zeros: dict[Any, torch.Tensor] = {}
        for layer, quantum, components in layers:
            self._quanta.add(quantum)
            own = self._states[id(layer)] = {}
            for each in components:
                if (size := (each.shape, each.dtype)) not in zeros:
                    zeros[size] = torch.zeros(1, *each.shape, dtype=getattr(torch, each.dtype), device=self._device)
                own[each.name] = zeros[size]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards of the model without an inference context compute so."""
        token = _WHOLE.set(self)
        try:
            yield
        finally:
            _WHOLE.reset(token)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, if a forward's arguments are not covered."""
        if InferenceMode.is_active():
            raise ValueError("invariant_forward: an engine runs; call engine.suspend() before")
        for name, instead in (
            ("labels", "megatron's loss has other bits; take log-probs by the function that it gives"),
            ("packed_seq_params", "sequences are not packed; give (batch, seq), right-padded"),
        ):
            if given.get(name) is not None:
                raise ValueError(f"invariant_forward: {name}: {instead}")
        if (mask := given.get("attention_mask")) is not None:
            causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
            if not bool((mask == causal).all()):
                raise ValueError("invariant_forward: attention_mask: only None and the causal mask are covered")
        if self.model.training and (self.model.config.hidden_dropout or self.model.config.attention_dropout):
            raise ValueError("invariant_forward: dropout: an engine has none; use 0, or model.eval()")

    def run(
        self, layer: object, hidden_states: torch.Tensor, compute: Compute
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A recurrent layer's output and bias.

        Args:
            layer: The layer.
            hidden_states: (tokens, sequences, hidden).
            compute: Gets them as (sequences x tokens, 1, hidden), the layer's states by component name, and the step.

        Returns:
            (tokens, sequences, width), and the bias or None.
        """
        tokens, sequences, _ = hidden_states.shape
        packed = hidden_states.transpose(0, 1).reshape(sequences * tokens, 1, -1)
        output, bias = compute(packed, self._states[id(layer)], self._step(sequences, tokens))
        return output.view(sequences, tokens, -1).transpose(0, 1).contiguous(), bias

    def _step(self, sequences: int, tokens: int) -> PrefillStep:
        if (sequences, tokens) not in self._steps:
            total, span = (
                sequences * tokens,
                PrefillSpan(start_tokens=0, tokens=tokens, source_slot=0, live_slot=NO_SLOT),
            )
            step = self._steps[sequences, tokens] = PrefillStep(
                quanta=self._quanta,
                block_tokens=self._block_tokens,
                max_tokens=total,
                max_sequences=sequences,
                device=self._device,
            )
            step.prepare([span] * sequences, tokens=total, sequences=sequences)
            step.copy()
            step.show()
        return self._steps[sequences, tokens]

    def attend(self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention by the function of an engine's steps, over blocks of KV of their size.

        Args:
            attention: The ``SelfAttention``.
            q: (tokens, sequences, heads, head_dim).
            k: (tokens, sequences, kv_heads, head_dim).
            v: As k.

        Returns:
            (tokens, sequences, heads x head_dim).
        """
        tokens, sequences, *_ = q.shape
        blocks = ceil_div(tokens, self._block_tokens)

        def paged(x: torch.Tensor) -> torch.Tensor:
            memory = x.new_zeros(sequences, blocks * self._block_tokens, *x.shape[2:])
            memory[:, :tokens] = x.transpose(0, 1)
            return memory.view(-1, self._block_tokens, *x.shape[2:])

        table = torch.arange(sequences * blocks, dtype=torch.int32, device=q.device).view(sequences, blocks)
        starts = tokens * torch.arange(sequences + 1, dtype=torch.int32, device=q.device)
        packed = q.transpose(0, 1).flatten(0, 1).unsqueeze(1)
        sizes = tokens, tokens, starts, starts, starts.diff(), table
        training, attention.training = attention.training, False  # megatron's function wants it so
        try:
            out: torch.Tensor = attention.flash_decode_and_prefill(packed, paged(k), paged(v), *sizes, False)
        finally:
            attention.training = training
        return out.view(sequences, tokens, -1).transpose(0, 1).contiguous()

    def log_probs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Each token's log-prob, given those before it: the engine's bits; the gradient is that of PyTorch's log-softmax.

        Args:
            logits: (batch, seq, vocabulary), or this tensor-parallel rank's part of the vocabulary.
            tokens: (batch, seq) int64; what is padding has log-probs of no use.

        Returns:
            (batch, seq - 1) float32, of the tokens from the second on.
        """
        if logits.shape[-1] < self.model.vocab_size:
            logits = gather_vocabulary(self.model, logits)

        def chosen(logits: torch.Tensor) -> torch.Tensor:
            rows = log_softmax(logits) if scope.is_on() else logits.float().log_softmax(dim=-1)
            return rows.gather(2, tokens[:, 1:, None]).squeeze(2)

        found: torch.Tensor = Recomputed.apply(chosen, logits[:, :-1])  # type: ignore[no-untyped-call]
        return found


class Recomputed(torch.autograd.Function):
    """``run(*inputs)`` with invariant operations; its gradient is that of ``run`` without them."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        with scope.invariant():
            return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        inputs = [x if x.is_leaf else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), scope.invariant(False):
            outputs = ctx.run(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outs = [out for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        return None, *torch.autograd.grad(outs, inputs, [each for each in grads if each is not None], allow_unused=True)
