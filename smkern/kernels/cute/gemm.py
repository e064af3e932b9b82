"""Persistent GEMM for sm_90a in the CuTe DSL: a warp copies, two groups of four warps multiply.

X is the operand on the matrix unit's row side: `a`, or `w` when swapped. A tile is 64 or 128 rows
of X by `columns` of Y, any multiple of 8, in one accumulator. The groups take tiles in turn: one
stores while the other multiplies. No CTA waits for another.

Imported to compile only: nothing here runs where a kernel is launched.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from smkern.kernels.cute.compile import BARRIER_BYTES, GROUP, THREADS
from smkern.kernels.cute.epilogue import DTYPES, Epilogue
from smkern.kernels.gemm_variants import Variant

COPY_REGISTERS, MULTIPLY_REGISTERS = 24, 240
PAIR = 16
"""Rows of a pair: 8 gate rows, 8 up rows."""


class Gemm:
    """A variant's kernel, and the host function that CUTLASS compiles it by.

    Its parameters are those that `gemm_frame` lays out: the maps of X and Y, the addresses of out,
    bias and residual, and the numbers of the schedule.
    """

    def __init__(self, variant: Variant) -> None:
        self.rows, self.columns = variant.block_x, variant.block_y
        self.depth, self.stages = variant.block_k, variant.num_stages
        self.swap, self.swiglu = variant.swap, variant.swiglu
        self.epilogue, self.dtype = Epilogue(variant), DTYPES[variant.dtype]

    def layout(self, *shape: int) -> cute.ComposedLayout:
        """Rows of `depth` elements, swizzled by 128 bytes, stage after stage."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    @cute.jit
    def host(self, x: cute.Tensor, y: cute.Tensor, address: Int64, number: Int32, stream: Any):
        x_map, x_all = self.tensor_map(x, self.rows, self.swap)
        y_map, y_all = self.tensor_map(y, self.columns, not self.swap)
        sizes = (number,) * 9
        kernel = self.kernel(x_map, x_all, y_map, y_all, address, address, address, *sizes)
        kernel.launch(
            grid=(number, 1, 1), block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    def tensor_map(self, operand: cute.Tensor, rows: int, is_weights: bool) -> Any:
        """What copies `rows` by `depth` elements; with SwiGLU 8 gate rows, 8 up rows, and so on."""
        op, box = cpasync.CopyBulkTensorTileG2SOp(), self.layout(rows, self.depth)
        if not (self.swiglu and is_weights):
            return cpasync.make_tiled_tma_atom(op, operand, box, (rows, self.depth))
        many = operand.shape[0]
        pairs = cute.make_layout(((8, 2, many), many), stride=((many, many * many, 8 * many), 1))
        tensor = cute.make_tensor(operand.iterator, pairs)
        return cpasync.make_tiled_tma_atom(op, tensor, box, ((8, 2, rows // PAIR), self.depth))

    @cute.kernel
    def kernel(
        self, x_map: cute.CopyAtom, x_all: cute.Tensor, y_map: cute.CopyAtom, y_all: cute.Tensor,
        out: Int64, bias: Int64, residual: Int64, m: Int32, n: Int32, out_stride: Int32,
        residual_stride: Int32, tiles_x: Int32, tiles_y: Int32, k_iters: Int32, group: Int32,
        early: Int32,
    ):  # fmt: skip
        x_layout = self.layout(self.rows, self.depth, self.stages)
        y_layout = self.layout(self.columns, self.depth, self.stages)

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            x: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], BARRIER_BYTES
            ]
            y: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(y_layout)], BARRIER_BYTES
            ]

        thread, _, _ = arch.thread_idx()
        warp = arch.make_warp_uniform(arch.warp_idx())
        arch.griddepcontrol_launch_dependents()
        shared = cutlass.utils.SmemAllocator().allocate(Shared)
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        x_stages = shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        y_stages = shared.y.get_tensor(y_layout.outer, swizzle=y_layout.inner)
        if warp == 0:
            with arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    arch.mbarrier_init(full + i, 1)
                    arch.mbarrier_init(empty + i, 4)
            arch.mbarrier_init_fence()
        arch.sync_threads()
        raster = tiles_x, tiles_y, group, m, n
        mine = arch.make_warp_uniform(thread // GROUP)
        if mine == 2:
            arch.warpgroup_reg_dealloc(COPY_REGISTERS)
            if warp == 8:
                self.copy(
                    (x_map, x_all, x_stages), (y_map, y_all, y_stages), full, empty, raster,
                    k_iters, early,
                )  # fmt: skip
        else:
            arch.warpgroup_reg_alloc(MULTIPLY_REGISTERS)
            self.multiply(
                x_stages, y_stages, full, empty, raster, k_iters,
                (out, bias, residual, out_stride, residual_stride), mine, thread,
            )  # fmt: skip

    @cute.jit
    def corner(self, tile, raster):
        """First row of X and of Y that a tile reads, that it owns, and where the operands end.

        The last tile of a side ends with its operand, and reads some rows again. Ends are out's:
        with SwiGLU w has twice as many rows.
        """
        tiles_x, tiles_y, group, m, n = raster
        rows_of_w = 2 * n if cutlass.const_expr(self.swiglu) else n
        per_group = group * tiles_y
        nth = tile // per_group
        first = nth * group
        across = cutlass.min(tiles_x - first, group)
        within = tile - nth * per_group
        own_x = (first + within % across) * self.rows
        own_y = (within // across) * self.columns
        last_x, last_y = (rows_of_w, m) if cutlass.const_expr(self.swap) else (m, rows_of_w)
        x, y = own_x, own_y
        if own_x + self.rows > last_x and last_x >= self.rows:
            x = last_x - self.rows
        if own_y + self.columns > last_y and last_y >= self.columns:
            y = last_y - self.columns
        end_x, end_y = (n, m) if cutlass.const_expr(self.swap) else (m, n)
        return x, y, own_x, own_y, end_x, end_y

    @cute.jit
    def fetch(self, operand, rows, row, step, full, stage, is_weights):
        """Request rows by `depth` elements of an operand into a stage."""
        tensor_map, everything, stages = operand
        if cutlass.const_expr(self.swiglu and is_weights):
            begin = cute.domain_offset(((0, 0, row // PAIR), 0), everything)
            box = cute.local_tile(begin, ((8, 2, rows // PAIR), self.depth), ((0, 0, 0), step))
        else:
            begin = cute.domain_offset((row, 0), everything)
            box = cute.local_tile(begin, (rows, self.depth), (0, step))
        to, of = cpasync.tma_partition(
            tensor_map, 0, cute.make_layout(1), cute.group_modes(stages, 0, 2),
            cute.group_modes(box, 0, 2),
        )  # fmt: skip
        cute.copy(tensor_map, of, to[(None, stage)], tma_bar_ptr=full + stage)

    @cute.jit
    def fetch_weights(self, x, y, at_x, at_y, step, full, stage):
        if cutlass.const_expr(self.swap):
            self.fetch(x, self.rows, at_x, step, full, stage, True)
        else:
            self.fetch(y, self.columns, at_y, step, full, stage, True)

    @cute.jit
    def fetch_activations(self, x, y, at_x, at_y, step, full, stage):
        if cutlass.const_expr(self.swap):
            self.fetch(y, self.columns, at_y, step, full, stage, False)
        else:
            self.fetch(x, self.rows, at_x, step, full, stage, False)

    @cute.jit
    def copy(self, x, y, full, empty, raster, k_iters, early):
        """Copy both operands of every K step of the CTA's tiles, stage by stage.

        `early`: stages whose weights are requested before the previous kernel has ended.
        """
        stage_bytes = 2 * self.depth * (self.rows + self.columns)
        tile, _, _ = arch.block_idx()
        ctas, _, _ = arch.grid_dim()
        tiles = raster[0] * raster[1]
        early = cutlass.min(early, k_iters)
        at_x, at_y, _, _, _, _ = self.corner(tile, raster)
        for step in cutlass.range(early, unroll=1):
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(full + step, stage_bytes)
            self.fetch_weights(x, y, at_x, at_y, step, full, step)
        arch.griddepcontrol_wait()
        stage, phase = Int32(0), Int32(1)
        while tile < tiles:
            at_x, at_y, _, _, _, _ = self.corner(tile, raster)
            for step in cutlass.range(k_iters, unroll=1):
                if early > 0:
                    early -= 1
                else:
                    arch.mbarrier_wait(empty + stage, phase)
                    with arch.elect_one():
                        arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
                    self.fetch_weights(x, y, at_x, at_y, step, full, stage)
                self.fetch_activations(x, y, at_x, at_y, step, full, stage)
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase ^= 1
            tile += ctas

    @cute.jit
    def multiply(self, x_stages, y_stages, full, empty, raster, k_iters, memory, mine, thread):
        """Every other tile of the CTA's: products in the order of the tiles, then the epilogue."""
        mma = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                self.dtype, Float32, (64, self.columns, 16), warpgroup.OperandSource.SMEM,
                OperandMajorMode.K, OperandMajorMode.K,
            )
        )  # fmt: skip
        part = mma.get_slice(0)
        x = mma.make_fragment_A(part.partition_A(x_stages))
        y = mma.make_fragment_B(part.partition_B(y_stages))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((self.rows, self.columns)), Float32)
        first, _, _ = arch.block_idx()
        ctas, _, _ = arch.grid_dim()
        tile = first + mine * ctas
        stage = (mine * k_iters) % self.stages
        phase = ((mine * k_iters) // self.stages) & 1
        if mine == 1:
            arch.barrier_arrive(barrier_id=1, number_of_threads=2 * GROUP)
        arch.griddepcontrol_wait()
        while tile < raster[0] * raster[1]:
            corner = self.corner(tile, raster)
            arch.barrier(barrier_id=1 + mine, number_of_threads=2 * GROUP)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for i in cutlass.range_constexpr(self.depth // 16):
                cute.gemm(mma, acc, x[None, None, i, stage], y[None, None, i, stage], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            before = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase ^= 1
            for _ in cutlass.range(1, k_iters, unroll=1):
                arch.mbarrier_wait(full + stage, phase)
                warpgroup.fence()
                for i in cutlass.range_constexpr(self.depth // 16):
                    cute.gemm(mma, acc, x[None, None, i, stage], y[None, None, i, stage], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                with arch.elect_one():
                    arch.mbarrier_arrive(empty + before)
                before = stage
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase ^= 1
            arch.barrier_arrive(barrier_id=2 - mine, number_of_threads=2 * GROUP)
            stage += k_iters  # of the other group's tile
            phase ^= (stage // self.stages) & 1
            stage = stage % self.stages
            warpgroup.wait_group(0)
            with arch.elect_one():
                arch.mbarrier_arrive(empty + before)
            self.epilogue.finish(acc, corner, memory, thread)
            tile += 2 * ctas
