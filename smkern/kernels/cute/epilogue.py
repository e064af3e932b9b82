"""The CuTe GEMM's epilogue: bias, activation, residual, rounding, and the store by whole sectors.

A thread holds two neighbours of each 8 x 8 block of an accumulator, and four threads 16 bytes of a
row: half of the least that memory moves. So four threads exchange what they hold of four blocks
until each has 16 bytes of one, and write 64 of a row together.

Imported to compile only, as `gemm` is.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from smkern.kernels.gemm_variants import Variant

DTYPES = {"bf16": BFloat16, "fp16": Float16}
AHEAD = 4
"""Groups of blocks whose residual is requested before the first is stored; a store may not pass a
load of what it might overwrite."""
_KINDS = {1: "b32", 2: "v2.b32", 4: "v4.b32"}


def groups(count: int, most: int) -> list[tuple[int, int]]:
    """(first, how many) of the blocks that threads exchange: `most`, then fewer."""
    found, at = [], 0
    while at < count:
        size = next(size for size in (4, 2, 1) if size <= min(most, count - at))
        found.append((at, size))
        at += size
    return found


class Epilogue:
    """From a variant's accumulators to rows of out.

    With SwiGLU a block of gates lies before its block of ups, and out is half as wide. Swapped,
    rows of the accumulator are columns of out, and blocks are transposed first. A strip of blocks
    is 8 rows of X by all of Y, swapped what the 16 rows of X of a warp make.
    """

    def __init__(self, variant: Variant) -> None:
        self.rows, self.columns, self.swap = variant.block_x, variant.block_y, variant.swap
        self.bias, self.residual = variant.bias, variant.residual
        self.activation, self.swiglu = variant.activation, variant.swiglu
        self.dtype = {"bf16": "bf16", "fp16": "f16"}[variant.dtype]
        self.halves = 1 if self.swiglu and self.swap else 2
        """Blocks of out that the 16 rows of X of a warp make, along X."""
        self.step = 2 if self.swiglu and not self.swap else 1
        """Blocks of the accumulator that one of out takes, along Y."""
        self.across = self.columns // 8 // self.step
        """Blocks of out along Y."""

    @cute.jit
    def finish(self, acc, corner, memory, thread):
        """Store a tile."""
        x0, y0, own_x, own_y, end_x, end_y = corner
        top = x0 + (thread // 32 % 4) * 16
        if cutlass.const_expr(self.swiglu and self.swap):
            top, own_x = top // 2, own_x // 2
        if cutlass.const_expr(self.swiglu and not self.swap):
            y0, own_y = y0 // 2, own_y // 2
        owned, begin = (own_x, own_y, end_x, end_y), (top, y0)
        todo = self.todo()
        ahead = []
        if cutlass.const_expr(self.residual):
            ahead = [self.fetch(each, begin, owned, memory) for each in todo[:AHEAD]]
        for i in cutlass.range_constexpr(len(todo)):
            part, half, at, size = todo[i]
            more = [None] * size
            if cutlass.const_expr(self.residual):
                more = self.exchanged(ahead[i])
                if cutlass.const_expr(i + AHEAD < len(todo)):
                    ahead.append(self.fetch(todo[i + AHEAD], begin, owned, memory))
            pairs = [
                self.rounded(acc, part, self.block(half, at + k), begin, owned, memory, more[k])
                for k in range(size)
            ]
            self.store(self.exchanged(pairs), todo[i], begin, owned, memory)

    def todo(self) -> list[tuple[int, int, int, int]]:
        """(64 rows of X, half of a warp's 16, first block, how many) of each group; swapped no
        half, as a group has both."""
        halves, blocks = (1, self.across * self.halves) if self.swap else (2, self.across)
        most = 1 if self.activation == "gelu" else 4  # registers are short beside erf
        return [
            (part, half, *group)
            for part in range(self.rows // 64)
            for half in range(halves)
            for group in groups(blocks, most)
        ]

    def block(self, half: int, at: int) -> tuple[int, int]:
        """A block of a strip: (along Y, along X)."""
        return divmod(at, self.halves) if self.swap else (at, half)

    @cute.jit
    def spot(self, group, begin, owned):
        """Out's row and column of what a thread has of a group, and whether the tile owns it."""
        part, half, at, size = group
        own_x, own_y, end_x, end_y = owned
        quad, nth = arch.lane_idx() // 4, arch.lane_idx() % 4
        x, y = begin[0] + part * 32 * self.halves, begin[1]
        # of four blocks one, of two blocks a half row of one, of one block two neighbours
        block, shift = at + nth % size, nth // size * (8 * size // 4)
        if cutlass.const_expr(self.swap):
            x, y = x + 8 * (block % self.halves) + shift, y + 8 * (block // self.halves) + quad
        else:
            x, y = x + 8 * half + quad, y + 8 * block + shift
        inside = (x >= own_x) & (x < end_x) & (y >= own_y) & (y < end_y)
        row, column = (y, x) if cutlass.const_expr(self.swap) else (x, y)
        return row, column, inside

    @cute.jit
    def exchanged(self, values):
        """Of each of a group's blocks two neighbours to all of a row of one, or back."""
        even, low = arch.lane_idx() % 2 == 0, arch.lane_idx() % 4 < 2
        if cutlass.const_expr(len(values) == 4):
            a, b = self.swapped(even, values[0], values[1], 1)
            c, d = self.swapped(even, values[2], values[3], 1)
            first, third = self.swapped(low, a, c, 2)
            second, fourth = self.swapped(low, b, d, 2)
            values = [first, second, third, fourth]
        if cutlass.const_expr(len(values) == 2):
            values = list(self.swapped(even, values[0], values[1], 1))
        return values

    @cute.jit
    def swapped(self, is_first, one, two, distance):
        """Threads `distance` apart: the first gets both's `one`, the other both's `two`."""
        got = arch.shuffle_sync_bfly(two if is_first else one, distance)
        left, right = one if is_first else got, got if is_first else two
        return left, right

    @cute.jit
    def fetch(self, group, begin, owned, memory):
        """What a thread has of a group of the residual, 0 where the tile owns none."""
        _, _, residual, _, stride = memory
        row, column, inside = self.spot(group, begin, owned)
        size = group[3]
        names = ", ".join(f"{{$w{i}}}" for i in range(size))
        zeros = "".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(size))
        names = f"{{{names}}}" if size > 1 else names
        found = arch.inline_ptx(
            f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros}"
            f"@p ld.global.{_KINDS[size]} {names}, [{{$r0}}]; }}",
            write_only_types=[Uint32] * size,
            read_only_args=[self.address(residual, row, column, stride), Int32(inside)],
        )
        return [found] if size == 1 else list(found)

    @cute.jit
    def store(self, values, group, begin, owned, memory):
        """What a thread has of a group."""
        out, _, _, stride, _ = memory
        row, column, inside = self.spot(group, begin, owned)
        names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
        names = f"{{{names}}}" if len(values) > 1 else names
        arch.inline_ptx(
            f"st.global.{_KINDS[len(values)]} [{{$r0}}], {names};",
            read_only_args=[self.address(out, row, column, stride), *values],
            predicate=inside,
        )

    @cute.jit
    def rounded(self, acc, part, block, begin, owned, memory, more):
        """A thread's two neighbours of a block (along Y, along X) of out, as 32 bits."""
        along, half = block
        at = part * (self.columns // 2) + 4 * along * self.step + 2 * half
        left, right = acc[at], acc[at + 1]
        if cutlass.const_expr(self.swiglu):
            up = at + (2 if cutlass.const_expr(self.swap) else 4)
            left, right = self.silu(left) * acc[up], self.silu(right) * acc[up + 1]
        if cutlass.const_expr(self.bias):
            x = begin[0] + part * 32 * self.halves + 8 * half + arch.lane_idx() // 4
            y = begin[1] + 8 * along + 2 * (arch.lane_idx() % 4)
            left, right = self.biased(left, right, x, y, owned, memory)
        left, right = self.activated(left), self.activated(right)
        if cutlass.const_expr(self.residual):
            one, other = self.wide(self.turned(more))
            left, right = left + one, right + other
        pair = arch.inline_ptx(
            f"cvt.rn.{self.dtype}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Uint32], read_only_args=[left, right],
        )  # fmt: skip
        return self.turned(pair)

    @cute.jit
    def turned(self, pair):
        """A block of 16-bit elements transposed where the operands are swapped, or back."""
        if cutlass.const_expr(self.swap):
            pair = arch.inline_ptx(
                "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
                write_only_types=[Uint32], read_only_args=[pair],
            )  # fmt: skip
        return pair

    @cute.jit
    def biased(self, left, right, x, y, owned, memory):
        """The values at (x, y) and (x, y + 1) of the accumulator and their bias."""
        _, _, end_x, end_y = owned
        _, bias, _, _, _ = memory
        if cutlass.const_expr(self.swap):
            more = self.load(self.address(bias, 0, x, 0), x < end_x)
            left, right = left + more, right + more
        else:
            more, other = self.load_pair(self.address(bias, 0, y, 0), y < end_y)
            left, right = left + more, right + other
        return left, right

    @cute.jit
    def wide(self, pair):
        """Two elements of out's type as fp32."""
        return arch.inline_ptx(
            "{ .reg .b16 l, r; mov.b32 {l, r}, {$r0};"
            f"cvt.f32.{self.dtype} {{$w0}}, l; cvt.f32.{self.dtype} {{$w1}}, r; }}",
            write_only_types=[Float32, Float32], read_only_args=[pair],
        )  # fmt: skip

    @cute.jit
    def activated(self, value):
        if cutlass.const_expr(self.activation == "silu"):
            value = self.silu(value)
        if cutlass.const_expr(self.activation == "gelu"):
            value = 0.5 * value * (1.0 + cute.math.erf(value * 0.7071067811865476))
        return value

    @cute.jit
    def silu(self, value):
        return value * arch.rcp_approx(1.0 + cute.math.exp(-value, fastmath=True))

    @cute.jit
    def address(self, base, row, column, stride):
        return base + 2 * (Int64(row) * Int64(stride) + Int64(column))

    @cute.jit
    def load(self, address, inside):
        """An element of out's type as fp32, 0 where it is outside."""
        return arch.inline_ptx(
            "{ .reg .pred p; .reg .b16 v; setp.ne.s32 p, {$r1}, 0; mov.b16 v, 0;"
            f"@p ld.global.b16 v, [{{$r0}}]; cvt.f32.{self.dtype} {{$w0}}, v; }}",
            write_only_types=[Float32], read_only_args=[address, Int32(inside)],
        )  # fmt: skip

    @cute.jit
    def load_pair(self, address, inside):
        """Two neighbouring elements of out's type as fp32, 0 where they are outside."""
        return arch.inline_ptx(
            "{ .reg .pred p; .reg .b32 v; .reg .b16 l, r; setp.ne.s32 p, {$r1}, 0; mov.b32 v, 0;"
            f"@p ld.global.b32 v, [{{$r0}}]; mov.b32 {{l, r}}, v;"
            f"cvt.f32.{self.dtype} {{$w0}}, l; cvt.f32.{self.dtype} {{$w1}}, r; }}",
            write_only_types=[Float32, Float32], read_only_args=[address, Int32(inside)],
        )  # fmt: skip
