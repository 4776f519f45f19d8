"""`PrefixCoordinator` alone: its record of which replica has which prefix."""

from __future__ import annotations

import numpy as np

from megatron_hybrid_prefix.mcore.ranks.coordinator import PrefixCoordinator

RANKS = [b"first", b"second"]


def coordinator(most_blocks: int) -> PrefixCoordinator:
    """A coordinator without sockets."""
    made = PrefixCoordinator.__new__(PrefixCoordinator)
    made.identity_to_rank_index = {name: number for number, name in enumerate(RANKS)}
    made._identities_list, made._pending_counts = list(RANKS), np.zeros(len(RANKS), dtype=np.int32)
    made._hash_table, made._hash_assignment_counter, made.most_blocks = {}, 0, most_blocks
    return made


def test_it_forgets_the_least_recently_used_prefix():
    made = coordinator(most_blocks=100)
    made._update_rank_hashes(RANKS[1], [1, 2, 3])
    for number in range(1000):
        made._update_rank_hashes(RANKS[0], [10 * number + 1000, 10 * number + 1001])
        made._update_rank_hashes(RANKS[1], [1, 2])  # asked for again and again
        assert len(made._hash_table) <= 100
    match, _ = made._match_vector([1, 2, 3])
    assert match.tolist() == [0, 2 / 3]  # the third was not asked for
    assert made._match_vector([10 * 999 + 1000])[0].tolist() == [1, 0]
    assert made._match_vector([1000])[0].tolist() == [0, 0]


def test_within_its_limits_it_decides_as_megatron():
    from megatron.core.inference.data_parallel_inference_coordinator import DataParallelInferenceCoordinator

    made, upstream = coordinator(most_blocks=1000), coordinator(most_blocks=1000)
    rng = np.random.default_rng(0)
    for _ in range(100):
        keys = rng.integers(0, 50, size=4).tolist()
        rank = RANKS[int(rng.integers(2))]
        made._update_rank_hashes(rank, keys)
        DataParallelInferenceCoordinator._update_rank_hashes(upstream, rank, keys)
        assert made._hash_table == upstream._hash_table


def test_equally_loaded_replicas_take_turns():
    from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

    made = coordinator(most_blocks=100)
    made.enable_prefix_caching, made.max_requests, made.prefix_caching_routing_alpha = True, 4, 0.5
    made.prefix_caching_coordinator_policy = PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
    best = made.get_best_data_parallel_rank
    assert [best([number]) for number in range(4)] == [RANKS[0], RANKS[1]] * 2
    assert [best([]) for _ in range(2)] == RANKS
    made._update_rank_hashes(RANKS[1], [7])
    assert [best([7]) for _ in range(3)] == [RANKS[1]] * 3  # a known prefix stays where it is
    made._pending_counts[0] = 1
    assert [best([8]) for _ in range(2)] == [RANKS[1]] * 2
