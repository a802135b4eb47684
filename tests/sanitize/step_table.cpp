// The kernel table of one instruction set with what a step runs and nothing else: the rest would double the time to
// compile. JACOBI_ISA is its namespace; the compiler's flags choose the vector type.
#if defined(__AVX512F__)
#include "cpu/vec_avx512.h"
#elif defined(__AVX2__)
#include "cpu/vec_avx2.h"
#else
#include "cpu/vec_scalar.h"
#endif

#include "cpu/kernels.h"
#include "cpu/vec_math.h"

namespace JACOBI_ISA {
using namespace jacobi;
using namespace jacobi::cpu;
}  // namespace JACOBI_ISA

// clang-format off: in order of dependence
#include "cpu/gemm.h"
#include "cpu/linear.h"
#include "cpu/head.h"
#include "cpu/elementwise.h"
#include "cpu/attention.h"
// clang-format on

namespace JACOBI_ISA {

Kernels table(const char* name) {
  Kernels t{};
  t.name = name;
  t.linear = linear;
  t.column = column;
  t.head = head;
  t.head_finish = head_finish;
  t.filtered_sample = filtered_sample;
  t.logit_transform = logit_transform;
  t.silu_mul = silu_mul;
  t.rms_norm = rms_norm;
  t.widen = widen;
  t.narrow = narrow;
  t.attention_scratch = attention_scratch;
  t.attention = attention;
  return t;
}

}  // namespace JACOBI_ISA
