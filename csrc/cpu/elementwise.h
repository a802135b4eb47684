// Row and element operations: activations, RMS norm, conversions. One element's bits do not depend on its neighbours or
// on its place in the array: tails are padded to a whole vector and go through the same code.
#pragma once

#include <math.h>

namespace JACOBI_ISA {

inline vec silu(vec x) { return mul(x, sigmoid(x)); }

inline vec activate(Activation kind, vec x) {
  switch (kind) {
    case Activation::silu:
      return silu(x);
    case Activation::gelu:  // x/2 (1 + erf(x / sqrt(2)))
      return mul(mul(x, set1(0.5f)), one_plus_erf(mul(x, set1(0.707106781f))));
    case Activation::gelu_tanh: {  // x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 ...)
      const vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
      return mul(x, sigmoid(mul(cubic, set1(1.595769122f))));
    }
    case Activation::quick_gelu:
      return mul(x, sigmoid(mul(x, set1(1.702f))));
    case Activation::relu:
      return select(gt(zero(), x), zero(), x);
    case Activation::relu2: {
      const vec positive = select(gt(zero(), x), zero(), x);
      return mul(positive, positive);
    }
    case Activation::sigmoid:
      return sigmoid(x);
    case Activation::tanh:
      return tanh(x);
  }
  return x;
}

template <class T>
void activation_as(Activation kind, const T* x, T* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store_up_to(y + i, activate(kind, load_up_to(x + i, n - i)), n - i);
}

inline void activation(Activation kind, const void* x, void* y, DType type, int64_t n) {
  if (type == DType::f32)
    activation_as(kind, static_cast<const float*>(x), static_cast<float*>(y), n);
  else
    activation_as(kind, static_cast<const uint16_t*>(x), static_cast<uint16_t*>(y), n);
}

inline void silu_mul(const float* gate, const float* up, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    store_up_to(y + i, mul(silu(load_up_to(gate + i, n - i)), load_up_to(up + i, n - i)), n - i);
}

inline void add_to(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    store_up_to(y + i, add(load_up_to(y + i, n - i), load_up_to(x + i, n - i)), n - i);
}

// Sum of squares: lane l takes elements l, l + 16, ..., then the tree of reduce_add.
inline void rms_norm(const float* x, const void* weight, DType weight_type, float eps, float* y, int64_t n) {
  vec squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const vec v = load_up_to(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const vec scale = set1(1.0f / sqrtf(reduce_add(squares) / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += 16)
    store_up_to(y + i, mul(mul(load_up_to(x + i, n - i), scale), load_bias(weight, weight_type, i, n - i)), n - i);
}

inline void widen(const void* x, DType type, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store_up_to(y + i, load_bias(x, type, i, n - i), n - i);
}

inline void narrow(const float* x, void* y, DType type, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const vec v = load_up_to(x + i, n - i);
    if (type == DType::f32)
      store_up_to(static_cast<float*>(y) + i, v, n - i);
    else
      store_up_to(static_cast<uint16_t*>(y) + i, v, n - i);
  }
}

}  // namespace JACOBI_ISA
