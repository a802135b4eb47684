// The head: product with lm_head (product.h) whose logits live in registers only, then the best token of each row.
//
//   logit = softcap(scale * (x . w + bias));   greedy: argmax logit;   sampling: argmax logit / temperature + gumbel
//
// Value and token are one integer that orders as they do: NaN over all, then by value, then the lowest token. Its
// maximum, in shared memory and then over blocks by an integer atomic, does not depend on who finds it first. Noise is
// common/sampling.h's; a logit that loses even with the largest noise draws none. top-k and top-p are not done here.
// Bytes: the head's weights once per 64 rows. Operations: 2 rows vocab k, and about 60 per noise value drawn.
#pragma once

#include "cuda/math.h"
#include "cuda/product.h"

namespace jacobi::cuda {

JACOBI_GRID uint32_t order_of(float value) {
  if (value != value) return 0xFFFFFFFFu;
  const uint32_t b = bits_of(value + 0.0f);  // -0 and 0 are equal
  return b >> 31 != 0 ? ~b : b | 0x80000000u;
}
JACOBI_GRID uint64_t ranked(float value, int32_t token) {
  return static_cast<uint64_t>(order_of(value)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(token));
}
JACOBI_GRID int32_t token_of(uint64_t ranked) {
  return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(ranked & 0xFFFFFFFFu));
}

JACOBI_GRID float transform_logit(const Program& p, float logit) {
  if (p.logit_scale != 1.0f) logit *= p.logit_scale;
  if (p.logit_softcap > 0.0f) logit = tanh_of(logit / p.logit_softcap) * p.logit_softcap;
  return logit;
}

// Offers a logit of a live row to the best so far.
template <class Block>
JACOBI_GRID void offer(const Program& p, int32_t row, int32_t token, float logit, uint64_t* best) {
  const int32_t b = p.work.sequence[row];
  const float temperature = p.args.temperature == nullptr ? 0.0f : p.args.temperature[b];
  if (temperature > 0.0f) {
    logit /= temperature;
    if (ranked(logit + kLargestGumbel, 0) < *best) return;
    const uint64_t seed = p.args.seeds == nullptr ? 0 : static_cast<uint64_t>(p.args.seeds[b]);
    logit += gumbel(noise_key(seed, p.work.position[row] + 1), static_cast<uint32_t>(token));
  }
  const uint64_t mine = ranked(logit, token);
  if (mine > *best) Block::maximise(best, mine);
}

template <class T, class Block>
JACOBI_PHASE void head(Block& block, const Program& p) {
  const Workspace& w = p.work;
  const int32_t rows = w.header[kWantedRows];
  uint64_t* const best = reinterpret_cast<uint64_t*>(block.shared + kProductShared<T>);
  block.threads([&](int thread) {
    for (int32_t r = thread; r < rows; r += kThreads) best[r] = 0;
  });
  const ProductShape shape{w.operand, p.hidden_pitch, rows, p.lm_head, p.hidden, p.vocab, 1, 0};
  product<T>(block, shape, [&](const auto& tile, int32_t, int32_t left, int32_t right, int32_t row) {
    tile.each([&](int i, int m, int n, float logit) {
      const int32_t token = (i == 0 ? left : right) + m;
      if ((i == 1 && right < 0) || token >= p.vocab || row + n >= rows) return;
      if (p.lm_head_bias != nullptr) logit += p.lm_head_bias[token];
      offer<Block>(p, w.wanted[row + n], token, transform_logit(p, logit), best + row + n);
    });
  });
  block.barrier();
  block.threads([&](int thread) {
    for (int32_t r = thread; r < rows; r += kThreads)
      if (best[r] != 0) Block::maximise(w.best + r, best[r]);
  });
}

}  // namespace jacobi::cuda
