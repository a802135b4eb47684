// The small-M product that linear.h and head.h share: rows of float x times packed panels of 16 columns (packed.h).
//
//   acc[r][c] = sum over k of x[r][k] * w[panel][k][c]
//
// Tiling: a micro-kernel keeps R rows x P panels of accumulators in registers and walks k; each weight vector that it
// loads, or makes from bf16, int8 or int4, is used by R rows, each broadcast x by P panels. Up to kMaxRows rows walk k
// once, while the next panels are prefetched. More rows are split into near-equal row tiles, which take turns on a
// block of the panel that stays in the first level cache (widened to float there, once for all tiles) while the next
// block is prefetched; sums wait in a buffer between blocks. So a weight is read from memory once per call. Reduction
// order: k = 0, 1, ... in one chain of fma per output. R, P, blocks, the row split and threads cannot change a bit, and
// a format changes only the values: the sums are those of the float kernel over the widened matrix. Bytes: the packed
// weights once (per panel and k 64 for float, 32 bf16, 17 int8, 10 int4). Operations: 2 * rows * n * k.
#pragma once

#include "common/packed.h"

namespace JACOBI_ISA {

// Rows per tile, and panels per tile for that many rows: as many accumulators as registers allow, at least 8 chains
// so that the latency of fma is hidden when there is one row.
constexpr int kMaxRows = kRegisters >= 32 ? 12 : 6;
constexpr int panels_per_tile(int rows) {
  return kRegisters >= 32 ? (rows == 1 ? 8 : rows <= 3 ? 4 : 2) : (rows == 1 ? 4 : rows <= 3 ? 2 : 1);
}
constexpr int kBlockPanels = panels_per_tile(kMaxRows);
constexpr int64_t kBlock = 256 / kBlockPanels;  // values of k: 16 KiB of floats
constexpr int64_t kRowBlock = 96;               // rows whose sums wait together

// Elements of W in one panel.
inline int64_t panel_stride(const float*, int64_t k) { return kPanel * k; }
inline int64_t panel_stride(const uint16_t*, int64_t k) { return kPanel * k; }
template <class Group>
inline int64_t panel_stride(const Group*, int64_t k) {
  return (k + kGroup - 1) / kGroup;
}

// f(w) with w as a pointer to what the format consists of.
template <class F>
inline void with_weights(const void* w, WeightType type, const F& f) {
  switch (type) {
    case WeightType::f32:
      return f(static_cast<const float*>(w));
    case WeightType::bf16:
      return f(static_cast<const uint16_t*>(w));
    case WeightType::int8:
      return f(static_cast<const Int8Group*>(w));
    case WeightType::int4:
      return f(static_cast<const Int4Group*>(w));
  }
}

// float16 without infinities to float: the exponent is moved by a product, which is exact.
inline vec half(const uint16_t* p) {
  const ivec h = iload(p);
  const ivec magnitude = shift_left<13>(bit_and(h, iset1(0x7FFF)));
  const vec value = mul(as_float(magnitude), set1(0x1p112f));
  return as_float(bit_or(as_int(value), shift_left<16>(bit_and(h, iset1(0x8000)))));
}

// Calls f(i, b) for i = begin, begin + 1, ... end - 1, with b[p] the weights of k = i in panel p. `begin` is a multiple
// of kGroup.
template <int P, class T, class F>
[[gnu::always_inline]] inline void walk(const T* w, int64_t stride, int64_t begin, int64_t end, const F& f) {
  for (int64_t i = begin; i < end; ++i) {
    vec b[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) b[p] = load(w + p * stride + kPanel * i);
    f(i, b);
  }
}
template <int P, class F>
[[gnu::always_inline]] inline void walk(const Int8Group* w, int64_t stride, int64_t begin, int64_t end, const F& f) {
  for (int64_t i = begin; i < end; i += kGroup) {
    const Int8Group* group = w + i / kGroup;
    vec scale[P], b[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) scale[p] = half(group[p * stride].scale);
    const int64_t count = end - i < kGroup ? end - i : kGroup;
    for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) b[p] = mul(to_float(iload(group[p * stride].q[j])), scale[p]);
      f(i + j, b);
    }
  }
}
template <int P, class F>
[[gnu::always_inline]] inline void walk(const Int4Group* w, int64_t stride, int64_t begin, int64_t end, const F& f) {
  for (int64_t i = begin; i < end; i += kGroup) {
    const Int4Group* group = w + i / kGroup;
    vec scale[P], min[P], b[P];
    ivec q[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) scale[p] = half(group[p * stride].scale), min[p] = half(group[p * stride].min);
    const int64_t count = end - i < kGroup ? end - i : kGroup;
    for (int64_t j = 0; j < count; j += 2) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        q[p] = iload(group[p * stride].q[j / 2]);
        b[p] = fma(to_float(bit_and(q[p], iset1(15))), scale[p], min[p]);
      }
      f(i + j, b);
      if (j + 1 == count) break;
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) b[p] = fma(to_float(shift_right<4>(q[p])), scale[p], min[p]);
      f(i + j + 1, b);
    }
  }
}

template <int R, int P>
[[gnu::always_inline]] inline void multiply_add(const float* x, int64_t x_stride, const vec (&b)[P], vec (&acc)[R][P]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const vec a = set1(x[r * x_stride]);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = fma(a, b[p], acc[r][p]);
  }
}

// ---- up to kMaxRows rows: one tile of rows, k walked once ----------------------------------------------------------

