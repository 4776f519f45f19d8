"""Engines whose requests are made to answer with given tokens, so that their log-probs can be compared."""

from __future__ import annotations

import torch


class Forced:
    """What an engine says from now on: ``log_probs`` of the given tokens, and its own ``choices``, both (prompts, tokens).

    ``forced`` is as large; requests are numbered from 0. ``chunks`` has the tokens of each chunk of a prompt.
    """

    def __init__(self, engine, forced):
        self.log_probs = torch.zeros(forced.shape, dtype=torch.float64)
        self.choices = torch.zeros(forced.shape, dtype=torch.int64)
        self.counts = torch.zeros(len(forced), dtype=torch.int64)
        self.chunks = {number: [] for number in range(len(forced))}
        controller, context = engine.controller, engine.context
        sample, add = controller._dynamic_step_sample_logits, context.add_request

        def note_chunk(request, prefill_chunk_length=None):
            whole = request.remaining_prompt_length
            self.chunks[request.request_id].append(whole if prefill_chunk_length is None else prefill_chunk_length)
            return add(request, prefill_chunk_length)

        def sample_and_force(*args, **kwargs):
            result, sampled = sample(*args, **kwargs), controller._sampled_tokens_cuda
            ids = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
            # What follows a chunk that is not a prompt's last is not used.
            rows = torch.tensor([row for row, i in enumerate(ids) if i != context.chunked_prefill_request_id])
            if not len(rows):
                return result
            numbers = torch.tensor(ids)[rows]
            here = numbers, self.counts[numbers]
            self.counts[numbers] += 1
            rows, tokens = rows.to(sampled.device), forced[here].to(sampled.device)
            log_probs = torch.log_softmax(controller._all_logits_cuda[0, rows].double(), dim=-1)
            self.log_probs[here] = log_probs.gather(1, tokens[:, None])[:, 0].cpu()
            self.choices[here] = sampled[rows].cpu()
            sampled[rows] = tokens
            return result

        controller._dynamic_step_sample_logits, context.add_request = sample_and_force, note_chunk


def log_probs_of(rows, tokens):
    """Log-probs of tokens, one of each row: (rows,) on the CPU, from (rows, vocabulary)."""
    return rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].cpu()
