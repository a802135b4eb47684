// The small-M product that linear.h and head.h share: rows of float x times packed panels of 16 columns.
//
//   acc[r][c] = sum over k of x[r][k] * w[panel][k][c]
//
// Tiling: a micro-kernel keeps R rows x P panels of accumulators in registers and walks k once; each weight vector that
// it loads is used by R rows, each broadcast x by P panels. More rows than fit are split into near-equal row tiles
// while the panels stay in cache, so a weight is read from memory once per call. Reduction order: k = 0, 1, ... in one
// chain of fma per output. R, P, the row split and threads cannot change a bit. Bytes: the packed weights once (64 * k
// per float panel, 32 * k per bf16 panel). Operations: 2 * rows * n * k.
#pragma once

namespace JACOBI_ISA {

// Rows per tile, and panels per tile for that many rows: as many accumulators as registers allow, at least 8 chains
// so that the latency of fma is hidden when there is one row.
constexpr int kMaxRows = kRegisters >= 32 ? 12 : 6;
constexpr int panels_per_tile(int rows) {
  return kRegisters >= 32 ? (rows == 1 ? 8 : rows <= 3 ? 4 : 2) : (rows == 1 ? 4 : rows <= 3 ? 2 : 1);
}

template <int R, int P, class W>
[[gnu::always_inline]] inline void micro_kernel(const float* x, int64_t x_stride, const W* w, int64_t k,
                                                vec (&acc)[R][P]) {
  const int64_t panel = 16 * k;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = zero();
  for (int64_t i = 0; i < k; ++i) {
    vec b[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) b[p] = load(w + p * panel + 16 * i);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vec a = set1(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = fma(a, b[p], acc[r][p]);
    }
  }
}

// Hands finished accumulators to sink(row, panel, vec).
template <int R, int P, class W, class Sink>
inline void tile(const float* x, int64_t x_stride, const W* w, int64_t k, int64_t row, int64_t panel, Sink& sink) {
  vec acc[R][P];
  micro_kernel<R, P, W>(x + row * x_stride, x_stride, w + panel * 16 * k, k, acc);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sink(row + r, panel + p, acc[r][p]);
}

template <int R, class W, class Sink>
inline void row_tile(const float* x, int64_t x_stride, const W* w, int64_t k, int64_t row, int64_t begin, int64_t end,
                     Sink& sink) {
  constexpr int P = panels_per_tile(R);
  int64_t panel = begin;
  for (; panel + P <= end; panel += P) tile<R, P, W>(x, x_stride, w, k, row, panel, sink);
  for (; panel < end; ++panel) tile<R, 1, W>(x, x_stride, w, k, row, panel, sink);
}

template <int R, class W, class Sink>
inline void row_tile_of(int rows, const float* x, int64_t x_stride, const W* w, int64_t k, int64_t row, int64_t begin,
                        int64_t end, Sink& sink) {
  if (rows == R)
    row_tile<R, W>(x, x_stride, w, k, row, begin, end, sink);
  else if constexpr (R > 1)
    row_tile_of<R - 1, W>(rows, x, x_stride, w, k, row, begin, end, sink);
}

template <class W, class Sink>
inline void gemm(const float* x, int64_t x_stride, int64_t rows, const W* w, int64_t k, int64_t begin, int64_t end,
                 Sink& sink) {
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t step = tiles > 1 ? 2 : end - begin;  // panels that stay in cache across row tiles
  for (int64_t panel = begin; panel < end; panel += step)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = rows * t / tiles, last = rows * (t + 1) / tiles;
      const int64_t stop = panel + step < end ? panel + step : end;
      row_tile_of<kMaxRows, W>(static_cast<int>(last - first), x, x_stride, w, k, first, panel, stop, sink);
    }
}

}  // namespace JACOBI_ISA
