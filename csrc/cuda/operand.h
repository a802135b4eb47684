// Operands of a tile product as they lie in shared memory, and the accumulators on the host.
//
//   tile[m][n] += sum over k of A[m][k] B[n][k],   m: 16 per A operand, n: 8 per unit, k ascending
//
// A: Panel (16 columns of a packed weight), Rows (keys) or Columns (values). B: Rows (tokens, queries, weights of
// values). The pitch of Rows and Columns is an odd number of 16-byte chunks, and the two chunks of a bfloat16 panel's
// row change places every four rows, so that eight rows at once touch every bank once.
//
// On the device a tile is the accumulators of mma.sync m16n8k16 (bfloat16), or the same elements by fma, k ascending
// (float32): device_grid.cuh.
#pragma once

#include <math.h>

#include "cuda/grid.h"

namespace jacobi::cuda {

template <class T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements of 16 bytes

template <class T>
JACOBI_GRID constexpr int pitch_of(int width) {  // width: a multiple of two chunks
  return width + kChunk<T>;
}

template <class T>
struct Rows {
  const T* base;
  int pitch;
  JACOBI_GRID const T* at(int m, int k) const { return base + m * pitch + k; }
};

template <class T>
struct Columns {
  const T* base;
  int pitch;
  JACOBI_GRID const T* at(int m, int k) const { return base + k * pitch + m; }
};

template <class T>
struct Panel {
  const T* base;
  // Where element (k, column) of a panel lies; 16-byte chunks stay whole.
  static JACOBI_GRID int place(int k, int column) {
    return kIsFloat<T> ? k * 16 + column : k * 16 + (column ^ (k << 1 & 8));
  }
  JACOBI_GRID const T* at(int m, int k) const { return base + place(k, m); }
};

#if !defined(__CUDACC__)
// M A-operands by 8 N columns.
template <int M, int N>
struct HostTile {
  float value[M][16][8 * N];

  void clear() { memset(value, 0, sizeof value); }

  // The first `units` of the N units of 8.
  template <int K, class A, class B>
  void multiply(const A (&a)[M], const B& b, int units) {
    for (int i = 0; i < M; ++i)
      for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 8 * units; ++n) {
          float sum = value[i][m][n];
          for (int k = 0; k < K; ++k) sum = fmaf(widen(*a[i].at(m, k)), widen(*b.at(n, k)), sum);
          value[i][m][n] = sum;
        }
  }
  // Column n times factor[n].
  void scale(const float* factor) {
    for (auto& a : value)
      for (auto& row : a)
        for (int n = 0; n < 8 * N; ++n) row[n] *= factor[n];
  }
  // f(operand, m, n, value)
  template <class F>
  void each(F&& f) const {
    for (int i = 0; i < M; ++i)
      for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 8 * N; ++n) f(i, m, n, value[i][m][n]);
  }
  // f(m, n, value of operand 0, value of operand 1)
  template <class F>
  void each_pair(F&& f) const {
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8 * N; ++n) f(m, n, value[0][m][n], value[1][m][n]);
  }
};
#endif

}  // namespace jacobi::cuda
