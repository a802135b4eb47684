// What the grid program is written in: a grid of blocks, stages of the threads or warps of a block, copies into shared
// memory. Every type here exists twice, with the same members:
//
//   device_grid.cuh   one thread of a CUDA kernel
//   host_grid.h       an interpreter: blocks, warps and threads are loops, the accumulators of a warp are arrays
//
// A program is a sequence of phases, grid.phase([&](auto& block) {...}), with a barrier of the whole grid behind each.
// A phase sees block.index, block.count and block.shared; nothing survives it but global memory, so it may run its
// blocks in any order. Inside a phase:
//
//   block.threads(f)       f(thread) for every thread, then a barrier of the block
//   block.warps(f)         f(warp) for every warp; lanes work together inside tile operations (operand.h); no barrier
//   Block::PerWarp<Tile>   one tile per warp that lives across stages
//   block.copy16(...)      16 bytes of global memory on their way to shared memory, or zeros; copies of a thread are
//   block.commit()         closed into groups, and
//   block.wait<n>()        returns when all but the last n groups of every thread have arrived, for all threads
//   block.prefetch(line)   a cache line that one thread will soon read
//
// Code between stages runs once per block on the host and in every thread on the device: it must be uniform.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JACOBI_GRID __device__ inline
#define JACOBI_PHASE __device__ __noinline__  // registers of its own
#define JACOBI_UNROLL _Pragma("unroll")
#else
#define JACOBI_GRID inline
#define JACOBI_PHASE inline
#define JACOBI_UNROLL
#endif

namespace jacobi::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A bfloat16 as it lies in memory. float is the other operand type.
struct bfloat16 {
  uint16_t bits;
};

JACOBI_GRID uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}
JACOBI_GRID float float_of(uint32_t b) {
  float x;
  memcpy(&x, &b, sizeof x);
  return x;
}

JACOBI_GRID float widen(float x) { return x; }
JACOBI_GRID float widen(bfloat16 x) { return float_of(uint32_t{x.bits} << 16); }

// Nearest, ties to even; NaN becomes the quiet NaN 0x7FC0.
template <class T>
JACOBI_GRID T narrow(float x);
template <>
JACOBI_GRID float narrow<float>(float x) {
  return x;
}
template <>
JACOBI_GRID bfloat16 narrow<bfloat16>(float x) {
  const uint32_t b = bits_of(x);
  return {static_cast<uint16_t>(x != x ? 0x7FC0u : (b + 0x7FFFu + (b >> 16 & 1u)) >> 16)};
}

template <class T>
inline constexpr bool kIsFloat = sizeof(T) == 4;

}  // namespace jacobi::cuda
