"""The CuTe GEMM of e4m3: products of a step in tensor cores, sums over steps in fp32.

Tensor cores add e4m3 products with about 14 bits, so a step's 128 are added to fp32 registers,
times the scales of its blocks where there are any. One warpgroup multiplies, or two of which each
has half of a tile's columns: two sums take turns, of which one is added while the other is
multiplied. One more warp brings scales to shared memory: those of blocks four steps at a time,
those of rows a tile ahead.

Imported to compile only, as `gemm` is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from smkern.kernels.cute.compile import BARRIER_BYTES, GROUP
from smkern.kernels.cute.epilogue import Epilogue
from smkern.kernels.cute.gemm import Gemm
from smkern.tuning.fp8_cutlass import BLOCK, alike, registers, slots

if TYPE_CHECKING:
    from smkern.kernels.fp8.gemm_compile import ScaledVariant

FOUR = 4
"""Steps whose scales come at once."""
ROWS = 64
"""Rows of a tile; behind their scales lie those of w."""


class ScaledGemm(Gemm):
    """As `Gemm`, which copies two e4m3 as one element of 16 bits, 64 rows of `a` a tile.

    Its parameters also have the addresses of both scales and their three strides.
    """

    def __init__(self, variant: ScaledVariant) -> None:
        super().__init__(variant.twin)
        self.blocks, self.ctas, self.parts = variant.blocks, variant.ctas_per_sm, variant.parts
        self.slot, self.slots = slots(variant.blocks)
        self.width = self.columns // self.parts
        """Columns of a group of warps."""
        self.epilogue = Epilogue(replace(variant.twin, block_y=self.width))
        self.turns = 8 if self.ctas == 1 else 4
        """Steps between stops: what is in flight cannot be carried round a loop in which it is
        added, as the compiler would wait after each product. Alone on its SM 4 take 5% longer
        than 8; two CTAs by blocks take 4% longer by 8 than by 4."""
        self.alike = alike(self.width)

    def products(self, rows: int, parts: int) -> cute.ComposedLayout:
        """The layout of an operand's stages as what is multiplied, in so many parts each."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        shape = rows, 2 * self.depth, parts * self.stages
        return cute.tile_to_shape(atom, shape, order=(0, 1, 2))

    @cute.jit
    def host(self, x: cute.Tensor, y: cute.Tensor, address: Int64, number: Int32, stream: Any):
        x_map, x_all = self.tensor_map(x, self.rows, False)
        y_map, y_all = self.tensor_map(y, self.columns, True)
        kernel = self.kernel(x_map, x_all, y_map, y_all, *(address,) * 5, *(number,) * 12)
        kernel.launch(
            grid=(number, 1, 1), block=[GROUP * (self.parts + 1), 1, 1], stream=stream,
            min_blocks_per_mp=self.ctas, preferred_smem_carveout=100,  # else it asks a driver
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x_map: cute.CopyAtom, x_all: cute.Tensor, y_map: cute.CopyAtom, y_all: cute.Tensor,
        out: Int64, bias: Int64, residual: Int64, a_scale: Int64, w_scale: Int64, m: Int32,
        n: Int32, out_stride: Int32, residual_stride: Int32, a_step: Int32, a_block_step: Int32,
        w_step: Int32, tiles_x: Int32, tiles_y: Int32, k_iters: Int32, group: Int32, early: Int32,
    ):  # fmt: skip
        x_layout = self.layout(self.rows, self.depth, self.stages)
        y_layout = self.layout(self.columns, self.depth, self.stages)

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            ready: cute.struct.MemRange[Int64, self.slots]
            spent: cute.struct.MemRange[Int64, self.slots]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, self.slots * self.slot], 16]
            x: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], BARRIER_BYTES
            ]
            y: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(y_layout)], BARRIER_BYTES
            ]

        warp = arch.make_warp_uniform(arch.warp_idx())
        arch.griddepcontrol_launch_dependents()
        shared = cutlass.utils.SmemAllocator().allocate(Shared)
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        ready, spent = shared.ready.data_ptr(), shared.spent.data_ptr()
        x_pairs = shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        y_pairs = shared.y.get_tensor(y_layout.outer, swizzle=y_layout.inner)
        x, y = self.products(self.rows, 1), self.products(self.width, self.parts)
        x_stages = shared.x.get_tensor(x.outer, swizzle=x.inner, dtype=Float8E4M3FN)
        y_stages = shared.y.get_tensor(y.outer, swizzle=y.inner, dtype=Float8E4M3FN)
        scales = shared.scales.get_tensor(cute.make_layout((self.slot, self.slots)))
        if warp == 0:
            with arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    arch.mbarrier_init(full + i, 1)
                    arch.mbarrier_init(empty + i, 4 * self.parts)
                for i in cutlass.range_constexpr(self.slots):
                    arch.mbarrier_init(ready + i, 32)
                    arch.mbarrier_init(spent + i, 4 * self.parts)
            arch.mbarrier_init_fence()
        arch.sync_threads()
        raster = tiles_x, tiles_y, group, m, n
        multiplying, copying = registers(self.parts, self.ctas)
        if warp >= 4 * self.parts:
            arch.warpgroup_reg_dealloc(copying)
            if warp == 4 * self.parts:
                self.copy(
                    (x_map, x_all, x_pairs), (y_map, y_all, y_pairs), full, empty, raster,
                    k_iters, early,
                )  # fmt: skip
            if warp == 4 * self.parts + 1:
                strides = a_step, a_block_step, w_step
                self.bring(scales, ready, spent, raster, k_iters, a_scale, w_scale, strides)
        else:
            arch.warpgroup_reg_alloc(multiplying)
            self.multiply(
                x_stages, y_stages, (full, empty, ready, spent), raster, k_iters,
                (out, bias, residual, out_stride, residual_stride), scales,
            )  # fmt: skip

    @cute.jit
    def corner(self, tile, raster):
        """As of any GEMM, but by blocks the last tile of w begins where tiles do, in whole blocks
        of scales, and reads past the end."""
        x, y, own_x, own_y, end_x, end_y = super().corner(tile, raster)
        if cutlass.const_expr(self.blocks):
            y = own_y
        return x, y, own_x, own_y, end_x, end_y

    @cute.jit
    def bring(self, scales, ready, spent, raster, k_iters, a_scale, w_scale, strides):
        """Scales of the CTA's tiles: of 64 rows of a and of a tile's rows of w, one slot a tile; of
        blocks those of every four steps, of w's two blocks a group of warps."""
        a_step, a_block_step, w_step = strides
        tiles_x, tiles_y, _, m, n = raster
        lane = arch.lane_idx()
        tile, _, _ = arch.block_idx()
        ctas, _, _ = arch.grid_dim()
        slot, phase = Int32(0), Int32(1)
        fours = (a_scale % 16 == 0) & (a_block_step == 1) & (a_step % FOUR == 0)
        steps = k_iters if cutlass.const_expr(self.blocks) else Int32(1)
        arch.griddepcontrol_wait()
        while tile < tiles_x * tiles_y:
            x, y, _, _, _, _ = self.corner(tile, raster)
            for step in cutlass.range(0, steps, FOUR, unroll=1):
                arch.mbarrier_wait(spent + slot, phase)
                to = scales.iterator + self.slot * slot
                # what rows past the end are multiplied by is not stored
                for part in cutlass.range_constexpr(2):
                    place = lane + 32 * part
                    of_a = a_scale + 4 * Int64(cutlass.min(x + place, m - 1)) * Int64(a_step)
                    if cutlass.const_expr(not self.blocks):
                        self.fetch_scale(to + place, of_a, 4, 4)
                    elif fours & (step + FOUR <= k_iters):
                        self.fetch_scale(to + FOUR * place, of_a + 4 * Int64(step), 16, 16)
                    else:
                        self.four(to + FOUR * place, of_a, a_block_step, step, k_iters)
                if cutlass.const_expr(self.blocks):
                    block = (y + lane // 2 * self.width) // BLOCK + lane % 2
                    block = cutlass.min(block, (n - 1) // BLOCK)
                    of_w = w_scale + 4 * Int64(block) * Int64(w_step)
                    if lane < 2 * self.parts:
                        self.four(to + FOUR * (ROWS + lane), of_w, Int32(1), step, k_iters)
                else:
                    for part in cutlass.range_constexpr((self.columns + 31) // 32):
                        place = lane + 32 * part
                        of_w = w_scale + 4 * Int64(cutlass.min(y + place, n - 1)) * Int64(w_step)
                        self.fetch_scale(to + ROWS + place, of_w, 4, 4)
                arch.cp_async_mbarrier_arrive_noinc(ready + slot)
                slot += 1
                if slot == self.slots:
                    slot = Int32(0)
                    phase ^= 1
            tile += ctas

    @cute.jit
    def four(self, to, at, apart, step, k_iters):
        """Request a row's scales of four steps, 0 past the end."""
        for i in cutlass.range_constexpr(FOUR):
            inside = step + i < k_iters
            where = at + 4 * Int64(step + i) * Int64(apart) if inside else at
            self.fetch_scale(to + i, where, 4, 4 if inside else 0)

    @cute.jit
    def fetch_scale(self, to, at, size: cutlass.Constexpr, have):
        """Request bytes of scales, of which so many are read and the rest are 0."""
        arch.inline_ptx(
            f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
            read_only_args=[to, at, Int32(have)],
        )

    @cute.jit
    def multiply(self, x_stages, y_stages, barriers, raster, k_iters, memory, scales):
        """The CTA's tiles: sums over K, then the epilogue."""
        op = warpgroup.MmaF8Op(
            Float8E4M3FN, Float8E4M3FN, Float32, (64, self.width, 32),
            warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K,
        )  # fmt: skip
        fresh, more = cute.make_tiled_mma(op), cute.make_tiled_mma(op)
        fresh.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        part = more.get_slice(0)
        x = more.make_fragment_A(part.partition_A(x_stages))
        y = more.make_fragment_B(part.partition_B(y_stages))
        shape = more.partition_shape_C((self.rows, self.width))
        total, *sums = (cute.make_rmem_tensor(shape, Float32) for _ in range(3))
        by = cute.make_rmem_tensor((4, FOUR), Float32)
        _, _, ready, spent = barriers
        tile, _, _ = arch.block_idx()
        ctas, _, _ = arch.grid_dim()
        thread, _, _ = arch.thread_idx()
        mine = self.mine()
        at = Int32(0), Int32(0), Int32(0), Int32(0)
        arch.griddepcontrol_wait()
        while tile < raster[0] * raster[1]:
            at_x, at_y, *owned = self.corner(tile, raster)
            at_y += mine * self.width
            total.fill(0.0)
            operands = fresh, more, x, y, sums, total, by, scales, at_y
            for _ in cutlass.range(0, k_iters - self.turns + 1, self.turns, unroll=1):
                at = self.steps(self.turns, operands, barriers, at, 0, k_iters)
            for step in cutlass.range(k_iters // self.turns * self.turns, k_iters, unroll=1):
                at = self.steps(1, operands, barriers, at, step, k_iters)
            if cutlass.const_expr(not self.blocks):
                stage, phase, slot, turn = at
                arch.mbarrier_wait(ready + slot, turn)
                self.by_rows(total, scales, slot)
                slot, turn = self.spend(spent, slot, turn)
                at = stage, phase, slot, turn
            self.epilogue.finish(total, (at_x, at_y, *owned), memory, thread)
            tile += ctas

    @cute.jit
    def steps(self, count: cutlass.Constexpr, operands, barriers, at, first, k_iters):
        """`count` steps, none of whose products is in flight behind them; what moves with them.

        `first`: the first's number, 0 for any multiple of `turns`.
        """
        fresh, more, x, y, sums, total, by, scales, column = operands
        full, empty, ready, spent = barriers
        stage, phase, slot, turn = at
        before = stage
        for i in cutlass.range_constexpr(count):
            arch.mbarrier_wait(full + stage, phase)
            self.ask(fresh, more, sums[i % 2], x, y, stage)
            factors = self.factors(by, (i - 1) % FOUR)
            if cutlass.const_expr(self.blocks and count == 1):
                arch.mbarrier_wait(ready + slot, turn)
                self.take(by, scales, slot, first % FOUR)
                if first % FOUR == FOUR - 1 or first == k_iters - 1:
                    slot, turn = self.spend(spent, slot, turn)
            elif cutlass.const_expr(self.blocks and i % FOUR == 0):
                arch.mbarrier_wait(ready + slot, turn)
                self.take_four(by, scales, slot)
                slot, turn = self.spend(spent, slot, turn)
            if cutlass.const_expr(i > 0):
                warpgroup.wait_group(1)
                with arch.elect_one():
                    arch.mbarrier_arrive(empty + before)
                self.add(total, sums[(i - 1) % 2], factors, column)
            before = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase ^= 1
        warpgroup.wait_group(0)
        with arch.elect_one():
            arch.mbarrier_arrive(empty + before)
        self.add(total, sums[(count - 1) % 2], self.factors(by, (count - 1) % FOUR), column)
        return stage, phase, slot, turn

    @cute.jit
    def spend(self, spent, slot, turn):
        """Release a slot of scales; the next one, and its barriers' phase."""
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(spent + slot)
        slot += 1
        if slot == self.slots:
            slot = Int32(0)
            turn ^= 1
        return slot, turn

    @cute.jit
    def ask(self, fresh, more, acc, x, y, stage):
        """Ask for a step's products."""
        warpgroup.fence()
        part = stage * self.parts + self.mine()
        for i in cutlass.range_constexpr(self.depth // 16):
            mma = more if cutlass.const_expr(i) else fresh
            cute.gemm(mma, acc, x[None, None, i, stage], y[None, None, i, part], acc)
        warpgroup.commit_group()

    def mine(self):
        """Which group of warps a thread is of."""
        thread, _, _ = arch.thread_idx()
        return arch.make_warp_uniform(thread // GROUP) if self.parts > 1 else 0

    def row(self):
        """The first of a thread's two rows of a tile, which are 8 apart."""
        thread, _, _ = arch.thread_idx()
        return thread // 32 % 4 * 16 + arch.lane_idx() // 4

    @cute.jit
    def take(self, by, scales, slot, turn):
        """A thread's scales of a step: of two rows, and of two blocks of w."""
        for i in cutlass.range_constexpr(4):
            by[i, 0] = scales[FOUR * self.places()[i] + turn, slot]

    @cute.jit
    def take_four(self, by, scales, slot):
        """Those of four steps."""
        for i in cutlass.range_constexpr(4):
            values = arch.inline_ptx(
                "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Float32] * FOUR,
                read_only_args=[scales.iterator + (self.slot * slot + FOUR * self.places()[i])],
            )  # fmt: skip
            for turn in cutlass.range_constexpr(FOUR):
                by[i, turn] = values[turn]

    def places(self):
        """Where a slot has them."""
        of_w = ROWS + 2 * self.mine()
        return self.row(), self.row() + 8, of_w, of_w + 1

    def factors(self, by, turn):
        """Of a step's products: of both rows by the first block of w, and by the next."""
        return tuple(by[i, turn] * by[2 + j, turn] for j in range(2) for i in range(2))

    @cute.jit
    def add(self, total, acc, factors, column):
        """Add a step's products to the sums, times their scales with those of blocks.

        By volatile assembly: the compiler may not move it past the next products.
        """
        edge = (BLOCK - column % BLOCK) // 8  # blocks of 8 columns before w's next block
        left, right, next_left, next_right = factors
        for i in cutlass.range_constexpr(self.width // 8):
            if cutlass.const_expr(self.blocks and i and i % self.alike == 0):
                left = next_left if i >= edge else left
                right = next_right if i >= edge else right
            for j in cutlass.range_constexpr(4):
                at = 4 * i + j
                if cutlass.const_expr(self.blocks):
                    total[at] = arch.inline_ptx(
                        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32],
                        read_only_args=[acc[at], left if j < 2 else right, total[at]],
                    )  # fmt: skip
                else:
                    total[at] = arch.inline_ptx(
                        "add.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32],
                        read_only_args=[acc[at], total[at]],
                    )  # fmt: skip

    @cute.jit
    def by_rows(self, total, scales, slot):
        """Sums times the scales of their rows of a and of w."""
        one, other = scales[self.row(), slot], scales[self.row() + 8, slot]
        first = ROWS + self.mine() * self.width
        for i in cutlass.range_constexpr(self.width // 8):
            for j in cutlass.range_constexpr(2):
                of_w = scales[first + 8 * i + 2 * (arch.lane_idx() % 4) + j, slot]
                total[4 * i + j] = total[4 * i + j] * one * of_w
                total[4 * i + 2 + j] = total[4 * i + 2 + j] * other * of_w
