// y = x W^T + bias over packed panels (gemm.h): the bias is added after the whole sum, then one rounding to the type of
// y.
#pragma once

namespace JACOBI_ISA {

inline vec load_bias(const void* bias, DType type, int64_t i, int64_t n) {
  return type == DType::f32 ? load_up_to(static_cast<const float*>(bias) + i, n)
                            : load_up_to(static_cast<const uint16_t*>(bias) + i, n);
}

template <class W, class Y>
void linear_as(const LinearArgs& a, int64_t begin, int64_t end) {
  auto sink = [&](int64_t row, int64_t panel, vec sum) {
    const int64_t column = 16 * panel, left = a.n - column;
    if (a.bias != nullptr) sum = add(sum, load_bias(a.bias, a.bias_type, column, left));
    store_up_to(static_cast<Y*>(a.y) + row * a.y_stride + column, sum, left);
  };
  gemm(a.x, a.x_stride, a.rows, static_cast<const W*>(a.w), a.k, begin, end, sink);
}

inline void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  if (a.w_type == DType::f32)
    a.y_type == DType::f32 ? linear_as<float, float>(a, begin, end) : linear_as<float, uint16_t>(a, begin, end);
  else
    a.y_type == DType::f32 ? linear_as<uint16_t, float>(a, begin, end) : linear_as<uint16_t, uint16_t>(a, begin, end);
}

}  // namespace JACOBI_ISA
