"""The scenarios, one class each.

To add one, write a subclass of `Scenario` and add it to `SCENARIOS`. Its fields become options, its `metrics` become
rows of the table.
"""

from __future__ import annotations

from megatron_hybrid_prefix.bench.scenario import Scenario
from megatron_hybrid_prefix.bench.scenarios.concurrent import Herd, Samples
from megatron_hybrid_prefix.bench.scenarios.decode import Decode
from megatron_hybrid_prefix.bench.scenarios.host_tier import FromHost
from megatron_hybrid_prefix.bench.scenarios.index import Index
from megatron_hybrid_prefix.bench.scenarios.no_reuse import NoReuse
from megatron_hybrid_prefix.bench.scenarios.pressure import Pressure
from megatron_hybrid_prefix.bench.scenarios.sessions import FirstSighting, MultiTurn
from megatron_hybrid_prefix.bench.scenarios.shared_prefix import SharedPrefix
from megatron_hybrid_prefix.bench.scenarios.summary import Summary

_KINDS = (Summary, SharedPrefix, FirstSighting, MultiTurn, Herd, Samples, NoReuse, Decode, Pressure, FromHost, Index)
SCENARIOS: dict[str, type[Scenario]] = {kind.name: kind for kind in _KINDS}
