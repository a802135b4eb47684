// Threads of the CPU kernels: torch's own pool, so that torch.set_num_threads applies.
#include "cpu/parallel.h"

#include <torch/csrc/stable/ops.h>

namespace jacobi::cpu {

void parallel_for_raw(int64_t n, int64_t grain, RangeFunction f, void* context) {
  if (n > 0) torch::stable::parallel_for(0, n, grain, [=](int64_t begin, int64_t end) { f(begin, end, context); });
}

int64_t thread_count() { return torch::stable::get_num_threads(); }

}  // namespace jacobi::cpu
