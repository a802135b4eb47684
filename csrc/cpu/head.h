// The language-model head without logits in memory: product (gemm.h), transform, argmax or seeded sample, in one pass.
//
//   logit = softcap(scale * (x . w + bias));   greedy: argmax logit;   sampling: argmax logit / temperature + gumbel
//
// Each row keeps, per lane, the best value so far and its token id; panels ascend, so a strict comparison keeps the
// lowest id. Ranges of panels (threads) merge by (value, lowest id), which does not depend on how they were cut. NaN
// counts as the largest value, as in torch.argmax. Gumbel noise is a hash of (seed, position, token id),
// common/sampling.h, so a token's noise is the same wherever it is evaluated; lanes that cannot win even with the
// largest noise skip it. top-k and top-p need a row of logits: filtered_sample works on a scratch row that the caller
// owns. Bytes: the head's packed weights once. Operations: 2 * rows * vocab * k, and about 60 per noise value drawn.
#pragma once

#include <algorithm>

#include "common/sampling.h"

namespace JACOBI_ISA {

constexpr float kLargestGumbel = 23.0f;  // -log(2^-33) = 22.87

inline vec gumbel(NoiseKey key, ivec id) {
  ivec h = add(mul(id, iset1(static_cast<int32_t>(kHashId))), iset1(static_cast<int32_t>(key.low)));
  auto mix = [&h] {
    h = bit_xor(h, shift_right<16>(h));
    h = mul(h, iset1(static_cast<int32_t>(kHashMultiplier1)));
    h = bit_xor(h, shift_right<15>(h));
    h = mul(h, iset1(static_cast<int32_t>(kHashMultiplier2)));
    h = bit_xor(h, shift_right<16>(h));
  };
  mix();
  h = bit_xor(h, iset1(static_cast<int32_t>(key.high)));
  mix();
  const mask upper = negative(h);  // v >= 1/2: use 1 - v, whose low bits are exact
  const ivec folded = select(upper, bit_xor(h, iset1(-1)), h);
  const vec v = mul(add(to_float(folded), set1(0.5f)), set1(0x1p-32f));
  const vec exponential = negate(select(upper, log(v), log_one_minus(v)));
  return negate(log(exponential));
}

inline vec transform_logit(vec logit, float scale, float softcap) {
  if (scale != 1.0f) logit = mul(logit, set1(scale));
  if (softcap > 0.0f) logit = mul(tanh(div(logit, set1(softcap))), set1(softcap));
  return logit;
}

inline void logit_transform(float* logits, int64_t n, float scale, float softcap) {
  for (int64_t i = 0; i < n; i += 16)
    store_up_to(logits + i, transform_logit(load_up_to(logits + i, n - i), scale, softcap), n - i);
}

// b wins over a: larger, or NaN where a is none
inline mask wins(vec b, vec a) { return either(gt(b, a), and_not(is_nan(b), is_nan(a))); }

inline void head(const HeadArgs& a, HeadBest* best, int64_t begin, int64_t end) {
  auto sink = [&](int64_t row, int64_t panel, vec logit) {
    const int64_t column = 16 * panel, left = a.vocab - column;
    if (a.bias != nullptr) logit = add(logit, load_bias(a.bias, a.bias_type, column, left));
    logit = transform_logit(logit, a.scale, a.softcap);
    const ivec id = add(iota(), iset1(static_cast<int32_t>(column)));
    HeadBest& b = best[row];
    const vec value = load(b.value);
    const Sampler& s = a.samplers[row];
    if (s.temperature > 0.0f) {
      logit = div(logit, set1(s.temperature));
      if (!any(wins(add(logit, set1(kLargestGumbel)), value))) return;
      logit = add(logit, gumbel(noise_key(s.seed, s.position), id));
    }
    mask better = wins(logit, value);
    if (left < 16)
      better = and_not(better, negative(add(iset1(static_cast<int32_t>(a.vocab - 1)), mul(id, iset1(-1)))));
    if (!any(better)) return;
    store(b.value, select(better, logit, value));
    istore(b.id, select(better, id, iload(b.id)));
  };
  with_weights(a.w, a.w_type, [&](auto w) { gemm(a.x, a.k, a.rows, w, a.k, begin, end, sink); });
}

// Running winner by (value, lowest id), NaN largest. Starts below every logit; all logits -inf: token 0, as argmax
// gives.
struct Winner {
  float value = -__builtin_inff();
  int32_t id = INT32_MAX;
  void offer(float v, int32_t candidate) {
    const bool larger = v > value || (v != v && value == value);
    const bool same = v == value || (v != v && value != value);
    if (larger || (same && candidate < id)) value = v, id = candidate;
  }
  int32_t token() const { return id == INT32_MAX ? 0 : id; }
};

inline void head_finish(const HeadBest* best, int64_t parts, int64_t rows, int32_t* tokens) {
  for (int64_t r = 0; r < rows; ++r) {
    Winner winner;
    for (int64_t part = 0; part < parts; ++part)
      for (int lane = 0; lane < 16; ++lane) {
        const HeadBest& b = best[part * rows + r];
        winner.offer(b.value[lane], b.id[lane]);
      }
    tokens[r] = winner.token();
  }
}

// Temperature, then top-k, then top-p in the order of transformers' warpers; ties by token id; sums in double, in
// sorted order.
inline int32_t filtered_sample(const Sampler& s, float* logits, int32_t* order, int64_t vocab) {
  for (int64_t i = 0; i < vocab; i += 16)
    store_up_to(logits + i, div(load_up_to(logits + i, vocab - i), set1(s.temperature)), vocab - i);
  // NaN counts as the largest, then infinity, as without filters: what is below needs an order and a finite largest.
  for (int64_t i = 0; i < vocab; ++i)
    if (logits[i] != logits[i]) return static_cast<int32_t>(i);
  for (int64_t i = 0; i < vocab; ++i)
    if (logits[i] == __builtin_inff()) return static_cast<int32_t>(i);
  int64_t kept = vocab;
  for (int64_t i = 0; i < vocab; ++i) order[i] = static_cast<int32_t>(i);
  const auto before = [logits](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  if (s.top_k > 0 && s.top_k < vocab) {
    std::nth_element(order, order + s.top_k - 1, order + vocab, before);
    const float smallest = logits[order[s.top_k - 1]];
    kept = std::partition(order, order + vocab, [=](int32_t i) { return logits[i] >= smallest; }) - order;
  }
  if (s.top_p < 1.0f) {
    const float largest = logits[*std::min_element(order, order + kept, before)];
    const auto mass = [&](int64_t first, int64_t count) {  // exp(z - largest) of up to 16 tokens, as doubles in order
      float z[16];
      for (int64_t i = 0; i < 16; ++i) z[i] = i < count ? logits[order[first + i]] - largest : -__builtin_inff();
      store(z, exp(load(z)));
      double sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += z[i];
      return sum;
    };
    std::sort(order, order + kept);  // the total is summed in id order
    double total = 0;
    for (int64_t i = 0; i < kept; i += 16) total += mass(i, std::min<int64_t>(16, kept - i));
    const double wanted = static_cast<double>(s.top_p) * total;
    double sum = 0;
    int64_t nucleus = 0, sorted = 0;
    while (nucleus < kept && sum < wanted) {
      if (nucleus == sorted) {  // sort the next stretch only when it is needed
        const int64_t next = std::min(kept, sorted == 0 ? 64 : 8 * sorted);
        if (next < kept) std::nth_element(order + sorted, order + next, order + kept, before);
        std::sort(order + sorted, order + next, before);
        sorted = next;
      }
      sum += mass(nucleus++, 1);
    }
    kept = std::max<int64_t>(nucleus, 1);
  }
  const NoiseKey key = noise_key(s.seed, s.position);
  Winner winner;
  for (int64_t i = 0; i < kept; i += 16) {
    float z[16];
    int32_t id[16];
    for (int64_t j = 0; j < 16; ++j) {
      id[j] = order[std::min(i + j, kept - 1)];  // repeats of the last token change nothing
      z[j] = logits[id[j]];
    }
    store(z, add(load(z), gumbel(key, iload(id))));
    for (int j = 0; j < 16; ++j) winner.offer(z[j], id[j]);
  }
  return winner.token();
}

}  // namespace JACOBI_ISA
