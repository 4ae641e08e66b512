"""The text of each token, so that the pieces joined are the text of all.

    ids       464    8237  11   28053  228         220   50256
    pieces    "The"  " film" ","  ""     " 🎬"        " "   ""        joined: what `decode` says of all ids

Tokens have no text of their own: a byte-level token may be half a character, a SentencePiece decoder drops the first
space, clean-up joins what tokens hold apart. A token's piece is what the text of all ids has up to it, and had not up
to the token before; a character that several tokens make belongs to the one that completes it. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNDECODABLE = "\ufffd"
"""What decoders put in the place of bytes that are no character, or not yet."""
SHORT, TRIES = 64, 12
"""More tokens are halved first, where that leaves the text as it is: so many places are tried."""


def text_pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """One piece of text for each token; empty for those that add nothing, special tokens for instance.

    Args:
        decode: of the tokenizer; decodes any prefix of `ids`.
        ids: `[n]`.

    Returns:
        `n` texts; joined they are `decode(ids)`, whatever the tokenizer does.
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
    """How many characters both begin with."""
    if whole.startswith(prefix):
        return len(prefix)
    return next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), len(whole))
