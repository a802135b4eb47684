// The grid on a GPU, for sm_80 and later: one thread's view. Members as grid.h says.
//
// Grid barrier: a counter in global memory that only grows. Each block adds one with release order and waits, with
// acquire order, until blocks * phases have; the cooperative launch guarantees that all blocks run at once.
// Accumulators: lane = 4 g + t holds (m, n) = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each 16 x 8 unit.
#pragma once

#include "cuda/grid.h"
#include "cuda/operand.h"

namespace jacobi::cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

template <bool kTransposed>
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The 16 x 16 of A from column k on. Matrices: (m low, k low), (m high, k low), (m low, k high), (m high, k high).
__device__ inline void load_a(uint32_t (&r)[4], const Rows<bfloat16>& a, int k, int lane) {
  load_matrices<false>(r, a.at((lane & 7) + (lane & 8), k + (lane >> 4) * 8));
}
template <class A>
__device__ inline void load_a(uint32_t (&r)[4], const A& a, int k, int lane) {
  load_matrices<true>(r, a.at(lane & 8, k + (lane & 7) + (lane >> 4) * 8));
}

__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
    const int lane = threadIdx.x % 32;
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
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
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
    const int t = threadIdx.x % 4;
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
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
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
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(g + (j & 2) * 4, 8 * n + 2 * t + (j & 1), value[0][n][j], value[1][n][j]);
  }
};

class DeviceBlock {
 public:
  template <int M, int N>
  using Tile = DeviceTile<M, N>;
  template <class Tile, int Count = 1>
  struct PerWarp {
    Tile tile[Count];
    __device__ Tile* operator[](int) { return tile; }
  };

  int index, count;
  char* shared;

  template <class F>
  __device__ void threads(const F& f) const {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  template <class F>
  __device__ void threads_without_barrier(const F& f) const {
    f(static_cast<int>(threadIdx.x));
  }
  template <class F>
  __device__ void warps(const F& f) const {
    f(static_cast<int>(threadIdx.x) / 32);
  }
  __device__ void barrier() const { __syncthreads(); }

  __device__ void copy16(void* to, const void* from, bool wanted) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
  }
  __device__ void commit() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int N>
  __device__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    __syncthreads();
  }

  __device__ bool last_to_arrive(uint32_t* counter, uint32_t parts) const {
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(counter, 1u) + 1u == parts;
      if (last) atomicExch(counter, 0u);
      __threadfence();
    }
    return __syncthreads_or(last) != 0;
  }
  static __device__ void maximise(uint64_t* to, uint64_t value) {
    atomicMax(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
  }
};

class DeviceGrid {
 public:
  __device__ DeviceGrid(uint32_t* counter, char* shared) : counter_(counter), shared_(shared) {}

  template <class F>
  __device__ void phase(const F& f) {
    DeviceBlock block;
    block.index = static_cast<int>(blockIdx.x);
    block.count = static_cast<int>(gridDim.x);
    block.shared = shared_;
    f(block);
    barrier();
  }

 private:
  __device__ void barrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
      wanted_ += gridDim.x;
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter_) : "memory");
      uint32_t seen;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter_) : "memory");
      while (seen < wanted_);
      __threadfence();
    }
    __syncthreads();
  }

  uint32_t* counter_;
  char* shared_;
  uint32_t wanted_ = 0;
};

}  // namespace jacobi::cuda
