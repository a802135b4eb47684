// The grid on a GPU, for sm_80 and later: one thread's view. Members as grid.h says.
//
// Grid barrier: a counter in global memory that only grows. Each block adds one with release order and waits, with
// acquire order, until blocks * phases have; the cooperative launch guarantees that all blocks run at once.
#pragma once

#include "cuda/device_tile.cuh"

namespace jacobi::cuda {

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

  __device__ void prefetch(const void* line) const { asm volatile("prefetch.global.L1 [%0];" ::"l"(line)); }

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
