// The threads of one parallel region, going through the phases of a step together: starting a region for every product
// would cost more than a small product does.
#pragma once

#include <sched.h>

#include <atomic>

#include "cpu/parallel.h"

namespace jacobi::cpu {

class Team {
 public:
  struct Shared {
    alignas(64) std::atomic<int64_t> chunk{0};  // of the range that formed the team, 0: not known yet
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<int64_t> phase{0};
  };

  Team() : most_(thread_count()) {}  // one thread

  // The member that was given [begin, end) of [0, most): fewer threads may have been granted than asked for.
  Team(Shared& shared, int64_t most, int64_t begin, int64_t end) : shared_(&shared), most_(most) {
    if (begin == 0) shared.chunk.store(end, std::memory_order_release);
    int64_t chunk = 0;
    wait([&] { return (chunk = shared.chunk.load(std::memory_order_acquire)) != 0; });
    rank_ = begin / chunk;
    size_ = (most + chunk - 1) / chunk;
  }

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  // Threads that were asked for, the same for all members: a worker's own thread_count() may be another.
  int64_t most() const { return most_; }

  // Nobody goes on before everybody is here. What was written before is visible behind.
  void barrier() {
    if (size_ == 1) return;
    const int64_t phase = shared_->phase.load(std::memory_order_relaxed);
    if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      shared_->arrived.store(0, std::memory_order_relaxed);
      shared_->phase.store(phase + 1, std::memory_order_release);
    } else {
      wait([&] { return shared_->phase.load(std::memory_order_acquire) != phase; });
    }
  }

  // f(begin, end) over this member's share of [0, n), then a barrier.
  template <class F>
  void split(int64_t n, const F& f) {
    const int64_t begin = n * rank_ / size_, end = n * (rank_ + 1) / size_;
    if (begin < end) f(begin, end);
    barrier();
  }

  // f() on one thread, then a barrier.
  template <class F>
  void single(const F& f) {
    if (rank_ == 0) f();
    barrier();
  }

 private:
  static constexpr int kSpins = 4000;  // some tens of microseconds; then whoever is waited for may need this core

  template <class F>
  static void wait(const F& done) {
    for (int spin = 0; !done(); ++spin) {
      if (spin >= kSpins)
        sched_yield();
      else
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
    }
  }

  Shared* shared_ = nullptr;
  int64_t rank_ = 0, size_ = 1, most_;
};

// f(team) on every thread of a team of at most thread_count().
template <class F>
void run_team(const F& f) {
  Team::Shared shared;
  const int64_t most = thread_count();
  parallel_for(most, 1, [&](int64_t begin, int64_t end) {
    Team team(shared, most, begin, end);
    f(team);
  });
}

}  // namespace jacobi::cpu
