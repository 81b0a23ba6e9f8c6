"""Needle models: weights constructed so that what they recall has a closed form at any length.

A needle is one token that says "key i has value j"; an address token asks for key i. Wherever the needle stands, the
next token after the question is the address of j, so a chain of questions walks through the context. Nothing is
trained and nothing is random in what matters; the checkpoint is an ordinary Llama or Mixtral of two layers.

Construction (d = 64 head channels, rotary pairs (c, c + 32), Delta the distance between question and needle)

* Keys and addresses carry the same 16-channel code, a row of the Hadamard matrix or its negative: equal codes have
  product 16, opposite ones -16, all others 0. Queries of addresses and keys of needles hold it in the eight slowest
  rotary pairs, so that a match scores (A B / 8) sum_c cos(Delta w_c) with w_c Delta < 0.5 up to 64K tokens: it stays
  near its peak, and the exact loss is known.
* Every other token has a query of exactly 0: all its scores are 0, and what it attends to is the plain mean of the
  values before it. Addresses and rulers have keys and values of exactly 0. So the state of every token is a running
  mean, and each question is one sum over keys: time O(n) for n tokens (`pytest_adapt.golden.closed_form`).
* Value j has four bits. Layer l and key-value head g carry bit 2 l + g as +-1, and write it to a channel of its own,
  which no query, key or value reads. The answer's logit is the sum over its bits: a layer or a head that recalls
  nothing, or something else, changes the answer.
* A ruler asks for all needles at once, weighed by the cosine of Delta w for one faster pair (another one for each
  head): its answer is a known mixture that a wrong rotary frequency, scaling or position changes altogether.
* Fillers and needles have three random value channels a head besides, whose means show in the logits of every
  row: in float32 a single lost key is seen from anywhere.
* The feed-forward parts run, and their down projections are 0.

All weights are exact in float32, bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pytest_adapt.models.entries import ModelEntry, ModelError
from pytest_adapt.models.tokenizer import SPECIAL
from pytest_adapt.models.weights import TensorSpec, draw

__all__ = ["Vocabulary", "needle_weights"]

KEYS, VALUES, RULERS = 32, 16, 4
_LAYERS, _HEADS, _GROUPS, _WIDTH, _HIDDEN = 2, 4, 2, 64, 128
_CODE = 16
# Channels of the residual stream.
_KEY, _ASK, _BITS, _MARK, _RULER, _TEXTURE = slice(0, 16), slice(16, 32), 32, 36, 38, slice(48, 64)
_FOUND, _MEANS, _IDENTITY = 64, 68, slice(80, 128)
_NOISE = 3
# Rotary pairs: those of the codes, that of the mark which all needles share, and one per head for the rulers.
_SLOW = (*range(24, 32), *range(56, 64))
_SHARED = 23
_RULED = (0, 8, 14, 18)
_IDENTITY_SIZE = 1.375  # brings every token's mean square near 1


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a needle model's tokens. ``size`` counts the special ones."""

    size: int

    def address(self, key: int) -> int:
        """Asks for ``key``, and is the answer where the value is ``key`` (values are the first 16 keys)."""
        return key

    def ruler(self, which: int) -> int:
        """Asks for a mixture of all needles."""
        return KEYS + which

    def needle(self, key: int, value: int) -> int:
        """Says that ``key`` has ``value``."""
        return KEYS + RULERS + key * VALUES + value

    @staticmethod
    def value_of(needle: int) -> int:
        """The value that a needle says."""
        return (needle - KEYS - RULERS) % VALUES

    @property
    def fillers(self) -> range:
        """Tokens that say nothing."""
        return range(KEYS + RULERS + KEYS * VALUES, self.size - len(SPECIAL))

    def is_question(self, token: int) -> bool:
        return token < KEYS + RULERS


def needle_weights(entry: ModelEntry) -> dict[str, np.ndarray]:
    """Every tensor of a needle model as float32, by its name in the checkpoint.

    Raises ModelError where the configuration is not the one that the construction is made for.
    """
    config = entry.config
    wanted = {
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _GROUPS,
        "head_dim": _WIDTH,
        "tie_word_embeddings": False,
    }
    for key, value in wanted.items():
        if config.get(key) != value:
            raise ModelError(f"model {entry.name}: {key} is {config.get(key)!r}; needle models have {value!r}")
    if entry.family not in ("llama", "mixtral"):
        raise ModelError(f"model {entry.name}: needle models are of family llama or mixtral, not {entry.family!r}")
    return dict(_tensors(entry, Vocabulary(config["vocab_size"]), entry.recipe["seed"]))


