// exp, log, tanh, erf on sixteen lanes: the same bits on every instruction set, about 1e-7 relative error.
// Coefficients come from fit_math.py. Include after one of the vec_*.h files.
#pragma once

namespace JACOBI_ISA {

inline vec negate(vec x) { return sub(zero(), x); }
inline vec absolute(vec x) { return as_float(bit_and(as_int(x), iset1(0x7FFFFFFF))); }

template <int N>
inline vec polynomial(vec x, const float (&c)[N]) {  // Horner, c[0] is the constant
  vec r = set1(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) r = fma(r, x, set1(c[i]));
  return r;
}

// exp(x) = 2^n exp(r), |r| <= log(2)/2. 0 below -87.33, inf above 88.37, NaN stays NaN.
inline vec exp(vec x) {
  static const float kTail[6] = {5.000000000e-01f, 1.666666716e-01f, 4.166646674e-02f,
                                 8.333310485e-03f, 1.393364160e-03f, 1.989098091e-04f};
  const vec high = set1(88.37f), low = set1(-87.33f),
            magic = set1(12582912.0f);  // magic: 1.5 * 2^23 rounds to integers
  const vec y = max(min(x, high), low);
  const vec t = fma(y, set1(1.44269504f), magic);
  const vec n = sub(t, magic);
  vec r = fma(n, set1(-0.693145752f), y);
  r = fma(n, set1(-1.42860677e-6f), r);
  const vec p = add(fma(polynomial(r, kTail), mul(r, r), r), set1(1.0f));
  vec result = as_float(add(as_int(p), shift_left<23>(as_int(t))));
  result = select(gt(low, x), zero(), result);
  result = select(gt(x, high), set1(__builtin_inff()), result);
  return select(is_nan(x), x, result);
}

// log(x) for positive normal x. x = 2^n m, m in [sqrt(1/2), sqrt(2)).
inline vec log(vec x) {
  static const float kTail[9] = {3.333333135e-01f,  -2.499999702e-01f, 2.000071555e-01f,
                                 -1.666780263e-01f, 1.424905807e-01f,  -1.242568716e-01f,
                                 1.168541983e-01f,  -1.147973388e-01f, 6.971611083e-02f};
  const ivec offset = add(as_int(x), iset1(-0x3F3504F3));  // bits of sqrt(1/2): the exponent field now counts n
  const vec n = sub(to_float(shift_right<23>(add(offset, iset1(0x40000000)))), set1(128.0f));
  const vec m = as_float(add(bit_and(offset, iset1(0x007FFFFF)), iset1(0x3F3504F3)));
  const vec r = sub(m, set1(1.0f));
  const vec square = mul(r, r);
  vec p = mul(mul(polynomial(r, kTail), r), square);
  p = fma(n, set1(-2.12194440e-4f), p);
  p = fma(square, set1(-0.5f), p);
  return fma(n, set1(0.693359375f), add(r, p));
}

// log(1 - v) for 0 < v <= 0.5, accurate for small v
inline vec log_one_minus(vec v) {
  const vec u = sub(set1(1.0f), v);
  const vec lost = sub(sub(set1(1.0f), u), v);  // rounding error of u: 1 - u - v
  return add(log(u), div(lost, u));
}

inline vec tanh(vec x) {
  static const float kSmall[5] = {-3.333332837e-01f, 1.333277375e-01f, -5.385141075e-02f, 2.099955268e-02f,
                                  -6.100170780e-03f};
  const vec a = absolute(x), z = mul(x, x);
  const vec near = fma(mul(polynomial(z, kSmall), z), x, x);
  const vec e = exp(add(a, a));
  const vec far = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
  const vec signed_far = select(gt(zero(), x), negate(far), far);
  return select(gt(a, set1(0.6245f)), signed_far, near);
}

inline vec sigmoid(vec x) { return div(set1(1.0f), add(set1(1.0f), exp(negate(x)))); }

// 1 + erf(x), without cancellation on the negative side
inline vec one_plus_erf(vec x) {
  static const float kSmall[7] = {1.128379107e+00f, -3.761262596e-01f, 1.128359437e-01f, -2.685421146e-02f,
                                  5.189087242e-03f, -8.016864303e-04f, 7.875874871e-05f};
  static const float kLogTail[9] = {3.201380896e-04f,  -1.130233407e+00f, -6.318260431e-01f,
                                    -1.100800857e-01f, 2.642113529e-02f,  -4.759596195e-03f,
                                    5.968056503e-04f,  -4.605804497e-05f, 1.637151513e-06f};
  const vec a = min(absolute(x), set1(4.0f)), z = mul(x, x);
  const vec near = fma(polynomial(z, kSmall), x, set1(1.0f));
  // erfc(|x|); behind the fitted range it is below a rounding of 1, and gelu must not multiply it by a large x
  const vec tail = select(gt(absolute(x), set1(4.0f)), zero(), exp(polynomial(a, kLogTail)));
  const vec far = select(gt(zero(), x), tail, sub(set1(2.0f), tail));
  return select(is_nan(x), x, select(gt(a, set1(1.0f)), far, near));
}

// float to bf16 bits in the high half of each lane: nearest, ties to even; NaN becomes the quiet NaN 0x7FC0
inline ivec round_bf16(vec x) {
  const ivec b = as_int(x);
  const ivec odd = bit_and(shift_right<16>(b), iset1(1));
  const ivec rounded = add(b, add(iset1(0x7FFF), odd));
  return select(is_nan(x), iset1(0x7FC00000), rounded);
}

inline vec load(const uint16_t* p, int n) {
  uint16_t padded[16] = {0};
  for (int i = 0; i < n && i < 16; ++i) padded[i] = p[i];
  return load(padded);
}
inline void store(uint16_t* p, vec x) { store_high_halves(p, round_bf16(x)); }
inline void store(uint16_t* p, vec x, int n) {
  uint16_t padded[16];
  store(padded, x);
  for (int i = 0; i < n && i < 16; ++i) p[i] = padded[i];
}

// the widest access that fits: all sixteen lanes, or the n < 16 that are left
template <class T>
inline vec load_up_to(const T* p, int64_t n) {
  return n >= 16 ? load(p) : load(p, static_cast<int>(n));
}
template <class T>
inline void store_up_to(T* p, vec x, int64_t n) {
  if (n >= 16)
    store(p, x);
  else
    store(p, x, static_cast<int>(n));
}

}  // namespace JACOBI_ISA
