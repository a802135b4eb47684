// y = x W^T + bias over packed panels (gemm.h): the bias is added after the whole sum, then one rounding to the type of
// y. With `accumulate` y is added last.
#pragma once

#include <type_traits>

namespace JACOBI_ISA {

inline vec load_bias(const void* bias, DType type, int64_t i, int64_t n) {
  return type == DType::f32 ? load_up_to(static_cast<const float*>(bias) + i, n)
                            : load_up_to(static_cast<const uint16_t*>(bias) + i, n);
}

template <class W, class Y>
void linear_as(const LinearArgs& a, const W* w, int64_t begin, int64_t end) {
  auto sink = [&](int64_t row, int64_t panel, vec sum) {
    const int64_t column = 16 * panel, left = a.n - column;
    Y* y = static_cast<Y*>(a.y) + row * a.y_stride + column;
    if (a.bias != nullptr) sum = add(sum, load_bias(a.bias, a.bias_type, column, left));
    if (a.accumulate) sum = add(load_up_to(y, left), sum);
    store_up_to(y, sum, left);
  };
  gemm(a.x, a.x_stride, a.rows, w, a.k, begin, end, sink);
}

inline void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  with_weights(a.w, a.w_type, [&](auto w) {
    a.y_type == DType::f32 ? linear_as<std::remove_cvref_t<decltype(*w)>, float>(a, w, begin, end)
                           : linear_as<std::remove_cvref_t<decltype(*w)>, uint16_t>(a, w, begin, end);
  });
}

inline void column(const void* w, WeightType type, int64_t k, int64_t column, float* y) {
  with_weights(w, type, [&](auto panels) {
    const int64_t stride = panel_stride(panels, k), lane = column % kPanel;
    walk<1>(panels + column / kPanel * stride, stride, 0, k, [&](int64_t i, const vec(&b)[1]) {
      float values[kPanel];
      store(values, b[0]);
      y[i] = values[lane];
    });
  });
}

}  // namespace JACOBI_ISA
