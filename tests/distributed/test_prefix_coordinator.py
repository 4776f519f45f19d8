"""`PrefixCoordinator` alone: its record of which replica has which prefix."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import zmq
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
from megatron.core.inference.data_parallel_inference_coordinator import HANDLERS, DataParallelInferenceCoordinator
from megatron.core.inference.headers import Headers

from megatron_hybrid_prefix.mcore.ranks.coordinator import PrefixCoordinator
from megatron_hybrid_prefix.mcore.ranks.messages import ANSWER, LOST, SUBMIT, pack, unpack
from megatron_hybrid_prefix.upstream.capabilities import form_of
from megatron_hybrid_prefix.upstream.client import ClientSeam
from megatron_hybrid_prefix.upstream.coordinator import ABORT, MARK, PARTIAL, CoordinatorSeam, streamed
from tests.harness.defects import expected

RANKS = [b"mp-coord-0", b"mp-coord-1"]


def coordinator(most_blocks: int, kind: type[Any] = PrefixCoordinator) -> Any:
    """A coordinator without sockets."""
    made = kind.__new__(kind)
    made.identity_to_rank_index = {name: number for number, name in enumerate(RANKS)}
    made._identities_list, made._pending_counts = list(RANKS), np.zeros(len(RANKS), dtype=np.int32)
    made._hash_table, made._hash_assignment_counter, made.most_blocks = {}, 0, most_blocks
    made.identities_of_data_parallel_ranks, made.known_clients = deque(RANKS), {b"client"}
    made.request_id_to_client_id, made.request_id_to_client_request_id, made.request_id_to_rank = {}, {}, {}
    made.client_request_to_request_id, made.removed_engine_identities = {}, set()
    made.enable_prefix_caching, made.max_requests, made.prefix_caching_routing_alpha = True, 4, 0.5
    made.prefix_caching_coordinator_policy = PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
    made.block_size_tokens, made.router_socket = 4, Sent()
    return made


class Sent:
    """A socket that keeps what it is told to send."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []

    def send_multipart(self, frames: list[bytes]) -> None:
        receiver, *rest = frames
        own = rest[0] in (LOST, ANSWER)
        self.messages.append([receiver, *rest[:own], *map(unpack, rest[own:])])


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
    made, upstream = coordinator(most_blocks=1000), coordinator(most_blocks=1000)
    rng = np.random.default_rng(0)
    for _ in range(100):
        keys = rng.integers(0, 50, size=4).tolist()
        rank = RANKS[int(rng.integers(2))]
        made._update_rank_hashes(rank, keys)
        DataParallelInferenceCoordinator._update_rank_hashes(upstream, rank, keys)
        assert made._hash_table == upstream._hash_table


def test_equally_loaded_replicas_take_turns():
    made = coordinator(most_blocks=100)
    best = made.get_best_data_parallel_rank
    assert [best([number]) for number in range(4)] == [RANKS[0], RANKS[1]] * 2
    assert [best([]) for _ in range(2)] == RANKS
    made._update_rank_hashes(RANKS[1], [7])
    assert [best([7]) for _ in range(3)] == [RANKS[1]] * 3  # a known prefix stays where it is
    made._pending_counts[0] = 1
    assert [best([8]) for _ in range(2)] == [RANKS[1]] * 2


def asks(made: PrefixCoordinator, **routing: Any) -> bytes | None:
    """What goes on to megatron of a request with these facts."""
    return made.receive(b"client", SUBMIT, pack(routing), b"message")


def test_a_key_stays_with_its_replica_while_that_lives():
    made = coordinator(most_blocks=100)
    made.most_keys = 2
    best = made.get_best_data_parallel_rank
    assert asks(made, key="a") == b"message"
    first = best([1])
    made._update_rank_hashes(RANKS[1 - RANKS.index(first)], [5])
    made._pending_counts[RANKS.index(first)] = 3
    assert [best([number]) for number in (5, 6)] == [first] * 2  # whatever the prompt and the load
    asks(made)
    assert best([5]) != first
    for key in ("b", "c", "a"):
        asks(made, key=key)
        other = best([6])
    assert other != first  # "a" was forgotten, and the other replica has less to do
    made.remove_replica(RANKS.index(other))
    assert best([5]) == first


def route(made: PrefixCoordinator, keys: list[int], **routing: Any) -> int:
    """Submits a request with these keys, as megatron does. Returns its replica."""
    asks(made, **routing)
    name = made.get_best_data_parallel_rank(keys)
    made._pending_counts[RANKS.index(name)] += 1
    made._update_rank_hashes(name, keys)
    return RANKS.index(name)


