// The kernels' name for a tensor's dtype; the tensor has been checked to be float32 or bfloat16.
#pragma once

#include "cpu/kernels.h"
#include "ops/checks.h"

namespace jacobi::ops {

inline cpu::DType kernel_dtype(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float ? cpu::DType::f32 : cpu::DType::bf16;
}

}  // namespace jacobi::ops
