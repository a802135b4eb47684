// Noise for exact sampling: a counter-based generator keyed by (seed of the request, position of the token, token id).
// The same token at the same place draws the same noise in AR and Jacobi decoding, in any batch, on any device.
// The sample is argmax over ids of logit / temperature + gumbel; gumbel = -log(-log(1 - v)), v = (hash + 1/2) / 2^32.
#pragma once
#include <stdint.h>

#include "common/hd.h"

namespace jacobi {

struct NoiseKey {
  uint32_t low, high;
};

constexpr uint32_t kHashId = 0x9E3779B9u;
constexpr uint32_t kHashMultiplier1 = 0x7FEB352Du;
constexpr uint32_t kHashMultiplier2 = 0x846CA68Bu;

JACOBI_HD inline uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

JACOBI_HD inline NoiseKey noise_key(uint64_t seed, int32_t position) {
  const uint64_t key = splitmix64(splitmix64(seed) ^ static_cast<uint64_t>(static_cast<uint32_t>(position)));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

JACOBI_HD inline uint32_t noise_hash(NoiseKey key, uint32_t id) {
  uint32_t h = id * kHashId + key.low;
  for (int round = 0; round < 2; ++round) {
    h = (h ^ (h >> 16)) * kHashMultiplier1;
    h = (h ^ (h >> 15)) * kHashMultiplier2;
    h ^= h >> 16;
    if (round == 0) h ^= key.high;
  }
  return h;
}

}  // namespace jacobi
