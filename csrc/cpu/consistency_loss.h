// Cross-entropy and soft cross-entropy of rows of a language-model head, and their gradients, one vocabulary tile at a
// time: the logits of kLossTile = 256 tokens exist at once, for all rows that need any.
//
//   z[r][v] = softcap(scale * (h[r] . w[v] + bias[v])),   T the temperature,   t the teacher of r
//   nll[r] = lse(z[r]) - z[r][target],   consistency[r] = lse(z[r] / T) - sum over v of softmax(z[t] / T)[v] z[r][v] /
//   T dz[r][v] = grad_nll[r] (softmax(z[r])[v] - [v = target])
//            + grad_consistency[r] / T (softmax(z[r] / T)[v] - softmax(z[t] / T)[v])
//   du = dz (1 - (z / softcap)^2) scale,   dh[r] = sum over v of du[r][v] w[v],   dw[v] = sum over r of du[r][v] h[r]
//
// Forward, one pass: sums are kept relative to the largest logit so far and shrink when it grows, per row (as in online
// softmax) and, for the soft term, per teacher. A teacher's exponentials are computed once per tile for all its
// students. Backward: logits and softmax again, then the two products.
//
// Every function below does one phase of a tile on a range of independent items; consistency_run.h puts them in order.
// Reduction order: h . w in one chain over the width; sums over the vocabulary per tile, lane l taking columns l, l +
// 16, ..., tiles ascending; dh: one chain per tile, tiles ascending; dw: one chain per kLossReduction = 512 rows in the
// order of the plan, ascending. So a row's results depend on itself and its teacher, and nothing depends on threads.
// Bytes: lm_head once per pass, hidden (from the cache) once per two panels. Operations: 2 * rows * vocab * width per
// product, one forward, three backward; one exp per logit, two where a row has a target and a temperature.
#pragma once

#include "cpu/consistency_args.h"

namespace JACOBI_ISA {

// Writes the accumulators of gemm.h to y, or adds them to it.
struct StoreSink {
  float* y;
  int64_t stride;
  bool onto;
  void operator()(int64_t row, int64_t panel, vec sum) const {
    float* p = y + row * stride + 16 * panel;
    store(p, onto ? add(load(p), sum) : sum);
  }
};

inline float first_lane(vec x) {
  float lanes[16];
  store(lanes, x);
  return lanes[0];
}

inline float largest_lane(vec x) {
  float lanes[16];
  store(lanes, x);
  float largest = lanes[0];
  for (int i = 1; i < 16; ++i)
    if (lanes[i] > largest) largest = lanes[i];
  return largest;
}

inline float log_of_sum(float sum) { return sum == 0.0f ? -__builtin_inff() : first_lane(log(set1(sum))); }

// Hidden states of planned rows as floats; also in panels for the product that gives the gradient of lm_head.
inline void loss_gather(const ConsistencyArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const char* from = static_cast<const char*>(a.hidden) + a.rows[i] * a.width * size_of(a.hidden_type);
    float* x = a.x + i * a.x_stride;
    widen(from, a.hidden_type, x, a.width);
    if (a.x_panels == nullptr || i >= a.losses) continue;
    const int64_t first = i / kLossReduction * kLossReduction;
    const int64_t count = a.losses - first < kLossReduction ? a.losses - first : kLossReduction;
    float* to = a.x_panels + first * a.width_up + 16 * (i - first);
    for (int64_t e = 0; e < a.width; e += 16) store(to + e * count, load_up_to(x + e, a.width - e));
  }
}

