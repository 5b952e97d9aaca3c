"""Vector code in LLVM's terms, for the intrinsics of tiles and attention.

These intrinsics exist because LLVM's loop vectorizer keeps no two-dimensional tile of sums in registers.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

INT8, INT16, INT32, INT64 = map(ir.IntType, (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
STORED = {types.float32: FLOAT, types.uint32: INT32, types.uint16: INT16, types.uint8: INT8}
"""LLVM's types of array elements, by numba's."""
REORDER = ("contract", "reassoc", "nsz", "arcp")
"""Flags of float sums whose order is free."""


class Bfloat16(ir.Type):
    """LLVM's bfloat16 type, which llvmlite does not provide."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash(Bfloat16)


class VectorCode:
    """Builder for the body of one intrinsic: its arguments and instructions."""

    def __init__(self, context, builder, signature, arguments) -> None:
        self.context, self.builder, self.kinds, self.arguments = context, builder, signature.args, arguments

    def element_address(self, array: int, at: int):
        """Return the address of an element; `array` and `at` are indices of arguments."""
        return self.after(self.element(self.kinds[array], self.arguments[array]), self.arguments[at])

    def element(self, kind, array):
        """Return the address of the first element of a contiguous array."""
        assert kind.layout == "C"
        return self.context.make_array(kind)(self.context, self.builder, array).data

    def members(self, number: int) -> list:
        """Unpack an argument that is a tuple: its numbers, the addresses of its arrays, None for None."""
        kinds = list(self.kinds[number])
        values = cgutils.unpack_tuple(self.builder, self.arguments[number], len(kinds))
        return [
            self.element(kind, value) if isinstance(kind, types.Array) else
            None if isinstance(kind, types.NoneType) else value
            for kind, value in zip(kinds, values)
        ]  # fmt: skip

    def after(self, address, *offsets):
        """Return the address that is the sum of `offsets` elements later."""
        for offset in offsets:
            address = self.builder.gep(address, [INT64(offset) if isinstance(offset, int) else offset])
        return address

    def times(self, number: int, stride):
        return self.builder.mul(INT64(number), stride)

    def load(self, address, element, lanes: int):
        """Load a vector of adjacent elements."""
        loaded = self.builder.load(self.builder.bitcast(address, ir.VectorType(element, lanes).as_pointer()))
        loaded.align = 1
        return loaded

    def load_scales(self, address, dtype, lanes: int):
        """Load a vector of scales as float32, stored as float32 or as bits of float16."""
        if dtype == types.float32:
            return self.load(address, FLOAT, lanes)
        return self.builder.fpext(self.load(address, HALF, lanes), ir.VectorType(FLOAT, lanes))

    def load_zeros(self, address, dtype, lanes: int):
        """Load a vector of zero points as float32, stored as float32 or as uint8."""
        if dtype == types.float32:
            return self.load(address, FLOAT, lanes)
        return self.builder.uitofp(self.load(address, INT8, lanes), ir.VectorType(FLOAT, lanes))

    def store(self, value, address) -> None:
        self.builder.store(value, self.builder.bitcast(address, value.type.as_pointer())).align = 1

    def everywhere(self, value, lanes: int):
        """Broadcast one value to all lanes of a vector."""
        single = self.builder.insert_element(
            ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, INT32(0)
        )
        return self.pick(single, single, [0] * lanes)

    def pick(self, a, b, lanes: list[int]):
        """Shuffle lanes of two vectors into one; lanes of the second are numbered after those of the first."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))

    def same(self, element, lanes: int, number: float):
        """Return a constant vector with one number in all lanes."""
        return ir.Constant(ir.VectorType(element, lanes), [number] * lanes)

    def call(self, name: str, result, *values):
        """Call a function of LLVM."""
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}"), values)

    def held(self, value):
        """Allocate a variable for a value that changes in a loop; it becomes a register."""
        return cgutils.alloca_once_value(self.builder, value)

    def add_pairs(self, total, pairs, other_pairs):
        """Emit VDPBF16PS: add products of two bfloat16 each to 16 float32 sums. Products are exact; numbers too small
        for a normal float32 count as 0."""
        vector = ir.VectorType(Bfloat16(), 32)
        pairs, other_pairs = (self.builder.bitcast(each, vector) for each in (pairs, other_pairs))
        return self.call("x86.avx512bf16.dpbf16ps.512", total.type, total, pairs, other_pairs)

    def widened(self, value, dtype):
        """Emit the instructions of `numerics.wide` for a value of an array, or a vector of them."""
        if dtype == types.float32:
            return value
        builder, lanes = self.builder, value.type.count if isinstance(value.type, ir.VectorType) else 0

        def of_lanes(kind):
            return ir.VectorType(kind, lanes) if lanes else kind

        def same(kind, number):
            return self.same(kind, lanes, number) if lanes else ir.Constant(kind, number)

        bits = builder.zext(value, of_lanes(INT32))
        if dtype == types.uint16:
            return builder.bitcast(builder.shl(bits, same(INT32, 16)), of_lanes(FLOAT))
        size = builder.shl(builder.and_(bits, same(INT32, 0x7F)), same(INT32, 20))
        sign = builder.shl(builder.and_(bits, same(INT32, 0x80)), same(INT32, 24))
        return builder.fmul(builder.bitcast(builder.or_(size, sign), of_lanes(FLOAT)), same(FLOAT, 2.0**120))
