// Random numbers for the drivers.
#pragma once

#include <cstdint>
#include <random>

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  // Within low .. high, both included.
  int32_t within(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(engine_); }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine_) < p; }
  float normal() { return std::normal_distribution<float>()(engine_); }
  // What an int32 field might hold by mistake.
  int32_t anything() {
    switch (within(0, 5)) {
      case 0:
        return INT32_MIN;
      case 1:
        return INT32_MAX;
      case 2:
        return within(INT32_MIN, INT32_MAX);
      case 3:
        return -1;
      default:
        return within(0, 40);
    }
  }

 private:
  std::mt19937 engine_;
};