// Hands finished accumulators to sink(row, panel, vec).
template <int R, int P, class W, class Sink>
inline void tile(const float* x, int64_t x_stride, const W* w, int64_t k, int64_t panel, Sink& sink) {
  const int64_t stride = panel_stride(w, k);
  vec acc[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = zero();
  const char* next = reinterpret_cast<const char*>(w + (panel + P) * stride);
  const int64_t panel_size = stride * int64_t{sizeof(W)}, step = panel_size / (k + 1) + 1;
  walk<P>(w + panel * stride, stride, 0, k, [&](int64_t i, const vec(&b)[P]) __attribute__((always_inline)) {
    if constexpr (R > 2) {  // fewer read fast enough for the CPU to keep ahead by itself
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) __builtin_prefetch(next + p * panel_size, 0, 2);
      next += step;
    }
    multiply_add<R, P>(x + i, x_stride, b, acc);
  });
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sink(r, panel + p, acc[r][p]);
}

template <int R, class W, class Sink>
inline void few_rows(int64_t rows, const float* x, int64_t x_stride, const W* w, int64_t k, int64_t begin, int64_t end,
                     Sink& sink) {
  if (rows == R) {
    constexpr int P = panels_per_tile(R);
    int64_t panel = begin;
    for (; panel + P <= end; panel += P) tile<R, P>(x, x_stride, w, k, panel, sink);
    for (; panel < end; ++panel) tile<R, 1>(x, x_stride, w, k, panel, sink);
  } else if constexpr (R > 1) {
    few_rows<R - 1>(rows, x, x_stride, w, k, begin, end, sink);
  }
}

// ---- more rows: blocks of a panel, row tiles in turn ---------------------------------------------------------------

// A block of P panels as floats, block[p][k][16] `stride` floats apart, and what to prefetch meanwhile.
struct Block {
  const float* w;
  int64_t stride, length;
  const char* next;  // of the packed weights, `next_stride` bytes apart
  int64_t next_stride;
  int64_t step;  // bytes to prefetch for every k, per panel
};

template <int R, int P>
inline void block_tile(const float* x, int64_t x_stride, const Block& block, float* sums) {
  constexpr int64_t width = kPanel * kBlockPanels;
  vec acc[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = load(sums + r * width + kPanel * p);
  const char* next = block.next;
  walk<P>(block.w, block.stride, 0, block.length, [&](int64_t i, const vec(&b)[P]) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) __builtin_prefetch(next + p * block.next_stride, 0, 2);
    next += block.step;
    multiply_add<R, P>(x + i, x_stride, b, acc);
  });
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) store(sums + r * width + kPanel * p, acc[r][p]);
}

template <int R, int P>
inline void block_tile_of(int64_t rows, const float* x, int64_t x_stride, const Block& block, float* sums) {
  if (rows == R)
    block_tile<R, P>(x, x_stride, block, sums);
  else if constexpr (R > 1)
    block_tile_of<R - 1, P>(rows, x, x_stride, block, sums);
}

// P panels from `panel` on, for rows [0, rows) of at most kRowBlock.
template <int P, class W, class Sink>
inline void many_rows(const float* x, int64_t x_stride, int64_t first_row, int64_t rows, const W* w, int64_t k,
                      int64_t panel, Sink& sink) {
  constexpr int64_t width = kPanel * kBlockPanels;
  constexpr bool widened = !__is_same(W, float);
  alignas(64) float sums[kRowBlock * width];
  alignas(64) float wide[widened ? P * kBlock * kPanel : 1];
  const int64_t stride = panel_stride(w, k), tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t unit = widened ? panel_stride(w, kBlock) : kPanel * kBlock;  // elements of W in a block
  for (int64_t i = 0; i < rows * width; i += kPanel) store(sums + i, zero());
  for (int64_t begin = 0; begin < k; begin += kBlock) {
    const int64_t length = k - begin < kBlock ? k - begin : kBlock;
    const W* at = w + panel * stride + begin / kBlock * unit;
    Block block;
    block.length = length;
    if constexpr (widened) {
      for (int p = 0; p < P; ++p)
        walk<1>(at + p * stride, 0, 0, length, [&](int64_t i, const vec(&b)[1]) __attribute__((always_inline)) {
          store(wide + (p * kBlock + i) * kPanel, b[0]);
        });
      block.w = wide, block.stride = kBlock * kPanel;
    } else {
      block.w = at, block.stride = stride;
    }
    block.next_stride = stride * int64_t{sizeof(W)};
    block.step = unit * int64_t{sizeof(W)} / (kBlock * tiles) + 1;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows * t / tiles, end = rows * (t + 1) / tiles;
      block.next = reinterpret_cast<const char*>(at + unit) + kBlock * block.step * t;
      block_tile_of<kMaxRows, P>(end - row, x + (first_row + row) * x_stride + begin, x_stride, block,
                                 sums + row * width);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int p = 0; p < P; ++p) sink(first_row + r, panel + p, load(sums + r * width + kPanel * p));
}

template <class W, class Sink>
inline void gemm(const float* x, int64_t x_stride, int64_t rows, const W* w, int64_t k, int64_t begin, int64_t end,
                 Sink& sink) {
  if (rows <= kMaxRows) {
    few_rows<kMaxRows>(rows, x, x_stride, w, k, begin, end, sink);
    return;
  }
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  int64_t panel = begin;
  for (; panel + kBlockPanels <= end; panel += kBlockPanels)
    for (int64_t b = 0; b < blocks; ++b)
      many_rows<kBlockPanels>(x, x_stride, rows * b / blocks, rows * (b + 1) / blocks - rows * b / blocks, w, k, panel,
                              sink);
  for (; panel < end; ++panel)
    for (int64_t b = 0; b < blocks; ++b)
      many_rows<1>(x, x_stride, rows * b / blocks, rows * (b + 1) / blocks - rows * b / blocks, w, k, panel, sink);
}

}  // namespace JACOBI_ISA
