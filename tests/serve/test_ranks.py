"""The store for reports of ranks, alone: who can reach it, and what a malformed report does."""

from __future__ import annotations

import errno
import json
import socket

import pytest
import torch

from megatron_hybrid_prefix.serve.ranks import Board, listening_store


def test_the_store_listens_on_its_own_address_only():
    store = listening_store("127.0.0.1")
    other = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("report 1", "x")
    assert store.get("report 1") == b"x"
    with socket.socket() as stranger:  # 127.0.0.2 is another address of this host
        assert stranger.connect_ex(("127.0.0.2", store.port)) == errno.ECONNREFUSED


MALFORMED = [b"not json", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"number": "1", "error": null, "step_s": 0.0}']


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_report_is_logged_once_and_the_others_are_read(data, caplog):
    board = Board.__new__(Board)
    board._malformed, board.replica_of_rank = set(), [0, 1, 2]
    good = {"number": 1, "error": None, "step_s": 0.5}
    board._store = torch.distributed.HashStore()
    board._store.set("report 0", json.dumps(good))
    board._store.set("report 1", data)
    for _ in range(2):
        assert board.reports() == {0: good}
    assert [message.split(":")[0] for message in caplog.messages] == ["a report of rank 1 is malformed"]