// Panels [begin, end) of 16 tokens of the tile at `column`, zero behind the vocabulary.
template <class W>
void loss_pack_as(const ConsistencyArgs& a, int64_t column, int64_t begin, int64_t end) {
  const W* w = static_cast<const W*>(a.lm_head) + column * a.width;
  const int64_t columns = a.columns(column);
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t e = 0; e < a.width; e += 16) {
      vec block[16];
      for (int j = 0; j < 16; ++j) {
        const int64_t v = 16 * panel + j;
        block[j] = v < columns ? load_up_to(w + v * a.width + e, a.width - e) : zero();
        if (a.w_rows != nullptr && v < columns) store(a.w_rows + e * columns + 16 * v, block[j]);
      }
      transpose(block);
      float* to = a.w_columns + 16 * (panel * a.width + e);
      for (int j = 0; j < 16 && e + j < a.width; ++j) store(to + 16 * j, block[j]);
    }
}

inline void loss_pack(const ConsistencyArgs& a, int64_t column, int64_t begin, int64_t end) {
  a.head_type == DType::f32 ? loss_pack_as<float>(a, column, begin, end)
                            : loss_pack_as<uint16_t>(a, column, begin, end);
}

// Sixteen final logits of a row; -inf behind the vocabulary.
inline vec loss_logit(const ConsistencyArgs& a, const float* product, int64_t column) {
  const int64_t left = a.vocab - column;
  vec z = load(product);
  if (a.bias != nullptr) z = add(z, load_bias(a.bias, a.bias_type, column, left));
  z = transform_logit(z, a.scale, a.softcap);
  if (left >= 16) return z;
  return select(negative(add(iset1(static_cast<int32_t>(left - 1)), mul(iota(), iset1(-1)))), set1(-__builtin_inff()),
                z);
}

// Adds sum over the tile of exp((z - top) inverse_temperature) to lanes that shrink by `decay`; keeps the terms.
inline void add_exponentials(const float* z, int64_t columns, float top, float inverse_temperature, float decay,
                             float* lanes, float* keep) {
  vec sum = zero();
  for (int64_t j = 0; j < columns; j += 16) {
    const vec e = exp(mul(sub(load(z + j), set1(top)), set1(inverse_temperature)));
    if (keep != nullptr) store(keep + j, e);
    sum = add(sum, e);
  }
  store(lanes, fma(load(lanes), set1(decay), sum));
}

// Takes the tile into one row's running sums.
inline void loss_accumulate(const ConsistencyArgs& a, int64_t column, int64_t i) {
  float* z = a.logits + i * kLossStride;
  const int64_t columns = a.columns(column);
  vec largest = set1(a.top[i]);
  for (int64_t j = 0; j < columns; j += 16) {
    const vec logit = loss_logit(a, z + j, column + j);
    store(z + j, logit);
    largest = max(logit, largest);
  }
  const int64_t target = a.targets[i] - column;
  if (target >= 0 && target < columns) a.target_logit[i] = z[target];
  const float before = a.top[i];
  a.top[i] = largest_lane(largest);
  const float top = a.top[i] == -__builtin_inff() ? 0.0f : a.top[i];
  const auto decay = [=](float inverse) {
    return before == -__builtin_inff() ? 0.0f : first_lane(exp(set1((before - top) * inverse)));
  };
  if (a.needs_plain(i)) add_exponentials(z, columns, top, 1.0f, decay(1.0f), a.plain + 16 * i, nullptr);
  if (!a.needs_tempered(i)) return;
  a.decay[i] = decay(a.inverse_temperature);
  add_exponentials(z, columns, top, a.inverse_temperature, a.decay[i], a.tempered + 16 * i,
                   a.teaches[i] != 0 ? a.weights + i * kLossTile : nullptr);
}

// One row's softmax of the tile at the temperature.
inline void loss_softmax(const ConsistencyArgs& a, int64_t column, int64_t i) {
  float* z = a.logits + i * kLossStride;
  const int64_t columns = a.columns(column);
  const bool tempered = a.needs_tempered(i);
  const float lse = a.tempered_lse[a.rows[i]];
  for (int64_t j = 0; j < columns; j += 16) {
    const vec logit = loss_logit(a, z + j, column + j);
    store(z + j, logit);
    if (tempered) store(a.weights + i * kLossTile + j, exp(sub(mul(logit, set1(a.inverse_temperature)), set1(lse))));
  }
}

