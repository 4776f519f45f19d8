"""A prefill of Mamba2 copies no part of its projection or of the convolution's output, and writes each row once; decodes are by slots."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.layers import mamba2, step
from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixMambaMixer
from tests.harness.lifecycle_helpers import EngineHarness, tokens


def test_parts_are_views_and_padding_is_zero(tiny, monkeypatch):
    projected, convolved, padding, calls = [], [], [], []
    empty = torch.empty

    def poisoned(*shape, **options):
        memory = empty(*shape, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    def of(tensors, *parts):
        whole = tensors[-1].untyped_storage().data_ptr()
        calls.append([part.untyped_storage().data_ptr() == whole for part in parts])

    def watch(module, name, before):
        function = getattr(module, name)

        def call(*args, **fields):
            before(*args, **fields)
            result = function(*args, **fields)
            if name == "convolve_from_slots":
                convolved.append(result)
            if name == "scan_by_slots":
                padding.append(result[int(args[1][-1]) :])
            return result

        monkeypatch.setattr(module, name, call)

    def scan_inputs(*args, x, B, C, dt, z, **fields):
        of(convolved, x, B, C)
        of(projected, dt)
        assert z is None  # the norm has it

    watch(step, "convolve_from_slots", lambda xBC, *args, **fields: of(projected, xBC))
    watch(step, "write_conv_windows", lambda xBC, *args, **fields: of(projected, xBC))
    watch(mamba2, "scan_by_slots", scan_inputs)
    prefill = HybridPrefixMambaMixer.prefill

    def watched(self, zxBCdt, *args):
        projected.append(zxBCdt)
        with_gate = self.norm.register_forward_pre_hook(lambda norm, inputs: of(projected, inputs[1]))
        try:
            return prefill(self, zxBCdt, *args)
        finally:
            with_gate.remove()

    monkeypatch.setattr(HybridPrefixMambaMixer, "prefill", watched)
    served = EngineHarness(tiny)
    monkeypatch.setattr(torch, "empty", poisoned)
    served.send(tokens(1, 40, seed=1), count=1)
    served.check()
    assert len(projected) == len(convolved) > 0 and len(calls) == 5 * len(projected)
    assert all(all(views) for views in calls)
    assert all(len(rows) and (rows == 0).all() for rows in padding)


def test_each_decode_is_by_slots(tiny, monkeypatch):
    calls, by_slots = [], HybridPrefixMambaMixer.decode

    def decode(self, zxBCdt, states, ring, rows):
        assert zxBCdt.shape[:2] == (len(rows.slots), 1) and rows.slots.dtype == torch.int64
        assert all(tensor[0].is_contiguous() for tensor in (*states.values(), *ring.values()))
        calls.append(id(self))
        return by_slots(self, zxBCdt, states, ring, rows)

    monkeypatch.setattr(HybridPrefixMambaMixer, "decode", decode)
    served = EngineHarness(tiny)
    served.send(tokens(1, 9, seed=1), count=5)
    served.check()
    assert len(calls) >= 4 * len(set(calls)) > 0
