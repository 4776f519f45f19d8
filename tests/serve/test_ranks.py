"""The store for reports of ranks, alone: who can reach it."""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace

import torch

from megatron_hybrid_prefix.serve.ranks import RankEngine, listening_store


def test_the_store_listens_on_its_own_address_only():
    store = listening_store("127.0.0.1")
    other = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("report 1", "x")
    assert store.get("report 1") == b"x"
    with socket.socket() as stranger:  # 127.0.0.2 is another address of this host
        assert stranger.connect_ex(("127.0.0.2", store.port)) == errno.ECONNREFUSED


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
