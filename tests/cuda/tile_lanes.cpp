// Runs the lanes of a warp as 32 threads, with ldmatrix and mma.sync as PTX defines them, and compares the tile of the
// GPU (device_tile.cuh) with that of the host (operand.h), bit for bit. Prints what differs; 0 when nothing does.
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cuda/operand.h"

#define __device__

namespace jacobi::cuda {

thread_local int current_lane;
std::barrier meeting(32);
const bfloat16* posted_row[32];
uint32_t posted_a[32][4], posted_b[32][2];

inline int lane_index() { return current_lane; }

// Matrix i's row r comes from lane 8 i + r; lane 4 g + t gets (g, 2t) and (g, 2t + 1), or (2t, g) and (2t + 1, g).
template <bool kTransposed>
void load_matrices(uint32_t (&r)[4], const bfloat16* row) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) std::puts("unaligned row"), std::exit(1);
  posted_row[lane] = row;
  meeting.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int m, int k) { return uint32_t{posted_row[8 * i + m][k].bits}; };
    r[i] = kTransposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
  }
  meeting.arrive_and_wait();
}

inline float half(uint32_t two, int high) { return widen(bfloat16{static_cast<uint16_t>(two >> 16 * high)}); }

// m16n8k16: a = (g, k), (g + 8, k), (g, k + 8), (g + 8, k + 8) and b = (k, g), (k + 8, g) at k = 2t, 2t + 1.
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) posted_a[lane][i] = a[i];
  posted_b[lane][0] = b0, posted_b[lane][1] = b1;
  meeting.arrive_and_wait();
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 16; ++k) {
      const float x = half(posted_a[4 * g + k % 8 / 2][(k >= 8 ? 2 : 0) + j / 2], k % 2);
      const float y = half(posted_b[4 * (2 * t + j % 2) + k % 8 / 2][k >= 8], k % 2);
      c[j] = fmaf(x, y, c[j]);
    }
  meeting.arrive_and_wait();
}

}  // namespace jacobi::cuda

#include "cuda/device_tile.cuh"

using namespace jacobi::cuda;

int differing = 0;

// A tile of M operands at make_a(i), twice over K, then scaled.
template <class T, int M, int K, class A>
void compare(const char* what, const A (&a)[M], const Rows<T>& b, int units) {
  static HostTile<M, 4> host;
  static DeviceTile<M, 4> device[32];
  float factor[32];
  for (int n = 0; n < 32; ++n) factor[n] = 1.0f + 0.25f * static_cast<float>(n % 7);
  host.clear();
  for (int pass = 0; pass < 2; ++pass) host.template multiply<K>(a, b, units), host.scale(factor);
  std::vector<std::thread> lanes;
  float got[M][16][32];
  for (int lane = 0; lane < 32; ++lane)
    lanes.emplace_back([&, lane] {
      current_lane = lane;
      device[lane].clear();
      for (int pass = 0; pass < 2; ++pass) device[lane].template multiply<K>(a, b, units), device[lane].scale(factor);
      device[lane].each([&](int i, int m, int n, float value) { got[i][m][n] = value; });
    });
  for (auto& lane : lanes) lane.join();
  int wrong = 0;
  host.each([&](int i, int m, int n, float value) { wrong += n < 8 * units && !(got[i][m][n] == value); });
  if (wrong > 0) std::printf("%s, %d units: %d elements differ\n", what, units, wrong);
  differing += wrong;
}

template <class T>
void compare_all() {
  constexpr int kK = 64, kPitch = pitch_of<T>(kK), kWide = pitch_of<T>(32);
  alignas(16) static T panels[2 * kK * 16], rows[64 * kPitch], columns[kK * kWide];
  uint32_t seed = 1;
  const auto fill = [&seed](T* to, int count) {
    for (int i = 0; i < count; ++i) {
      seed = seed * 1664525u + 1013904223u;
      to[i] = narrow<T>(static_cast<float>(seed >> 16) / 65536.0f - 0.5f);
    }
  };
  fill(panels, 2 * kK * 16), fill(rows, 64 * kPitch), fill(columns, kK * kWide);
  const Rows<T> b{rows + 32 * kPitch, kPitch};
  const Panel<T> both[2] = {{panels}, {panels + kK * 16}};
  const Rows<T> keys[1] = {{rows + 16 * kPitch, kPitch}};
  const Columns<T> values[1] = {{columns + 16, kWide}};
  for (const int units : {1, 2, 3, 4}) {
    compare<T, 2, kK>("panels", both, b, units);
    compare<T, 1, 16>("keys", keys, b, units);
    compare<T, 1, kK>("values", values, b, units);
  }
}

int main() {
  compare_all<bfloat16>();
  compare_all<float>();
  std::printf("%d\n", differing);
  return differing != 0;
}
