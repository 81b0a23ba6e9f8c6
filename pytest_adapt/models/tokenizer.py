"""A tokenizer whose text and ids map one to one: token i is the Unicode character U+4E00 + i.

Four special tokens take the last ids of the vocabulary (unknown, begin, end, padding). Nothing is added
or normalised on the way, so a text prompt reaches a server as exactly the ids it was made from.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SPECIAL", "character_tokenizer", "plain_ids", "tokenizer_config"]

SPECIAL = ("<|unk|>", "<|bos|>", "<|eos|>", "<|pad|>")
_FIRST = 0x4E00


def plain_ids(vocab: int) -> range:
    """Ids that stand for ordinary characters."""
    return range(vocab - len(SPECIAL))


def character_tokenizer(vocab: int) -> dict[str, Any]:
    """tokenizer.json for ``vocab`` tokens: BPE without merges, so that every character is a token."""
    plain = [chr(_FIRST + i) for i in plain_ids(vocab)]
    added = [
        {
            "id": len(plain) + i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(SPECIAL)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIAL[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate([*plain, *SPECIAL])},
            "merges": [],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """tokenizer_config.json beside `character_tokenizer`."""
    unk, bos, eos, pad = SPECIAL
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