@pytest.mark.parametrize("key", [None, "pinned"])
def test_an_overloaded_replica_is_left_although_it_knows_the_whole_prompt(key):
    made, prompt = coordinator(most_blocks=100), [1, 2, 3, 4, 5]
    found = [route(made, prompt, key=key) for _ in range(16)]
    if key is not None:
        assert set(found) == {0}
        return
    assert found[:8] == [0] * 4 + [1] * 4, "no request waits while a replica has a free place"
    assert made.pending_requests == [8, 8]


def test_a_prefix_is_left_only_for_a_much_shorter_queue():
    made = coordinator(most_blocks=100)
    made._update_rank_hashes(RANKS[0], [1])
    for pending, best in (([3, 0], 0), ([4, 3], 1), ([7, 4], 0), ([8, 4], 1), ([4, 9], 0)):
        made._pending_counts[:] = pending
        assert made.get_best_data_parallel_rank([1]) == RANKS[best], pending


def test_salts_share_no_blocks_and_a_request_that_is_not_cached_has_none():
    made, prompt = coordinator(most_blocks=100), list(range(12))
    found = []
    for routing in ({}, {"salt": "x"}, {"salt": "y"}, {"salt": "x"}):
        asks(made, **routing)
        found.append(made.compute_request_hashes(prompt))
    assert found[1] == found[3] and len(found[1]) == 3
    assert len({key for keys in found for key in keys}) == 9
    asks(made, reads=False, writes=False)
    assert made.compute_request_hashes(prompt) == []
    asks(made, reads=False)
    assert made.compute_request_hashes(prompt) == found[0]


def test_blocks_are_known_where_they_were_written_and_only_readers_follow_them():
    made = coordinator(most_blocks=100)
    assert [route(made, [1], writes=False), route(made, [1])] == [0, 1], "the first left nothing"
    made._pending_counts[:] = 0
    assert [route(made, [1], reads=False) for _ in range(2)] == [0, 1]  # in turn
    made._pending_counts[:] = 0
    assert route(made, [2], reads=False) == 0
    assert [route(made, [2]) for _ in range(3)] == [0] * 3, "it reads what the one before wrote"


def test_a_removed_replica_is_not_heard_and_each_client_learns_what_it_lost():
    made = coordinator(most_blocks=100)
    for request_id, (client, own, rank) in enumerate([(b"client", 7, 0), (b"other", 7, 1), (b"client", 8, 1)]):
        made.request_id_to_client_id[request_id], made.request_id_to_client_request_id[request_id] = client, own
        made.request_id_to_rank[request_id] = RANKS[rank]
        made.client_request_to_request_id[client, own] = request_id  # where clients can abort
        made._pending_counts[rank] += 1
    made.known_clients.add(b"other")
    sent = made.router_socket.messages
    made.remove_replica(1)
    made.remove_replica(1)
    assert sorted(sent) == [[b"client", LOST, 1, [8]], [b"other", LOST, 1, [7]]]
    assert made._take(RANKS[1], [b"megatron's"]) is None and made._take(RANKS[0], [b"megatron's"]) == b"megatron's"
    assert list(made.request_id_to_rank) == [0] and made.pending_requests == [1]
    if form_of("aborts and new tokens") == "yes":
        assert made.client_request_to_request_id == {(b"client", 7): 0}


@pytest.fixture
def behind_sockets(request):
    """A coordinator that has answered a client and both replicas, over real sockets, and those sockets by identity."""
    made, context = coordinator(most_blocks=100, kind=getattr(request, "param", PrefixCoordinator)), zmq.Context()
    made.most_queued, made.router_socket = 8, context.socket(zmq.ROUTER)
    made.router_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    made.router_socket.setsockopt(zmq.SNDTIMEO, 1000)  # a send that waits is an error, not a test that hangs
    made.router_socket.bind("inproc://router")
    made._handlers, made.next_request_id, made.schedule_records = dict(HANDLERS), 0, None
    peers = {}
    for name in (*RANKS, b"client", b"other"):
        peers[name] = context.socket(zmq.DEALER)
        peers[name].setsockopt(zmq.IDENTITY, name)
        peers[name].setsockopt(zmq.RCVHWM, 8)
        peers[name].setsockopt(zmq.RCVTIMEO, 1000)
        peers[name].connect("inproc://router")
    yield made, peers
    context.destroy(linger=0)