// Logits of the tile for planned rows [begin, end), then the row's part of the forward or of the backward.
inline void loss_logits(const ConsistencyArgs& a, int64_t column, int64_t begin, int64_t end) {
  const int64_t panels = (a.columns(column) + 15) / 16;
  for (int64_t first = begin; first < end; first += kLossRowBlock) {
    const int64_t count = end - first < kLossRowBlock ? end - first : kLossRowBlock;
    StoreSink sink{a.logits + first * kLossStride, kLossStride, false};
    gemm(a.x + first * a.x_stride, a.x_stride, count, a.w_columns, a.width, 0, panels, sink);
    for (int64_t i = first; i < first + count; ++i)
      a.grad_nll == nullptr ? loss_accumulate(a, column, i) : loss_softmax(a, column, i);
  }
}

// The soft term's sums of rows [begin, end) with a loss.
inline void loss_soft(const ConsistencyArgs& a, int64_t column, int64_t begin, int64_t end) {
  const int64_t columns = a.columns(column);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t t = a.teachers[i];
    if (t < 0) continue;
    const float *z = a.logits + i * kLossStride, *weights = a.weights + t * kLossTile;
    vec sum = zero();
    for (int64_t j = 0; j < columns; j += 16)  // zeros behind the vocabulary, where both hold no number to multiply
      sum = fma(load_up_to(weights + j, columns - j), load_up_to(z + j, columns - j), sum);
    store(a.soft + 16 * i, fma(load(a.soft + 16 * i), set1(a.decay[t]), sum));
  }
}

// Losses and log-sum-exps of planned rows [begin, end), once every tile is in the sums.
inline void loss_finish(const ConsistencyArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t r = a.rows[i], t = a.teachers[i];
    const float tempered = a.needs_tempered(i)
                               ? a.top[i] * a.inverse_temperature + log_of_sum(reduce_add(load(a.tempered + 16 * i)))
                               : 0.0f;
    const float plain = a.needs_plain(i) ? a.top[i] + log_of_sum(reduce_add(load(a.plain + 16 * i))) : tempered;
    a.lse[r] = plain;
    a.tempered_lse[r] = tempered;
    if (a.targets[i] >= 0) a.nll[r] = plain - a.target_logit[i];
    if (t >= 0)
      a.consistency[r] = tempered - a.inverse_temperature *
                                        (reduce_add(load(a.soft + 16 * i)) / reduce_add(load(a.tempered + 16 * t)));
  }
}

// Gradient of the product h . w of one row, over its logits.
inline vec loss_gradient_of(const ConsistencyArgs& a, int64_t column, int64_t j, int64_t i) {
  const int64_t r = a.rows[i], t = a.teachers[i], target = a.targets[i] - (column + j);
  const vec z = load(a.logits + i * kLossStride + j);
  const float* weights = a.weights + i * kLossTile + j;
  vec g = zero();
  if (t >= 0)
    g = mul(set1(a.grad_consistency[r] * a.inverse_temperature),
            sub(load(weights), load(a.weights + t * kLossTile + j)));
  if (a.targets[i] >= 0) {
    vec p = a.unit_temperature() ? load(weights) : exp(sub(z, set1(a.lse[r])));
    if (target >= 0 && target < 16) {
      float lanes[16];
      store(lanes, p);
      lanes[target] -= 1.0f;
      p = load(lanes);
    }
    g = fma(set1(a.grad_nll[r]), p, g);
  }
  if (a.softcap > 0.0f) {
    const vec share = mul(z, set1(1.0f / a.softcap));
    g = mul(g, sub(set1(1.0f), mul(share, share)));
  }
  return a.scale == 1.0f ? g : mul(g, set1(a.scale));
}

