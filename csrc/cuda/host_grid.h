// The grid on the host: an interpreter of the program in step_program.h. Blocks run one after another between barriers,
// the threads and warps of a stage likewise; in descending order when `backwards` is set, which must change nothing.
// Shared memory is filled with NaN at the start of every phase.
#pragma once

#include <cstdlib>
#include <new>

#include "cuda/grid.h"
#include "cuda/operand.h"

namespace jacobi::cuda {

class HostBlock {
 public:
  template <int M, int N>
  using Tile = HostTile<M, N>;
  template <class Tile, int Count = 1>
  struct PerWarp {
    Tile tile[kWarps][Count];
    Tile* operator[](int warp) { return tile[warp]; }
  };

  int index, count;
  char* shared;

  HostBlock(int index, int count, char* shared, bool backwards)
      : index(index), count(count), shared(shared), backwards_(backwards) {}

  template <class F>
  void threads(const F& f) const {
    for (int i = 0; i < kThreads; ++i) f(backwards_ ? kThreads - 1 - i : i);
  }
  template <class F>
  void threads_without_barrier(const F& f) const {
    threads(f);
  }
  template <class F>
  void warps(const F& f) const {
    for (int i = 0; i < kWarps; ++i) f(backwards_ ? kWarps - 1 - i : i);
  }
  void barrier() const {}
  void copy16(void* to, const void* from, bool wanted) const { wanted ? memcpy(to, from, 16) : memset(to, 0, 16); }
  void commit() const {}
  template <int N>
  void wait() const {}
  void prefetch(const void*) const {}
  // The last of `parts` blocks to say so gets true, and sees what the others wrote before.
  bool last_to_arrive(uint32_t* counter, uint32_t parts) const {
    if (++*counter < parts) return false;
    *counter = 0;
    return true;
  }
  static void maximise(uint64_t* to, uint64_t value) { *to = *to > value ? *to : value; }

 private:
  bool backwards_;
};

class HostGrid {
 public:
  HostGrid(int blocks, int shared_bytes, bool backwards)
      : blocks_(blocks), bytes_(shared_bytes), backwards_(backwards) {
    shared_ = static_cast<char*>(std::aligned_alloc(256, (shared_bytes + 255) / 256 * 256));
    if (shared_ == nullptr) throw std::bad_alloc();
  }
  ~HostGrid() { std::free(shared_); }
  HostGrid(const HostGrid&) = delete;
  HostGrid& operator=(const HostGrid&) = delete;

  template <class F>
  void phase(const F& f) {
    ++phases;
    for (int i = 0; i < blocks_; ++i) {
      memset(shared_, 0xFF, bytes_);
      HostBlock block(backwards_ ? blocks_ - 1 - i : i, blocks_, shared_, backwards_);
      f(block);
    }
  }

  int phases = 0;

 private:
  int blocks_, bytes_;
  bool backwards_;
  char* shared_;
};

}  // namespace jacobi::cuda
