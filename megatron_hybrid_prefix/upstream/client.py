"""`ClientSeam`: megatron's client of the coordinator, its private hooks under neutral names."""

from __future__ import annotations

from typing import Any

import msgpack
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams


class ClientSeam(InferenceClient):
    """Megatron's client; a subclass overrides the methods without an underscore."""

    socket: Any
    next_request_id: int

    async def _recv_task(self) -> None:
        """Messages of this package, without polling."""
        await self.receive_all()

    async def receive_all(self) -> None:
        """Receive messages until the task of this coroutine is cancelled."""
        await super()._recv_task()

    @staticmethod
    def submission(request_id: int, prompt: list[int], params: SamplingParams) -> bytes:
        """Megatron's message that submits a request."""
        message = [Headers.SUBMIT_REQUEST.value, request_id, prompt, params.serialize()]
        return msgpack.packb(message, use_bin_type=True)

    @staticmethod
    def finished_request(message: bytes) -> tuple[int, DynamicInferenceRequest] | None:
        """Id and answer of a finished request; None: the message is another one of megatron's."""
        header, *contents = msgpack.unpackb(message, raw=False)
        if header != Headers.ENGINE_REPLY.value:
            return None
        request_id, answer = contents
        request: Any = DynamicInferenceRequest.deserialize(answer)
        return request_id, request