def submission(number: int) -> list[bytes]:
    message = [Headers.SUBMIT_REQUEST.value, number, [number], {}]
    return [SUBMIT, pack({"key": "k"}), pack(message)]


def test_a_replica_that_does_not_read_is_removed_and_the_others_go_on(behind_sockets):
    made, peers = behind_sockets
    ends = pack([Headers.SHUTDOWN.value])
    for begin in range(0, 24, 4):
        for number in range(begin, begin + 4):
            peers[b"client"].send_multipart(submission(number))
        peers[b"client"].send(ends)
        made.start()
        made.router_socket = made.router_socket._socket
    assert list(made.identity_to_rank_index) == [RANKS[1]], (
        "all with one key went to the first replica until it was full"
    )
    kind, replica, lost = peers[b"client"].recv_multipart()
    assert (kind, unpack(replica)) == (LOST, 0)
    got = [unpack(peers[RANKS[1]].recv())[1] for _ in range(8)]
    assert (unpack(lost), got) == (list(range(16)), list(range(16, 24)))


def test_a_client_that_does_not_read_or_has_left_is_no_end_of_the_coordinator(behind_sockets, caplog):
    made, peers = behind_sockets
    for number in range(16):
        peers[b"client"].send_multipart(streamed(ABORT, number))
    peers[b"client"].send(pack([Headers.SHUTDOWN.value]))
    made.start()
    for _ in range(30):
        made.send(b"client", LOST, pack(1), pack([]))
    made.send(b"left", LOST, pack(1), pack([]))
    assert [line.split(": ")[1] for line in caplog.messages] == ["8 messages wait for it", "it is not connected"]
    assert peers[b"client"].recv_multipart()[0] == LOST and list(made.identity_to_rank_index) == RANKS


def each_kind(raises: type[Exception], *kinds: type[Any]) -> pytest.MarkDecorator:
    """Runs a test with `behind_sockets` of megatron's class, where it must fail with ``raises``, and of these."""
    megatrons = pytest.param(DataParallelInferenceCoordinator, marks=expected(37, raises))
    return pytest.mark.parametrize("behind_sockets", [megatrons, *kinds], indirect=True)


def talks(made: Any, peers: dict[bytes, Any], *messages: list[Any], client: bytes = b"client") -> None:
    """Runs the coordinator until it has these messages of the client."""
    for message in [*messages, [Headers.SHUTDOWN.value]]:
        peers[client].send(pack(message))
    made.start()
    made.router_socket = getattr(made.router_socket, "_socket", made.router_socket)


@pytest.mark.parametrize("behind_sockets", [CoordinatorSeam, PrefixCoordinator], indirect=True)
def test_new_tokens_and_aborts_reach_the_right_ones(behind_sockets):
    made, peers = behind_sockets
    made.known_clients.add(b"other")
    talks(made, peers, asking(7, [1]), asking(8, [2]))
    talks(made, peers, asking(7, [3]), client=b"other")
    for name, request_id in ((RANKS[0], 0), (RANKS[1], 1), (RANKS[0], 2)):
        peers[name].send_multipart(streamed(PARTIAL, [{"request_id": request_id, "tokens": [request_id + 3]}]))
    peers[b"other"].send_multipart(streamed(ABORT, 8))
    for number in (8, 99):
        peers[b"client"].send_multipart(streamed(ABORT, number))
    talks(made, peers)
    found = {name: [ClientSeam.reply_in(*peers[name].recv_multipart())] for name in (b"client", b"other")}
    found[b"client"].append(ClientSeam.reply_in(*peers[b"client"].recv_multipart()))
    assert found == {b"client": [(7, {"tokens": [3]}), (8, {"tokens": [4]})], b"other": [(7, {"tokens": [5]})]}
    told = {name: [unpack(peers[name].recv()) for _ in range(2)] for name in RANKS}
    assert [message[2] for message in told[RANKS[0]]] == [[1], [3]], "nobody aborted these"
    assert told[RANKS[1]][1] == [Headers.SUBMIT_REQUEST.value, 1, [], {MARK: "abort"}]
    for name in RANKS:
        with pytest.raises(zmq.Again):
            peers[name].recv(zmq.NOBLOCK)


def refusals(peers: dict[bytes, Any], count: int) -> dict[int, str]:
    """Why requests of the client were refused, by id."""
    found = {}
    for _ in range(count):
        header, number, reply = unpack(peers[b"client"].recv())
        assert (header, reply["status"]) == (Headers.ENGINE_REPLY.value, "FAILED")
        found[number] = reply["events"][0]["payload"]["message"]
    return found


