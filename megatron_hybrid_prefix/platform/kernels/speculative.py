"""Bookkeeping of speculative (multi-token-prediction) decoding.

Replaces `verify_speculative_tokens`, `prepare_next_forward_pass` and `mamba_state_selective_copy` of
`megatron.core.inference.text_generation_controllers.mtp_utils_triton`: the three kernels that the controller imports from
there. Upstream imports its fourth kernel, `rewind_kv_cache`, from a PyTorch module.
"""

import torch


@torch.no_grad()
def verify_speculative_tokens(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept, per decode request, the leading drafts that equal the tokens the model sampled one position earlier.

    Tokens are packed: `num_speculative_tokens + 1` per decode request (the first is always accepted), then one per
    prefill request (accepted). Later tokens are graph padding and are not accepted.

    Args:
        input_tokens: (tokens,) or (1, tokens), integer: input of the forward.
        output_tokens: (>= packed tokens,), integer: token sampled at each of those positions.
        num_decode_requests: decode requests.
        num_prefill_requests: prefill requests.
        num_speculative_tokens: drafts per decode request.

    Returns:
        (last_one_indices, accepted_tokens_mask, input_tokens): int64 (requests,) with the packed index of each request's
        last accepted token; bool (tokens,); and the input tokens as (tokens,).
    """
    if input_tokens.ndim == 2:
        input_tokens = input_tokens.squeeze(0)
    device = input_tokens.device
    per_request = num_speculative_tokens + 1
    decode_tokens = num_decode_requests * per_request

    fed = input_tokens[:decode_tokens].view(num_decode_requests, per_request)
    sampled = output_tokens[:decode_tokens].view(num_decode_requests, per_request)
    # A draft is accepted if it and all earlier drafts match; the first token always is.
    matches = (fed[:, 1:] == sampled[:, :-1]).to(torch.int64)
    accepted = torch.ones(num_decode_requests, per_request, dtype=torch.int64, device=device)
    accepted[:, 1:] = torch.cumprod(matches, dim=1)

    mask = torch.zeros_like(input_tokens, dtype=torch.bool)
    mask[:decode_tokens] = accepted.flatten().bool()
    mask[decode_tokens : decode_tokens + num_prefill_requests] = True
    first = torch.arange(num_decode_requests, device=device) * per_request
    prefill = decode_tokens + torch.arange(num_prefill_requests, device=device)
    last_one_indices = torch.cat([first + accepted.sum(1) - 1, prefill])
    return last_one_indices, mask, input_tokens


@torch.no_grad()
def prepare_next_forward_pass(
    num_decode_requests: int,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    sampled_tokens_buf: torch.Tensor,
    last_accepted_seq_buf: torch.Tensor,
    accepted_tokens_per_request: torch.Tensor,
    accepted_token_counts: torch.Tensor,
    num_speculative_tokens: int,
) -> None:
    """Fill the caller's buffers for the next step; rows of other requests do not change.

    Args:
        num_decode_requests: decode requests; they come first.
        output_tokens: (>= packed tokens,), integer: sampled tokens.
        required_logit_indices: (>= packed tokens,), integer: row of each packed token in the forward pass.
        last_one_indices: (requests,), int64, from `verify_speculative_tokens`.
        accepted_tokens_mask: (tokens,), bool, from `verify_speculative_tokens`.
        input_tokens: (tokens,), integer, from `verify_speculative_tokens`.
        sampled_tokens_buf: (>= requests,), integer: receives each request's newest token.
        last_accepted_seq_buf: (>= requests,), integer: receives the forward row of each request's last accepted token.
        accepted_tokens_per_request: (>= decode requests, num_speculative_tokens), integer: receives the accepted drafts,
            -1 if rejected. Prefill rows do not change.
        accepted_token_counts: (>= decode requests,), integer: receives the number of accepted drafts. Prefill rows do
            not change.
        num_speculative_tokens: drafts per decode request.
    """
    requests = last_one_indices.shape[0]
    if requests == 0:
        return
    sampled_tokens_buf[:requests] = output_tokens[last_one_indices].to(sampled_tokens_buf.dtype)
    last_accepted_seq_buf[:requests] = required_logit_indices[last_one_indices].to(last_accepted_seq_buf.dtype)
    if num_decode_requests == 0:
        return
    per_request = num_speculative_tokens + 1
    decode_tokens = num_decode_requests * per_request
    drafts = input_tokens[:decode_tokens].view(num_decode_requests, per_request)[:, 1:]
    accepted = accepted_tokens_mask[:decode_tokens].view(num_decode_requests, per_request)[:, 1:].bool()
    kept = torch.where(accepted, drafts, -1)
    accepted_tokens_per_request[:num_decode_requests, :num_speculative_tokens] = kept.to(
        accepted_tokens_per_request.dtype
    )
    accepted_token_counts[:num_decode_requests] = accepted.sum(1).to(accepted_token_counts.dtype)


@torch.no_grad()
def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
) -> None:
    """Roll the live states of decode requests back to their last accepted token.

    For every request with `prefill_status` other than 1: `current[layer, slot] = intermediate[layer, slot, accepted]`.

    Args:
        intermediate_states: (layers, slots, num_speculative_tokens + 1, *state_shape), floating.
        current_states: (layers, slots, *state_shape), updated in place, cast to its dtype.
        prefill_status: (requests,), integer: 1 for prefill, 0 for decode.
        state_idx: (requests,), integer: slot of each request.
        accepted_counts: (requests,), integer: number of accepted drafts, the index of the last accepted token.
        num_layers: layers to copy.
    """
    decode = torch.nonzero(prefill_status != 1).squeeze(1)
    slots = state_idx[decode].long()
    accepted = accepted_counts[decode].long()
    for layer in range(num_layers):  # one layer at a time bounds the temporary
        current_states[layer, slots] = intermediate_states[layer, slots, accepted].to(current_states.dtype)
