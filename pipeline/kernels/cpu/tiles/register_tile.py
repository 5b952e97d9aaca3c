"""The loop shared by all tiles: a small matrix product whose sums stay in registers, for any kind of product."""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pipeline.kernels.cpu.tiles.vector_code import FLOAT, INT8, INT16, INT32, REORDER, VectorCode

Cell = tuple[int, int]
"""Row and vector of a sum."""


class FloatDot:
    """Products of float32, one per lane."""

    def __init__(self, code: VectorCode) -> None:
        self.code = code

    def begin(self, total) -> Any:
        """Return the accumulator of a step, given the sum before it."""
        return total

    def add(self, total, value, weight) -> Any:
        """Add the product of a row's value and a vector of weights to `total`."""
        builder = self.code.builder
        return builder.fadd(total, builder.fmul(value, weight, flags=REORDER), flags=REORDER)

    def end(self, total) -> Any:
        """Return the sum after a step, given its accumulator."""
        return total


class Bf16PairDot(FloatDot):
    """Products of pairs of bfloat16 (VDPBF16PS), summed in float32."""

    def add(self, total, value, weight) -> Any:
        return self.code.add_pairs(total, value, weight)


class VnniDot(FloatDot):
    """Products of four unsigned bytes of a weight with four signed ones (VPDPBUSD), summed in 32 bits."""

    def add(self, total, value, weight) -> Any:
        name = f"x86.avx512.vpdpbusd.{32 * total.type.count}"
        return self.code.call(name, total.type, total, weight, value)


class Avx2ByteDot(FloatDot):
    """The same for 8-bit weights on AVX2: even and odd bytes are widened to 16 bits."""

    def add(self, total, value, weight) -> Any:
        code, builder = self.code, self.code.builder
        pairs = ir.VectorType(INT16, 2 * total.type.count)
        eight = ir.Constant(pairs, [8] * pairs.count)
        weight, value = builder.bitcast(weight, pairs), builder.bitcast(value, pairs)
        odd = add_words(code, builder.lshr(weight, eight), builder.ashr(value, eight))
        weight, value = (builder.shl(each, eight) for each in (weight, value))
        even = add_words(code, builder.lshr(weight, eight), builder.ashr(value, eight))
        return builder.add(total, builder.add(odd, even))


class Avx2NibbleDot(FloatDot):
    """The same for 4-bit weights on AVX2 (PMADDUBSW): the sums of a step fit in 16 bits; `end` widens them."""

    def begin(self, total) -> Any:
        return total, None

    def add(self, total, value, weight) -> Any:
        before, partial = total
        lanes = before.type.count
        value, weight = (self.code.builder.bitcast(each, ir.VectorType(INT8, 4 * lanes)) for each in (value, weight))
        product = self.code.call("x86.avx2.pmadd.ub.sw", ir.VectorType(INT16, 2 * lanes), weight, value)
        return before, product if partial is None else self.code.builder.add(partial, product)

    def end(self, total) -> Any:
        before, partial = total
        ones = self.code.same(INT16, partial.type.count, 1)
        return self.code.builder.add(before, add_words(self.code, partial, ones))


def add_words(code: VectorCode, one, other):
    """Emit PMADDWD: 32-bit sums of two products of 16 bits each."""
    lanes = one.type.count // 2 if one.type.element == INT16 else one.type.count
    pairs = ir.VectorType(INT16, 2 * lanes)
    name = "x86.avx512.pmaddw.d.512" if lanes == 16 else "x86.avx2.pmadd.wd"
    return code.call(name, ir.VectorType(INT32, lanes), *(code.builder.bitcast(each, pairs) for each in (one, other)))


def register_tile(
    dot: FloatDot,
    start: dict[Cell, Any],
    steps,
    operands: Callable[[Any], Iterator[tuple[Callable[[int], Any], list[Any]]]],
) -> dict[Cell, Any]:
    """Emit the loop over `steps`; return the sum of each cell, starting from those in `start`.

    operands(step) yields the products of a step in order: a function of the row that loads its value into all lanes,
    and the vectors of weights. Their order is the order of the instructions.
    """
    code, builder = dot.code, dot.code.builder
    held = {cell: code.held(total) for cell, total in start.items()}
    num_rows = 1 + max(r for r, _ in start)
    with cgutils.for_range(builder, steps) as loop:
        total = {cell: dot.begin(builder.load(register)) for cell, register in held.items()}
        for value_of, weight_V in operands(loop.index):
            for r in range(num_rows):
                value = value_of(r)
                for v, weight in enumerate(weight_V):
                    total[r, v] = dot.add(total[r, v], value, weight)
        for cell, register in held.items():
            builder.store(dot.end(total[cell]), register)
    return {cell: builder.load(register) for cell, register in held.items()}


def zeros(rows: int, vectors: int, lanes: int) -> dict[Cell, Any]:
    """Return float32 sums that start at zero."""
    nothing = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
    return {(r, v): nothing for r in range(rows) for v in range(vectors)}