def _tensors(entry: ModelEntry, words: Vocabulary, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    config = entry.config
    ones = np.ones(_HIDDEN, np.float32)
    yield "model.embed_tokens.weight", _embedding(words, seed)
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", ones
        for name, weight in _attention(layer, seed):
            yield f"{at}.self_attn.{name}.weight", weight
        yield f"{at}.post_attention_layernorm.weight", ones
        inner = config["intermediate_size"]
        if entry.family == "llama":
            yield from _feed_forward(f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"), inner, seed)
            continue
        experts = config["num_local_experts"]
        yield f"{at}.block_sparse_moe.gate.weight", _signs(f"{at}.gate", (experts, _HIDDEN), seed) / 16
        for expert in range(experts):
            name = f"{at}.block_sparse_moe.experts.{expert}"
            yield from _feed_forward(name, ("w1", "w3", "w2"), inner, seed)
    yield "model.norm.weight", ones
    yield "lm_head.weight", _head(words, seed)


def _embedding(words: Vocabulary, seed: int) -> np.ndarray:
    table = np.zeros((words.size, _HIDDEN), np.float32)
    codes, bits = _codes(), _bits()
    table[:, _IDENTITY] = _signs("identity", (words.size, 48), seed) * _IDENTITY_SIZE
    texture = _signs("texture", (words.size, _CODE), seed)
    table[KEYS + RULERS :, _TEXTURE] = texture[KEYS + RULERS :]
    for key in range(KEYS):
        table[words.address(key), _ASK] = codes[key]
        for value in range(VALUES):
            row = table[words.needle(key, value)]
            row[_KEY], row[_BITS : _BITS + 4], row[_MARK] = codes[key], bits[value], 1.0
    for which in range(RULERS):
        table[words.ruler(which), _RULER + which] = 4.0
    return table


def _attention(layer: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    query = np.zeros((_HEADS, _WIDTH, _HIDDEN), np.float32)
    key = np.zeros((_GROUPS, _WIDTH, _HIDDEN), np.float32)
    value = np.zeros((_GROUPS, _WIDTH, _HIDDEN), np.float32)
    out = np.zeros((_HIDDEN, _HEADS, _WIDTH), np.float32)
    code, ask, texture = (np.arange(_HIDDEN)[part] for part in (_KEY, _ASK, _TEXTURE))
    for head in range(_HEADS):
        # Heads that share keys differ in how sharply they look.
        query[head, _SLOW, ask] = 4.0 + head % 2 / 2
        # Each ruler is read by another pair in each head; its product with the mark is 12 a match of the shared pair,
        # and up to 4 for the phase.
        for which in range(RULERS):
            query[head, _SHARED, _RULER + which] = 12.0
            query[head, _RULED[(which + head) % RULERS], _RULER + which] = 4.0
        group = head // (_HEADS // _GROUPS)
        place = 2 * layer + group
        out[_FOUND + place, head, 0] = 2.0
        for channel in range(_NOISE):
            out[_MEANS + _NOISE * place + channel, head, 1 + channel] = 0.5
    for group in range(_GROUPS):
        place = 2 * layer + group
        key[group, _SLOW, code] = 2.0
        key[group][np.ix_(_SLOW, texture)] += _signs(f"keys.{place}", (_CODE, _CODE), seed) / 16
        key[group, (_SHARED, *_RULED), _MARK] = 2.0
        value[group, 0, _BITS + place] = 1.0
        for channel in range(_NOISE):
            value[group, 1 + channel, texture] = _signs(f"values.{place}.{channel}", (_CODE,), seed) / 4
    yield "q_proj", query.reshape(-1, _HIDDEN)
    yield "k_proj", key.reshape(-1, _HIDDEN)
    yield "v_proj", value.reshape(-1, _HIDDEN)
    yield "o_proj", out.reshape(_HIDDEN, -1)


def _head(words: Vocabulary, seed: int) -> np.ndarray:
    head = np.zeros((words.size, _HIDDEN), np.float32)
    head[:, _MEANS : _MEANS + 12] = _signs("head.means", (words.size, 12), seed) / 2
    head[KEYS:, _IDENTITY] = _signs("head.identity", (words.size, 48), seed)[KEYS:] / 4
    head[:VALUES, _FOUND : _FOUND + 4] = _bits() * 1.5
    return head


def _feed_forward(at: str, names: tuple[str, str, str], inner: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    gate, up, down = names
    yield f"{at}.{gate}.weight", _signs(f"{at}.gate", (inner, _HIDDEN), seed) / 8
    yield f"{at}.{up}.weight", _signs(f"{at}.up", (inner, _HIDDEN), seed) / 8
    yield f"{at}.{down}.weight", np.zeros((_HIDDEN, inner), np.float32)


def _signs(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """+-1 from the generator of all procedural weights."""
    drawn = draw(TensorSpec(f"needle.{name}", tuple(shape), 1.0), seed)
    return np.where(drawn >= 0, np.float32(1), np.float32(-1))


def _codes() -> np.ndarray:
    """float32 [32, 16]: rows of the Hadamard matrix (Sylvester's construction), then their negatives."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < _CODE:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.concatenate([matrix, -matrix])


def _bits() -> np.ndarray:
    """float32 [16, 4]: the bits of each value as +-1."""
    values = np.arange(VALUES)
    return np.stack([np.where(values >> bit & 1, 1.0, -1.0) for bit in range(4)], axis=1).astype(np.float32)
