// The kernels' name for a tensor's dtype; the tensor has been checked to be float32 or bfloat16.
#pragma once

#include "cpu/kernels.h"
#include "ops/checks.h"

namespace jacobi::ops {

inline cpu::DType kernel_dtype(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float ? cpu::DType::f32 : cpu::DType::bf16;
}

// Of a packed weight that has been checked: uint8 ones are records of 32 values of k (packed.h).
inline WeightType weight_type(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Byte)
    return t.size(2) == int64_t{sizeof(Int8Group)} ? WeightType::int8 : WeightType::int4;
  return kernel_dtype(t) == cpu::DType::f32 ? WeightType::f32 : WeightType::bf16;
}

}  // namespace jacobi::ops
