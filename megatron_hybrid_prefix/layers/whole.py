"""A trainer's forward with the bits of an engine's steps: each sequence of a batch is one prefill from a state of zeros.

`invariant_forward` says for which model. Its recurrent layers run the functions of a prefill, its core attention that of a step, over
scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep, Quantum
from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.invariant.log_softmax import log_softmax
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.upstream.invariant import InferenceMode, gather_vocabulary, without_hooks

_ARGUMENTS = "input_ids", "position_ids", "attention_mask", "decoder_input", "labels"  # of a model's forward, by place
# By a model's id; and that of the running forward.
_WHOLE: ContextVar[Mapping[int, WholeSequences]] = ContextVar("whole sequences", default=MappingProxyType({}))
_RUNNING: ContextVar[WholeSequences | None] = ContextVar("whole sequences of a forward", default=None)


def whole_sequences(inference_context: Any) -> WholeSequences | None:
    """What a layer of the running forward computes by; None: it is no trainer's, or not of a model of `invariant_forward`."""
    return _RUNNING.get() if inference_context is None and scope.is_on() else None


def is_whole(model: torch.nn.Module, inference_context: Any, args: Iterable[Any], named: Mapping[str, Any]) -> bool:
    """Whether a model's forward, which runs now, is one of `invariant_forward`. ValueError: it is, and an argument is not covered."""
    whole = None if inference_context is not None else _WHOLE.get().get(id(model))
    _RUNNING.set(whole)
    if whole is None:
        return False
    whole.check(dict(zip(_ARGUMENTS, args, strict=False)) | dict(named))
    return True


class WholeSequences:
    """Right-padded sequences as prefills of a step: what comes after a token changes none of its bits.

    Args:
        model: The ``HybridModel``.
        quanta: Chunk quanta of its recurrent layers, in tokens.
        states: Of each of these, by its id: one slot of zeros by component name. Nothing writes there.
        block_tokens: Tokens of a KV block of the engine.
    """

    def __init__(
        self, model: Any, quanta: set[Quantum], states: Mapping[int, Mapping[str, torch.Tensor]], block_tokens: int
    ) -> None:
        self.model, self._quanta, self._states, self._block_tokens = model, quanta, states, block_tokens
        self._steps: dict[tuple[int, int], PrefillStep] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards of the model without an inference context compute so."""
        token = _WHOLE.set({**_WHOLE.get(), id(self.model): self})
        try:
            yield
        finally:
            _WHOLE.reset(token)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, if a forward's arguments are not covered."""
        config, mask = self.model.config, given.get("attention_mask")
        layers = [config, *self.model.modules()]
        drops = self.model.training and any(getattr(each, "hidden_dropout", 0) for each in layers)
        empty = isinstance(given.get("input_ids"), torch.Tensor) and not given["input_ids"].numel()
        causal = mask is None or (mask == torch.ones_like(mask, dtype=torch.bool).triu(1)).all()
        for is_wrong, problem in (
            (InferenceMode.is_active(), "an engine runs; call engine.suspend() before"),
            (
                given.get("labels") is not None,
                "labels: megatron's loss has other bits; take the log-probs that it gives",
            ),
            (
                given.get("packed_seq_params") is not None,
                "packed_seq_params: give sequences as (batch, seq), right-padded",
            ),
            (empty, "input_ids: there are none"),
            (torch.is_autocast_enabled(next(self.model.parameters()).device.type), "autocast: an engine has none"),
            (not causal, "attention_mask: only None and the causal mask are covered"),
            (drops, "dropout: an engine has none; use 0, or model.eval()"),
        ):
            if is_wrong:
                raise ValueError(f"invariant_forward: {problem}")

    def run(self, layer: object, hidden_states: torch.Tensor, compute: Callable[..., Any]) -> Any:
        """Output (tokens, sequences, width) and bias of a recurrent layer.

        Args:
            layer: The layer.
            hidden_states: (tokens, sequences, hidden).
            compute: Gets them as (sequences x tokens, 1, hidden), the layer's states by component name, and the `PrefillStep`.
        """
        tokens, sequences, _ = hidden_states.shape
        if (sequences, tokens) not in self._steps:
            total, device = sequences * tokens, hidden_states.device
            sizes: dict[str, Any] = {"max_tokens": total, "max_sequences": sequences, "device": device}
            step = PrefillStep(quanta=self._quanta, block_tokens=self._block_tokens, **sizes)
            span = PrefillSpan(start_tokens=0, tokens=tokens, source_slot=0, live_slot=NO_SLOT)
            step.prepare([span] * sequences, tokens=total, sequences=sequences)
            step.copy()
            step.show()
            self._steps[sequences, tokens] = step
        packed = hidden_states.transpose(0, 1).reshape(sequences * tokens, 1, -1)
        output, bias = compute(packed, self._states[id(layer)], self._steps[sequences, tokens])
        return output.view(sequences, tokens, -1).transpose(0, 1).contiguous(), bias

    def attend(self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention by the function of an engine's steps, over blocks of KV of their size.

        ``attention`` is the ``SelfAttention``; q is (tokens, sequences, heads, head_dim), k and v have their own heads. Returns
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
        """Each token's log-prob with the engine's bits, and the gradient of PyTorch's log-softmax.

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
        wanted, given = [x for x in inputs if x.requires_grad], [grad for grad in grads if grad is not None]
        with without_hooks(wanted):  # those of weights run when this gradient comes to them
            found = iter(torch.autograd.grad(outs, wanted, given, allow_unused=True))
        return None, *(next(found) if x.requires_grad else None for x in inputs)
