"""Which GPU a rank uses: that of its number on its host."""

from __future__ import annotations


def check_local_rank(
    where: str, local_rank: int, local_size: int, count: int, otherwise: str
) -> None:
    """Raise ``RuntimeError`` if there are fewer GPUs (``count``) than ranks on this host.

    ``otherwise`` is how a program can choose a GPU by number, for the message.

    Example:
        >>> check_local_rank("rank 1 of 2", 1, 2, 2, "call set_device()")
    """
    if local_rank < count:
        return
    raise RuntimeError(
        f"{where}: {local_size} ranks on this host, but {count} GPUs. Start {count or 'no'} ranks "
        f"per host on GPUs; or, where the launcher shows each rank a GPU of its own or some are to "
        f"share one, {otherwise} with a number below (for sharing also set "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30), or accept that gradients travel through the "
        "host); or train on the CPU"
    )
