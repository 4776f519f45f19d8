"""How trainers change the weights of a model that an engine serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.refit import swap_model_weights


def copy_in_place(model: Any, trained: Any) -> None:
    """``copy_`` of each parameter."""
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), trained.parameters(), strict=True):
            parameter.copy_(new)


def copy_data(model: Any, trained: Any) -> None:
    """``copy_`` through ``.data``, which counts no version."""
    for parameter, new in zip(model.parameters(), trained.parameters(), strict=True):
        parameter.data.copy_(new.data)


def assign_data(model: Any, trained: Any) -> None:
    """Other memory for each parameter."""
    for parameter, new in zip(model.parameters(), trained.parameters(), strict=True):
        parameter.data = new.data.clone()


def step_optimizer(model: Any, trained: Any) -> None:
    """One step of AdamW; ``trained`` only says that something is to change."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class LocalCopies(CopyService):
    """Copies of one process. (Megatron's services pin memory, which needs a GPU.)"""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, torch.Tensor] = {}
        self.received: dict[int, torch.Tensor] = {}

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        self.sent[task_id] = src_tensor

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        self.received[task_id] = dest_tensor

    def run(self) -> None:
        with torch.no_grad():
            for number, target in self.received.items():
                target.copy_(self.sent[number])


WAYS: dict[str, Callable[[Any, Any], object]] = {
    "copy_": copy_in_place,
    "data.copy_": copy_data,
    "data": assign_data,
    "load_state_dict": lambda model, trained: model.load_state_dict(trained.state_dict()),
    "swap_model_weights": lambda model, trained: swap_model_weights(trained, model, LocalCopies()),
    "AdamW": step_optimizer,
}