// Gradients of the product for rows [begin, end) with a loss, begin a multiple of 16, and what they add to d_hidden.
inline void loss_gradient(const ConsistencyArgs& a, int64_t column, int64_t begin, int64_t end) {
  const int64_t columns = a.columns(column);
  for (int64_t first = begin; first < end; first += kLossRowBlock) {
    const int64_t last = end - first < kLossRowBlock ? end : first + kLossRowBlock;
    for (int64_t group = first; group < last; group += 16)
      for (int64_t j = 0; j < columns; j += 16) {
        vec block[16];
        for (int64_t i = group; i < group + 16; ++i) {
          vec& g = block[i - group];
          g = i < last ? loss_gradient_of(a, column, j, i) : zero();
          if (i < last) store(a.logits + i * kLossStride + j, g);
        }
        if (a.transposed == nullptr) continue;
        transpose(block);
        for (int64_t c = 0; c < 16 && j + c < columns; ++c)
          store(a.transposed + (j + c) * a.transposed_stride + group, block[c]);
      }
    if (a.dx == nullptr) continue;
    StoreSink sink{a.dx + first * a.width_up, a.width_up, column > 0};
    gemm(a.logits + first * kLossStride, kLossStride, last - first, a.w_rows, columns, 0, a.width_up / 16, sink);
  }
}

// Tokens column + [begin, end): their rows of d_lm_head, their d_bias.
inline void loss_weight(const ConsistencyArgs& a, int64_t column, int64_t begin, int64_t end) {
  const float* g = a.transposed + begin * a.transposed_stride;
  if (a.d_lm_head != nullptr) {
    for (int64_t first = 0; first < a.losses; first += kLossReduction) {
      const int64_t count = a.losses - first < kLossReduction ? a.losses - first : kLossReduction;
      StoreSink sink{a.dw + begin * a.width_up, a.width_up, first > 0};
      gemm(g + first, a.transposed_stride, end - begin, a.x_panels + first * a.width_up, count, 0, a.width_up / 16,
           sink);
    }
    char* to = static_cast<char*>(a.d_lm_head) + (column + begin) * a.width * size_of(a.head_type);
    for (int64_t v = begin; v < end; ++v, to += a.width * size_of(a.head_type))
      narrow(a.dw + v * a.width_up, to, a.head_type, a.width);
  }
  if (a.d_bias == nullptr) return;
  for (int64_t v = begin; v < end; ++v, g += a.transposed_stride) {
    vec sum = zero();
    for (int64_t i = 0; i < a.losses; i += 16) sum = add(sum, load(g + i));
    const float total[16] = {reduce_add(sum)};
    narrow(total, static_cast<char*>(a.d_bias) + (column + v) * size_of(a.bias_type), a.bias_type, 1);
  }
}

// d_hidden of rows [begin, end) with a loss, once every tile has been added.
inline void loss_scatter(const ConsistencyArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i)
    narrow(a.dx + i * a.width_up, static_cast<char*>(a.d_hidden) + a.rows[i] * a.width * size_of(a.hidden_type),
           a.hidden_type, a.width);
}

inline void consistency(const ConsistencyArgs& a, ConsistencyPhase phase, int64_t column, int64_t begin, int64_t end) {
  switch (phase) {
    case ConsistencyPhase::gather:
      return loss_gather(a, begin, end);
    case ConsistencyPhase::pack:
      return loss_pack(a, column, begin, end);
    case ConsistencyPhase::logits:
      return loss_logits(a, column, begin, end);
    case ConsistencyPhase::soft:
      return loss_soft(a, column, begin, end);
    case ConsistencyPhase::finish:
      return loss_finish(a, begin, end);
    case ConsistencyPhase::gradient:
      return loss_gradient(a, column, begin, end);
    case ConsistencyPhase::weight:
      return loss_weight(a, column, begin, end);
    case ConsistencyPhase::scatter:
      return loss_scatter(a, begin, end);
  }
}

}  // namespace JACOBI_ISA
