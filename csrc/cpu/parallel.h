// Threads for the kernels: a range split over the thread pool of the host program.
#pragma once
#include <stdint.h>

namespace jacobi::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// Calls f on disjoint ranges that cover [0, n), each at least `grain` long when n allows, all at the same time on
// different threads; all but the last are equally long. Defined by whoever links the kernels: csrc/ops/parallel.cpp
// uses torch's pool.
void parallel_for_raw(int64_t n, int64_t grain, RangeFunction f, void* context);

// Threads that parallel_for_raw may use.
int64_t thread_count();

template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  parallel_for_raw(
      n, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace jacobi::cpu
