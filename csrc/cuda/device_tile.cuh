// The accumulators of a warp, as HostTile of operand.h has them, in the registers of its lanes.
//
// Lane 4 g + t holds (m, n) = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each 16 x 8 unit, as mma.sync has
// it; float32 products use the same places. Tests put something else in the place of
// warp_ops.cuh and run the lanes as threads.
#pragma once

#include "cuda/operand.h"
#if defined(__CUDACC__)
#include "cuda/warp_ops.cuh"
#endif

namespace jacobi::cuda {

// The 16 x 16 of A from column k on. Matrices: (m low, k low), (m high, k low), (m low, k high), (m high, k high).
__device__ inline void load_a(uint32_t (&r)[4], const Rows<bfloat16>& a, int k, int lane) {
  load_matrices<false>(r, a.at((lane & 7) + (lane & 8), k + (lane >> 4) * 8));
}
template <class A>
__device__ inline void load_a(uint32_t (&r)[4], const A& a, int k, int lane) {
  load_matrices<true>(r, a.at(lane & 8, k + (lane & 7) + (lane >> 4) * 8));
}

template <int M, int N>
struct DeviceTile {
  static_assert(N % 2 == 0, "one load brings two units of B");
  float value[M][N][4];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) value[i][n][j] = 0.0f;
  }

  template <int K, class A>
  __device__ void multiply(const A (&a)[M], const Rows<bfloat16>& b, int units) {
    static_assert(K % 16 == 0, "k of one mma");
    const int lane = lane_index();
    const bfloat16* const b_row = b.at((lane & 7) + (lane >> 4) * 8, lane & 8);
#pragma unroll
    for (int k = 0; k < K; k += 16) {
      uint32_t left[M][4];
#pragma unroll
      for (int i = 0; i < M; ++i) load_a(left[i], a[i], k, lane);
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        if (n >= units) break;  // the same for the whole warp
        uint32_t right[4];
        load_matrices<false>(right, b_row + n * 8 * b.pitch + k);
#pragma unroll
        for (int i = 0; i < M; ++i) {
          multiply_add(value[i][n], left[i], right[0], right[1]);
          multiply_add(value[i][n + 1], left[i], right[2], right[3]);
        }
      }
    }
  }

  template <int K, class A>
  __device__ void multiply(const A (&a)[M], const Rows<float>& b, int units) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll 4
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (n >= units) break;
        const float b0 = *b.at(8 * n + 2 * t, k), b1 = *b.at(8 * n + 2 * t + 1, k);
#pragma unroll
        for (int i = 0; i < M; ++i) {
          const float a0 = *a[i].at(g, k), a1 = *a[i].at(g + 8, k);
          value[i][n][0] = fmaf(a0, b0, value[i][n][0]);
          value[i][n][1] = fmaf(a0, b1, value[i][n][1]);
          value[i][n][2] = fmaf(a1, b0, value[i][n][2]);
          value[i][n][3] = fmaf(a1, b1, value[i][n][3]);
        }
      }
  }

  __device__ void scale(const float* factor) {
    const int t = lane_index() % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float f0 = factor[8 * n + 2 * t], f1 = factor[8 * n + 2 * t + 1];
#pragma unroll
      for (int i = 0; i < M; ++i) {
        value[i][n][0] *= f0, value[i][n][1] *= f1;
        value[i][n][2] *= f0, value[i][n][3] *= f1;
      }
    }
  }

  template <class F>
  __device__ void each(F&& f) const {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) f(i, g + (j & 2) * 4, 8 * n + 2 * t + (j & 1), value[i][n][j]);
  }

  template <class F>
  __device__ void each_pair(F&& f) const {
    static_assert(M == 2, "a pair");
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(g + (j & 2) * 4, 8 * n + 2 * t + (j & 1), value[0][n][j], value[1][n][j]);
  }
};

}  // namespace jacobi::cuda
