"""Moving rows between packed tensors.

Replaces `tensor_get_slice_after`, `tensor_merge` and `tensor_masked_update` of
`megatron.core.inference.contexts.attention_context.triton.tensor_ops`.
"""

import torch


@torch.no_grad()
def tensor_get_slice_after(
    input_tensor: torch.Tensor, output_tensor: torch.Tensor, pos_on_device: torch.Tensor, check_bounds: bool = False
) -> None:
    """Copy `input_tensor[pos:]` to the head of `output_tensor`; rows that do not fit are dropped.

    Later rows of the output do not change (upstream passes them uninitialised).

    Args:
        input_tensor: (rows, ...), contiguous.
        output_tensor: (any rows, ...), contiguous, written in place.
        pos_on_device: (>= 1,), integer; the first element is the position.
        check_bounds: ignored; megatron asks for no check.
    """
    pos = int(pos_on_device.reshape(-1)[0])
    count = min(input_tensor.shape[0] - pos, output_tensor.shape[0])
    if count > 0:
        output_tensor[:count] = input_tensor[pos : pos + count]


@torch.no_grad()
def tensor_merge(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    pos_on_device: torch.Tensor,
    output_tensor: torch.Tensor | None = None,
    check_bounds: bool = False,
) -> None:
    """Write `tensor_a[:pos]`, then as much of `tensor_b` as fits, to the head of the output.

    Later rows of the output do not change.

    Args:
        tensor_a: (rows_a, ...), contiguous.
        tensor_b: (rows_b, ...), contiguous.
        pos_on_device: (>= 1,), integer; the first element is the position.
        output_tensor: (rows, ...), contiguous, written in place; None means `tensor_a`.
        check_bounds: ignored; megatron asks for no check.
    """
    output = tensor_a if output_tensor is None else output_tensor
    pos = int(pos_on_device.reshape(-1)[0])
    if output is not tensor_a:
        head = min(pos, output.shape[0])
        output[:head] = tensor_a[:head]
    count = min(tensor_b.shape[0], output.shape[0] - pos)
    if count > 0:
        output[pos : pos + count] = tensor_b[:count]


@torch.no_grad()
def tensor_masked_update(states: torch.Tensor, idx: torch.Tensor, new_states: torch.Tensor) -> None:
    """Write `new_states[i]` to `states[idx[i]]` for each `idx[i]` other than -1.

    Args:
        states: (slots, ...), 2 to 4 dimensions, any strides, updated in place.
        idx: (batch,), integer: target slots, -1 for rows to skip.
        new_states: (batch, ...), cast to the dtype of `states`.
    """
    rows = torch.nonzero(idx != -1).squeeze(1)
    states[idx[rows].long()] = new_states[rows].to(states.dtype)
