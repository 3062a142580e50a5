"""Will it fit? Asked before anything is allocated: the answer is a sentence and not a killed process."""

from __future__ import annotations

from pathlib import Path


class WontFitError(RuntimeError):
    """More bytes are `needed` than are `available`. Raised before anything is allocated."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        self.needed, self.available = needed, available
        super().__init__(
            f"{what} needs {needed / 1e9:.2f} GB of memory, but only {max(available, 0) / 1e9:.2f} GB are "
            "available: take a smaller dtype or model, or --force it"
        )


def check_fit(what: str, needed: int, device: str = "cpu") -> None:
    """Raises `WontFitError` if `needed` bytes are surely not to be had. `what` names them in the message."""
    available = available_bytes(device)
    if available is not None and needed > available:
        raise WontFitError(what, needed, available)


def available_bytes(device: str = "cpu") -> int | None:
    """Memory that can still be had: the GPU's, or the machine's within this process's limits.

    `None` where the system does not tell.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    known = [n for n in (_free_in_machine(), _free_in_group(), _free_in_process()) if n is not None]
    return min(known, default=None)


def _free_in_machine() -> int | None:
    """Linux's own estimate of what can be allocated without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _free_in_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves. File pages, which the kernel can drop, do not count as used."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))


def _free_in_process() -> int | None:
    """What `ulimit -v` leaves."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit - pages * resource.getpagesize()