def asking(number: int, prompt: Any, **fields: Any) -> list[Any]:
    return [Headers.SUBMIT_REQUEST.value, number, prompt, fields]


@each_kind(Exception, CoordinatorSeam, PrefixCoordinator)
@pytest.mark.parametrize("prompt", [None, 5, b"text", {"prompt": 1}])
def test_a_prompt_that_is_none_is_refused_and_the_next_goes_on(behind_sockets, prompt):
    made, peers = behind_sockets
    talks(made, peers, asking(3, prompt), asking(4, [1, 2, 3]))
    assert "must be text or a list of token ids" in refusals(peers, 1)[3]
    assert unpack(peers[RANKS[0]].recv())[2] == [1, 2, 3]


@each_kind(TypeError, CoordinatorSeam, PrefixCoordinator)
def test_a_prompt_without_keys_goes_to_a_replica_which_says_what_is_wrong(behind_sockets):
    made, peers = behind_sockets
    wrong = [[1, 2, 3, "a", 5], [[1], [2, 3]], [2**63] * 4]
    talks(made, peers, *(asking(number, prompt) for number, prompt in enumerate(wrong)))
    assert [unpack(peers[RANKS[number % 2]].recv())[2] for number in range(3)] == wrong


@pytest.mark.parametrize("behind_sockets", [CoordinatorSeam, PrefixCoordinator], indirect=True)
def test_fields_that_an_engine_cannot_even_read(behind_sockets):
    """Megatron's engine would end: it asserts while it reads them."""
    made, peers = behind_sockets
    talks(
        made,
        peers,
        asking(1, [1], top_n_logprobs="3"),
        [Headers.SUBMIT_REQUEST.value, 2, [1], None],
        asking(4, [1], streaming_interval=0),
        asking(3, [1], return_prompt_top_n_logprobs=True, skip_prompt_log_probs=True),
    )
    assert refusals(peers, 3) == {
        1: "top_n_logprobs='3' must be an integer",
        2: "the sampling parameters None must be an object",
        4: "streaming_interval=0 must be at least 1",
    }
    assert unpack(peers[RANKS[0]].recv())[3] == {"return_prompt_top_n_logprobs": False, "skip_prompt_log_probs": True}


@pytest.mark.skipif(not hasattr(Headers, "RELEASE_KV"), reason="engines of this megatron hand no states to others")
@pytest.mark.parametrize("behind_sockets", [CoordinatorSeam, PrefixCoordinator], indirect=True)
def test_states_of_another_engine_are_refused(behind_sockets):
    """Megatron's engine would end, and all others with it at a message that names states to release."""
    made, peers = behind_sockets
    handoff = [Headers.SUBMIT_REQUEST_WITH_KV.value, 5, [1], {}, {}, [0]]
    talks(made, peers, handoff, [Headers.RELEASE_KV.value, 5], asking(6, [2]))
    assert refusals(peers, 1) == {5: "this engine takes no KV cache of another engine"}
    assert unpack(peers[RANKS[0]].recv())[2] == [2]


@each_kind(zmq.Again, CoordinatorSeam)
def test_requests_of_a_replica_that_leaves_are_refused_and_so_is_what_comes_to_none(behind_sockets):
    made, peers = behind_sockets
    talks(made, peers, asking(7, [1]), asking(8, [2]))
    for name in RANKS:
        made._remove_engine(name)
    assert refusals(peers, 2) == {7: "replica 0 ended", 8: "replica 1 ended"}
    talks(made, peers, asking(9, [1]), asking(10, [1]))
    assert refusals(peers, 2) == dict.fromkeys((9, 10), "no replica is left")
    assert made._take(RANKS[1], [b"of before"]) is None
    assert made._take(RANKS[1], [b""]) == b""  # it registers again
    made._handle_rank_registration(RANKS[1])
    talks(made, peers, asking(11, [4]))
    assert [unpack(peers[RANKS[1]].recv())[2] for _ in range(2)] == [[2], [4]]
    if form_of("aborts and new tokens") == "yes":  # new tokens of a request of before, which is forgotten
        made._handlers[Headers.ENGINE_REPLY_PARTIAL](made, RANKS[1], [0, [{"request_id": 1, "tokens": [5]}]])
    with pytest.raises(zmq.Again):
        peers[b"client"].recv(zmq.NOBLOCK)
