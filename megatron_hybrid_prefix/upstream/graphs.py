"""Megatron's records of the CUDA graphs captured in this process."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord, delete_cuda_graphs
from megatron.core.transformer.module import GraphableMegatronModule


def delete_graphs_of(model: Any) -> None:
    """Delete the CUDA graphs of this process, and what they leave on the model."""
    delete_cuda_graphs()
    # Megatron leaves the emptied runners; each holds a reference to its engine's context.
    module: GraphableMegatronModule
    for module in model.modules():
        manager: CudaGraphManager | None = getattr(module, "cudagraph_manager", None)
        if manager is not None:
            manager.cudagraph_runners.clear()
            manager.custom_cudagraphs_lookup_table.clear()


def captured_graphs() -> list[Any]:
    """Megatron's records of the graphs that inference captured."""
    return _CudagraphGlobalRecord.cudagraph_inference_record


def set_captured_graphs(records: list[Any]) -> None:
    """Replace the list that `captured_graphs` returns."""
    _CudagraphGlobalRecord.cudagraph_inference_record = records


def forget_graph_pool() -> None:
    """Make the next engine that captures create a new memory pool."""
    CudaGraphManager.global_mempool = None
