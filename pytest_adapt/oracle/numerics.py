"""The arithmetic that blocks are written in: named values, sums and products, exact or emulated.

Exact: float64, BLAS products, named values pass unchanged. Emulated: float32, named values are rounded as the
table says (`rounding`), and for fp32 sums run term by term. Blocks are written once against this class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..sites import UNRECORDED, layer_of, matches
from .errors import OracleError
from .rounding import Rounding

__all__ = ["Numerics", "partial_sums"]

# Elements of one accumulator: with its products it stays in a core's second-level cache.
_BLOCK = 1 << 15


class Numerics:
    """One run's arithmetic and its record of named values. ``weight`` gives a stored weight by name.

    ``sites`` gets values whose full name matches a pattern of ``record``. A name in ``forced`` stores the run's
    own value in ``own`` and goes on with the given one, so that an error never travels past a forced site. ``sized``:
    of forced sites that are one matrix product, ``terms`` gets the size of the partial sums (`partial_sums`), in the
    same shape.
    """

    def __init__(
        self,
        weight: Callable[[str], np.ndarray],
        architecture: str,
        rounding: Rounding | None = None,
        record: tuple[str, ...] = (),
        forced: Mapping[str, np.ndarray] | None = None,
        sized: bool = False,
        absorbed: bool = False,
    ) -> None:
        self._weight = weight
        self._architecture = architecture
        self._rounding = rounding
        self._record = record
        self._forced = forced or {}
        self.dtype = np.dtype(np.float64 if rounding is None else np.float32)
        self.sites: dict[str, np.ndarray] = {}
        self.own: dict[str, np.ndarray] = {}
        self.terms: dict[str, np.ndarray] = {}
        self._sized = sized
        self.absorbed = absorbed
        """Of latent attention: whether it works on the latent, see `blocks.latent_attention`."""
        self._latest: tuple[np.ndarray | None, np.ndarray] = (None, np.empty(0))

    @property
    def in_order(self) -> bool:
        """Whether every sum runs term by term."""
        return self._rounding is not None and self._rounding.sequential

    def site(self, name: str, x: np.ndarray) -> np.ndarray:
        """Pass a value of the public vocabulary: round, compare notes, go on (see the class)."""
        x = self.inner(name, x)
        if name in self._forced:
            self.own[name] = x
            product, terms = self._latest
            if x is product or (product is not None and x.base is product):
                self.terms[name] = terms.reshape(x.shape)
            x = self._given(name, x)
        if matches(name, self._record) and layer_of(name)[1] not in UNRECORDED:
            self.sites[name] = x
        return x

    def chosen(self, name: str, own: np.ndarray, used: np.ndarray) -> None:
        """Note an integer choice: the run's own where the name is forced, and the one that it goes on with."""
        if name in self._forced:
            self.own[name] = own
        if matches(name, self._record):
            self.sites[name] = used

    def inner(self, name: str, x: np.ndarray) -> np.ndarray:
        """Pass a value that engines materialise but that is not in the public vocabulary: round it."""
        return x if self._rounding is None else self._rounding.apply(name, x, self._architecture)

    def parameter(self, name: str) -> np.ndarray:
        """A weight in the precision of the deployment."""
        return self.inner(f"parameter.{name}", self._weight(name).astype(self.dtype, copy=False))

    def matmul(self, a: np.ndarray, b: np.ndarray, in_order: bool = False) -> np.ndarray:
        """Batched matrix product [..., m, K] x [..., K, n]; leading dimensions are equal.

        ``in_order`` sums term by term under every emulation: for a result that is held in float32, whose error is that
        of the order of its sums alone.
        """
        if not self.in_order and (self._rounding is None or not in_order):
            product: np.ndarray = a @ b
            return product
        batch, (m, n) = a.shape[:-2], (a.shape[-2], b.shape[-1])
        out = np.empty((*batch, m, n), np.float32)
        width = max(1, _BLOCK // max(m, 1))
        for index in np.ndindex(batch):
            left = np.ascontiguousarray(a[index].T)
            for start in range(0, n, width):
                _rank_one_sum(left, np.ascontiguousarray(b[index][:, start : start + width]), out[index], start)
        return out

    def linear(self, x: np.ndarray, weight: str, bias: str | None = None, in_order: bool = False) -> np.ndarray:
        """x [T, in] times the transposed weight [out, in], plus bias [out]; ``in_order`` as in `matmul`."""
        matrix = self.parameter(weight).T
        y = self.matmul(x, matrix, in_order)
        if bias is not None:
            y = y + self.parameter(bias)
        if self._sized:
            self._latest = y, partial_sums(x, matrix)
        return y

    def linear_by_rows(
        self, products: Mapping[str, tuple[tuple[np.ndarray, ...], np.ndarray]], shape: tuple[int, ...]
    ) -> np.ndarray:
        """One array of ``shape`` put together from products: weight name -> (index of its rows, their x [R, in])."""
        y = np.empty(shape, self.dtype)
        sizes = np.empty(shape) if self._sized else np.empty(0)
        for weight, (rows, x) in products.items():
            y[rows] = self.linear(x, weight)
            if self._sized:
                sizes[rows] = self._latest[1]
        if self._sized:
            self._latest = y, sizes
        return y

    def total(self, x: np.ndarray) -> np.ndarray:
        """Sum over the last axis, kept as an axis of 1."""
        if not self.in_order:
            total: np.ndarray = x.sum(axis=-1, keepdims=True)
            return total
        # Over the first axis of a C-contiguous array NumPy adds whole rows, one after the other.
        columns = np.ascontiguousarray(np.moveaxis(x, -1, 0)).reshape(x.shape[-1], -1)
        return _ordered_sum(columns).reshape(*x.shape[:-1], 1)

    def _given(self, name: str, own: np.ndarray) -> np.ndarray:
        given = np.asarray(self._forced[name])
        if given.shape != own.shape:
            raise OracleError(
                f"forced {name}: shape {given.shape}, but this run's value has {own.shape}; pass all rows"
            )
        return given.astype(self.dtype)


def partial_sums(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Root mean square of the partial sums of each element of ``x @ matrix``, over all orders of its terms.

    After k of K terms t in random order, E[S_k^2] = k/K sum(t^2) + k(k-1)/(K(K-1)) (S^2 - sum(t^2)); the mean over k
    tends to sum(t^2)/6 + S^2/3. Each addition rounds in proportion to the partial sum at that moment, so an engine's
    error is proportional to this, whatever its order. The sum of the terms' magnitudes is not: one huge term, cancelled
    by another, stays in the partial sum through most additions.
    """
    squares = np.square(x) @ np.square(matrix)
    found: np.ndarray = np.sqrt(squares / 6 + np.square(x @ matrix) / 3)
    return found


def _rank_one_sum(left: np.ndarray, right: np.ndarray, out: np.ndarray, start: int) -> None:
    """out[:, start:] = sum over k of left[k] (outer) right[k], each product and each sum rounded to float32."""
    block = np.zeros((left.shape[1], right.shape[1]), np.float32)
    product = np.empty_like(block)
    for k in range(left.shape[0]):
        np.multiply(left[k][:, None], right[k], out=product)
        np.add(block, product, out=block)
    out[:, start : start + right.shape[1]] = block


def _ordered_sum(rows: np.ndarray) -> np.ndarray:
    total = np.zeros(rows.shape[1], rows.dtype)
    for row in rows:
        np.add(total, row, out=total)
    return total
