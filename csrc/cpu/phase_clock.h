// Seconds that multi_block_step spent in each of its phases since they were last read: about ten clock reads a layer.
#pragma once
#include <stdint.h>
#include <time.h>

namespace jacobi::cpu {

enum Phase : int32_t { kLinear, kNormRope, kAttention, kVerify, kCommit, kRedraft, kPhases };

// Kept by one thread of a team. Steps at the same time mix their times, nothing else.
inline double phase_seconds[kPhases];

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Adds the time since construction, or since the last call, to a phase.
class PhaseClock {
 public:
  explicit PhaseClock(bool keep = true) : keep_(keep) {}

  void charge(Phase phase) {
    if (!keep_) return;
    const double time = now();
    phase_seconds[phase] += time - last_;
    last_ = time;
  }

 private:
  bool keep_;
  double last_ = now();
};

}  // namespace jacobi::cpu
