"""An engine decodes Mamba2 layers by slots."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixMambaMixer
from tests.harness.lifecycle_helpers import EngineHarness, tokens


def test_each_decode_is_by_slots(tiny, monkeypatch):
    calls, by_slots = [], HybridPrefixMambaMixer.decode

    def decode(self, zxBCdt, conv_state, ssm_state, batch_indices, intermediate_conv_state, intermediate_ssm_state):
        assert zxBCdt.shape[:2] == (len(batch_indices), 1) and intermediate_conv_state is intermediate_ssm_state is None
        assert conv_state[0].is_contiguous() and ssm_state[0].is_contiguous() and batch_indices.dtype == torch.int64
        calls.append(id(self))
        return by_slots(self, zxBCdt, conv_state, ssm_state, batch_indices)

    monkeypatch.setattr(HybridPrefixMambaMixer, "decode", decode)
    served = EngineHarness(tiny)
    served.send(tokens(1, 9, seed=1), count=5)
    served.check()
    assert len(calls) >= 4 * len(set(calls)) > 0
