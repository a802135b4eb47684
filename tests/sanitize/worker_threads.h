// cpu/parallel.h without torch: threads that are started once and wait at a barrier, so that a step creates none.
// OpenMP would not do: ThreadSanitizer does not see how libgomp synchronises.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace jacobi::cpu {

class WorkerThreads {
 public:
  // thread_count() says `asked`, and `granted` threads run, at most as many; all have started.
  WorkerThreads(int64_t asked, int64_t granted) : asked_(asked), granted_(granted), barrier_(granted) {
    for (int64_t i = 1; i < granted; ++i) workers_.emplace_back([this, i] { work(i); });
    barrier_.arrive_and_wait();
  }
  ~WorkerThreads() {
    f_ = nullptr;
    barrier_.arrive_and_wait();
  }

  int64_t asked() const { return asked_; }

  void run(int64_t n, int64_t grain, RangeFunction f, void* context) {
    if (n <= 0) return;
    const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, granted_);
    n_ = n, chunk_ = (n + parts - 1) / parts, f_ = f, context_ = context;
    barrier_.arrive_and_wait();
    part(0);
    barrier_.arrive_and_wait();
  }

 private:
  void part(int64_t i) {
    if (i * chunk_ < n_) f_(i * chunk_, std::min((i + 1) * chunk_, n_), context_);
  }

  void work(int64_t i) {
    barrier_.arrive_and_wait();
    for (;;) {
      barrier_.arrive_and_wait();
      if (f_ == nullptr) return;
      part(i);
      barrier_.arrive_and_wait();
    }
  }

  const int64_t asked_, granted_;
  int64_t n_ = 0, chunk_ = 0;
  RangeFunction f_ = nullptr;
  void* context_ = nullptr;
  std::barrier<> barrier_;
  std::vector<std::jthread> workers_;  // last: joined while all else is still there
};

inline WorkerThreads* worker_threads = nullptr;

void parallel_for_raw(int64_t n, int64_t grain, RangeFunction f, void* context) {
  worker_threads->run(n, grain, f, context);
}

int64_t thread_count() { return worker_threads->asked(); }

}  // namespace jacobi::cpu
