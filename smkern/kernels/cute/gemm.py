"""Persistent GEMM for sm_90a in the CuTe DSL: a warp copies, two groups of four warps multiply.

X is the operand on the matrix unit's row side: `a`, or `w` when swapped. A tile is 64 or 128 rows
of X by `columns` of Y, any multiple of 8, in one accumulator. The groups take tiles in turn: one
stores while the other multiplies. No CTA waits for another.

Imported to compile only: nothing here runs where a kernel is launched.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from smkern.kernels.cute.compile import BARRIER_BYTES, GROUP, THREADS
from smkern.kernels.gemm_variants import Variant

COPY_REGISTERS, MULTIPLY_REGISTERS = 24, 240
PAIR = 16
"""Rows of a pair: 8 gate rows, 8 up rows."""
_DTYPES = {"bf16": (BFloat16, "bf16"), "fp16": (Float16, "f16")}


class Gemm:
    """A variant's kernel, and the host function that CUTLASS compiles it by.

    Its parameters are those that `gemm_frame` lays out: the maps of X and Y, the addresses of out,
    bias and residual, and the numbers of the schedule.
    """

    def __init__(self, variant: Variant) -> None:
        self.rows, self.columns = variant.block_x, variant.block_y
        self.depth, self.stages = variant.block_k, variant.num_stages
        self.swap, self.bias, self.residual = variant.swap, variant.bias, variant.residual
        self.activation, self.swiglu = variant.activation, variant.swiglu
        self.dtype, self.dtype_name = _DTYPES[variant.dtype]

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
            self.finish(acc, corner, memory, thread)
            tile += 2 * ctas

    @cute.jit
    def finish(self, acc, corner, memory, thread):
        """The epilogue and the store, 8 x 8 elements of a warp at a time.

        A thread holds two neighbouring columns of a row of them; 4 threads write 16 bytes. Swapped,
        rows of the accumulator are columns of out, so the rounded block is transposed first. With
        SwiGLU a block of gates lies before its block of ups, and out is half as wide.
        """
        x0, y0, own_x, own_y, end_x, end_y = corner
        out, _, _, out_stride, _ = memory
        lane = arch.lane_idx()
        quad, two = lane // 4, 2 * (lane % 4)
        first = x0 + (thread // 32 % 4) * 16
        halves = 1 if cutlass.const_expr(self.swiglu and self.swap) else 2
        each = 2 if cutlass.const_expr(self.swiglu and not self.swap) else 1
        if cutlass.const_expr(self.swiglu and self.swap):
            first, own_x = first // 2, own_x // 2
        if cutlass.const_expr(self.swiglu and not self.swap):
            y0, own_y = y0 // 2, own_y // 2
        for block in cutlass.range_constexpr(self.rows // 64):
            for half in cutlass.range_constexpr(halves):
                top = first + block * 32 * halves + half * 8
                for j in cutlass.range_constexpr(0, self.columns // 8, each):
                    left_column = y0 + 8 * (j // each)
                    at = block * (self.columns // 2) + 4 * j + 2 * half
                    x, y = top + quad, left_column + two
                    if cutlass.const_expr(self.swiglu):
                        up = at + (2 if cutlass.const_expr(self.swap) else 4)
                        left = self.silu(acc[at]) * acc[up]
                        right = self.silu(acc[at + 1]) * acc[up + 1]
                    else:
                        ends = end_x, end_y
                        left, right = self.epilogue(acc[at], acc[at + 1], x, y, ends, memory)
                    pair = arch.inline_ptx(
                        f"cvt.rn.{self.dtype_name}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
                        write_only_types=[Uint32], read_only_args=[left, right],
                    )  # fmt: skip
                    if cutlass.const_expr(self.swap):
                        pair = arch.inline_ptx(
                            "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
                            write_only_types=[Uint32], read_only_args=[pair],
                        )  # fmt: skip
                        x, y = top + two, left_column + quad
                    row, column = (y, x) if cutlass.const_expr(self.swap) else (x, y)
                    arch.inline_ptx(
                        "st.global.b32 [{$r0}], {$r1};",
                        read_only_args=[self.address(out, row, column, out_stride), pair],
                        predicate=(x >= own_x) & (x < end_x) & (y >= own_y) & (y < end_y),
                    )

    @cute.jit
    def epilogue(self, left, right, x, y, ends, memory):
        """The values at (x, y) and (x, y + 1) of the accumulator after bias and all."""
        end_x, end_y = ends
        _, bias, residual, _, residual_stride = memory
        inside = (x < end_x) & (y < end_y)
        if cutlass.const_expr(self.bias):
            if cutlass.const_expr(self.swap):
                more = self.load(self.address(bias, 0, x, 0), x < end_x)
                left, right = left + more, right + more
            else:
                more, other = self.load_pair(self.address(bias, 0, y, 0), y < end_y)
                left, right = left + more, right + other
        left, right = self.activated(left), self.activated(right)
        if cutlass.const_expr(self.residual):
            if cutlass.const_expr(self.swap):
                at = self.address(residual, y, x, residual_stride)
                more = self.load(at, inside)
                other = self.load(at + 2 * Int64(residual_stride), inside & (y + 1 < end_y))
            else:
                at = self.address(residual, x, y, residual_stride)
                more, other = self.load_pair(at, inside)
            left, right = left + more, right + other
        return left, right

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
            f"@p ld.global.b16 v, [{{$r0}}]; cvt.f32.{self.dtype_name} {{$w0}}, v; }}",
            write_only_types=[Float32], read_only_args=[address, Int32(inside)],
        )  # fmt: skip

    @cute.jit
    def load_pair(self, address, inside):
        """Two neighbouring elements of out's type as fp32, 0 where they are outside."""
        return arch.inline_ptx(
            "{ .reg .pred p; .reg .b32 v; .reg .b16 l, r; setp.ne.s32 p, {$r1}, 0; mov.b32 v, 0;"
            f"@p ld.global.b32 v, [{{$r0}}]; mov.b32 {{l, r}}, v;"
            f"cvt.f32.{self.dtype_name} {{$w0}}, l; cvt.f32.{self.dtype_name} {{$w1}}, r; }}",
            write_only_types=[Float32, Float32], read_only_args=[address, Int32(inside)],
        )  # fmt: skip
