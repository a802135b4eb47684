// The kernels' name for a tensor's dtype; the tensor has been checked to be float32 or bfloat16.
#pragma once

#include "cpu/kernels.h"
#include "ops/checks.h"

namespace jacobi::ops {

inline cpu::DType kernel_dtype(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float ? cpu::DType::f32 : cpu::DType::bf16;
}

// A packed weight [n, k]: panels of floats, or of records (packed.h). `floats` and `records` are their shapes in words.
inline void check_packed(const Tensor& weight, const char* op, const char* name, int64_t n, int64_t k,
                         const char* floats, const char* records) {
  check_cpu(weight, op, name);
  const int64_t panels = (n + kPanel - 1) / kPanel;
  if (weight.scalar_type() != ScalarType::Byte) {
    check_floating(weight, op, name);
    check_shape(weight, op, name, floats, {panels, k, kPanel});
  } else {
    check_shape(weight, op, name, records, {panels, (k + kGroup - 1) / kGroup, kAny});
    constexpr int64_t record8 = sizeof(Int8Group), record4 = sizeof(Int4Group);
    if (weight.size(2) != record8 && weight.size(2) != record4)
      fail(op, name, " of uint8 must hold records of ", record8, " (int8) or ", record4, " bytes (int4), got ",
           weight.size(2));
  }
  check_contiguous(weight, op, name);
}

// Of a packed weight that has been checked: uint8 ones are records of 32 values of k (packed.h).
inline WeightType weight_type(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Byte)
    return t.size(2) == int64_t{sizeof(Int8Group)} ? WeightType::int8 : WeightType::int4;
  return kernel_dtype(t) == cpu::DType::f32 ? WeightType::f32 : WeightType::bf16;
}

}  // namespace jacobi::ops
