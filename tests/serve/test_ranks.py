"""What a rank sends of unfinished answers."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_hybrid_prefix.serve.ranks import RankEngine


def test_tokens_of_a_request_that_replays_its_answer_are_sent_once():
    """With ``exact="bits"``, a preempted request has no tokens until it has decoded them again."""
    part = SimpleNamespace(
        generated_tokens=[],
        generated_log_probs=None,
        generated_top_n_logprobs=None,
        prompt_log_probs=None,
        prompt_tokens=[1, 2],
        num_cached_tokens=0,
    )
    rank, sent = RankEngine.__new__(RankEngine), []
    rank._seen_tokens = {}
    rank.engine = SimpleNamespace(
        requests={7: SimpleNamespace(record=SimpleNamespace(requests=[part]))}, send_partials=sent.extend
    )
    for answer in ([], [5], [5, 6], [], [5], [5, 6], [5, 6, 7]):
        part.generated_tokens = answer
        rank._send_new_tokens()
    assert [output["tokens"] for output in sent] == [[5], [6], [7]]
