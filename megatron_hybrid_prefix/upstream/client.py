"""`ClientSeam`: megatron's client of the coordinator, its private hooks under neutral names."""

from __future__ import annotations

from typing import Any, override

import msgpack
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_hybrid_prefix.upstream.coordinator import ABORT, PARTIAL, streamed


class ClientSeam(InferenceClient):
    """Megatron's client; a subclass overrides the methods without an underscore."""

    socket: Any
    next_request_id: int

    @override
    async def _recv_task(self) -> None:
        """Messages of this package, without polling."""
        await self.receive_all()

    async def receive_all(self) -> None:
        """Receive messages until the task of this coroutine is cancelled."""
        await super()._recv_task()

    def abort(self, request_id: int) -> None:
        """Abort a request, finished or not. Its replica may still send output that was under way."""
        self.socket.send_multipart(streamed(ABORT, request_id))

    @staticmethod
    def submission(request_id: int, prompt: list[int], params: SamplingParams) -> bytes:
        """Megatron's message that submits a request."""
        message = [Headers.SUBMIT_REQUEST.value, request_id, prompt, params.serialize()]
        return msgpack.packb(message, use_bin_type=True)

    @staticmethod
    def reply_in(*frames: bytes) -> tuple[int, DynamicInferenceRequest | dict[str, Any]] | None:
        """Id and answer of a finished request, or id and new output of another; None: it is another message of megatron's."""
        header, *contents = msgpack.unpackb(frames[-1], raw=False)
        if header not in (Headers.ENGINE_REPLY.value, PARTIAL):
            return None
        request_id, output = contents
        if header == PARTIAL:
            del output["request_id"]  # the coordinator's
            return request_id, output
        return request_id, DynamicInferenceRequest.deserialize(output)
