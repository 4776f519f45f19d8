"""How much memory is free, on a GPU and on the host."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that a new tensor could take on a device; on a GPU also what PyTorch holds and does not use."""
    if device.type != "cuda":
        return host_free_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def total_bytes() -> int:
    """Bytes of memory that the current device has in all."""
    device = torch.device(torch.cuda.current_device())
    return int(torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total)


def host_free_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes of host memory that are available to this process, in a container within its limit."""
    free: int = psutil.virtual_memory().available
    limit = cgroup / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text == "max":
        return free
    used = int((cgroup / "memory.current").read_text())
    facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return max(0, min(free, int(text) - used + int(facts.get("inactive_file", 0))))  # a file's pages can be dropped
