"""Text of each token, such that the joined pieces are the text of the whole sequence.

    ids       464    8237  11   28053  228         220   50256
    pieces    "The"  " film" ","  ""     " 🎬"        " "   ""        joined: `decode` of all ids

Decoding tokens one by one does not work in general: a byte-level token may be half a character, a SentencePiece decoder
drops the first space, and clean-up changes text across tokens. A token's piece is what it adds to the decoded text. A
character made of several tokens belongs to the token that completes it. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNDECODABLE = "\ufffd"
"""Replacement by decoders for bytes that are not a complete character."""
SHORT, TRIES = 64, 12
"""Longer sequences than `SHORT` are split in two where that does not change the text; `TRIES` positions are tried."""


def text_pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Return one piece of text for each token; empty for tokens that add nothing, such as special tokens.

    Args:
        decode: the tokenizer's decode function; it must accept any prefix of `ids`.
        ids: `[n]`.

    Returns:
        `n` texts. Joined they are `decode(ids)` for every tokenizer.

    Example:
        >>> text_pieces(lambda ids: bytes(ids).decode(errors="replace"), [104, 105, 195, 188])
        ['h', 'i', '', 'ü']
    """
    ids = list(ids)
    whole = decode(ids)
    half = len(ids) // 2
    for middle in range(half, half + TRIES if len(ids) > SHORT else half):
        if decode(ids[:middle]) + decode(ids[middle:]) == whole:
            return text_pieces(decode, ids[:middle]) + text_pieces(decode, ids[middle:])
    single = [decode([id]) for id in ids]
    if "".join(single) == whole and UNDECODABLE not in whole:
        return single
    pieces, begin = [], 0
    for n in range(1, len(ids) + 1):
        end = len(whole) if n == len(ids) else max(begin, _agreement(decode(ids[:n]), whole))
        pieces.append(whole[begin:end])
        begin = end
    return pieces


def _agreement(prefix: str, whole: str) -> int:
    """Return the length of the common prefix."""
    if whole.startswith(prefix):
        return len(prefix)
    return next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), len(whole))
