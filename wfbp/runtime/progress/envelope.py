"""What ranks bring to an exchange goes in an envelope that says what for.

Exchanges meet in the order in which ranks come to them, whatever they are for. Ranks that have come
to different ones find out here, before anybody reads what was meant for another purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

from wfbp.errors import DisagreementError

_LENGTH_BYTES = 4


def encode_tagged(purpose: str, payload: bytes) -> bytes:
    """The payload behind its purpose."""
    text = purpose.encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + payload


def decode_tagged(where: str, tagged: Sequence[bytes]) -> list[bytes]:
    """Every rank's payload.

    Args:
        where: who this is, for messages ("rank 1 of 4").
        said: what :func:`seal` gave on each rank.

    Raises:
        DisagreementError: purposes differ; those of two ranks.

    Example:
        >>> unseal("rank 0 of 2", [seal("greeting", b"I"), seal("greeting", b"me")])
        [b'I', b'me']
    """
    opened = [_split_tag(letter) for letter in tagged]
    first = opened[0][0]
    for rank, (purpose, _) in enumerate(opened):
        if purpose != first:
            raise DisagreementError(
                f"{where}: ranks called different operations: {first} on rank 0, {purpose} on rank "
                f"{rank}. Every rank must call the same operations in the same order with the same "
                "names, element types and shapes"
            )
    return [payload for _, payload in opened]


def _split_tag(letter: bytes) -> tuple[str, bytes]:
    start = _LENGTH_BYTES + int.from_bytes(letter[:_LENGTH_BYTES], "little")
    return letter[_LENGTH_BYTES:start].decode(), letter[start:]
