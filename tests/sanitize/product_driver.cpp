// linear, column and head of kernel tables against one plain loop, in all weight formats, with 1 to 130 rows and arrays
// of exactly their size:  product_driver TABLE ...  prints {"products": n} for each.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <vector>

#include "random.h"
#include "tables.h"

namespace jacobi::cpu {
namespace {

constexpr int kMostRows = 130;

template <class T>
std::vector<T> copy(const T* from, int64_t count) {
  return std::vector<T>(from, from + count);
}

void expect(bool holds, const char* what, int type, int64_t rows, int64_t n, int64_t k) {
  if (!holds)
    throw std::runtime_error(std::string(what) + " differs: type " + std::to_string(type) + ", rows " +
                             std::to_string(rows) + ", n " + std::to_string(n) + ", k " + std::to_string(k));
}

// A finite float16 of size 2^-15 to 2^-7, or zero, and its value.
uint16_t random_half(Random& random) {
  if (random.chance(0.1)) return 0;
  return static_cast<uint16_t>(random.within(0, 1) << 15 | random.within(1, 8) << 10 | random.within(0, 1023));
}
float value_of_half(uint16_t h) {
  const int exponent = h >> 10 & 31;
  return exponent == 0 ? 0.0f
                       : std::ldexp(static_cast<float>((h & 1023) | 1024) * (h >> 15 ? -1.0f : 1.0f), exponent - 25);
}

// A packed matrix [n, k] of random values, and the values in rows.
struct Packed {
  std::vector<char> bytes;
  std::vector<float> values;
};

Packed random_matrix(Random& random, WeightType type, int64_t n, int64_t k) {
  Packed w{std::vector<char>(packed_bytes(type, n, k)), std::vector<float>(n * k)};
  const int64_t groups = (k + kGroup - 1) / kGroup;
  for (int64_t row = 0; row < n; ++row) {
    const int64_t panel = row / kPanel, lane = row % kPanel;
    for (int64_t i = 0; i < k; ++i) {
      float& value = w.values[row * k + i];
      if (type == WeightType::f32) {
        value = random.normal();
        reinterpret_cast<float*>(w.bytes.data())[(panel * k + i) * kPanel + lane] = value;
      } else if (type == WeightType::bf16) {
        const uint32_t upper = std::bit_cast<uint32_t>(random.normal()) >> 16;
        value = std::bit_cast<float>(upper << 16);
        reinterpret_cast<uint16_t*>(w.bytes.data())[(panel * k + i) * kPanel + lane] = static_cast<uint16_t>(upper);
      } else if (type == WeightType::int8) {
        Int8Group& group = reinterpret_cast<Int8Group*>(w.bytes.data())[panel * groups + i / kGroup];
        if (i % kGroup == 0) group.scale[lane] = random_half(random);
        group.q[i % kGroup][lane] = static_cast<int8_t>(random.within(-128, 127));
        value = value_of_half(group.scale[lane]) * group.q[i % kGroup][lane];
      } else {
        Int4Group& group = reinterpret_cast<Int4Group*>(w.bytes.data())[panel * groups + i / kGroup];
        if (i % kGroup == 0) group.scale[lane] = random_half(random), group.min[lane] = random_half(random);
        const int q = random.within(0, 15);
        uint8_t& pair = group.q[i % kGroup / 2][lane];
        pair = static_cast<uint8_t>(i % 2 == 0 ? q : pair | q << 4);
        value = std::fmaf(value_of_half(group.scale[lane]), static_cast<float>(q), value_of_half(group.min[lane]));
      }
    }
  }
  return w;
}

// One matrix with 1 to 14 rows and every row_step-th number behind; returns the number of products.
int check_matrix(Random& random, WeightType type, int64_t n, int64_t k, int64_t row_step) {
  const int t = static_cast<int>(type);
  const Packed w = random_matrix(random, type, n, k);
  std::vector<float> x(kMostRows * k), bias(n), before(kMostRows * n), y(kMostRows * n);
  for (auto* values : {&x, &bias, &before})
    for (float& v : *values) v = random.normal();
  for (int64_t r = 0; r < kMostRows; ++r)
    for (int64_t c = 0; c < n; ++c) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum = std::fmaf(x[r * k + i], w.values[c * k + i], sum);
      y[r * n + c] = sum + bias[c];
    }

  for (int64_t c = 0; c < n; ++c) {
    std::vector<float> column(k);
    kernels().column(w.bytes.data(), type, k, c, column.data());
    expect(std::memcmp(column.data(), &w.values[c * k], k * sizeof(float)) == 0, "column", t, 1, n, k);
  }

  int products = 0;
  const int64_t panels = (n + kPanel - 1) / kPanel;
  for (int64_t rows = 1; rows <= kMostRows; rows += rows < 14 ? 1 : row_step, ++products) {
    const std::vector<float> inputs = copy(x.data(), rows * k);
    const int64_t cut = random.within(0, static_cast<int32_t>(panels));
    const auto parts = [&](const std::function<void(int64_t, int64_t)>& f) { f(0, cut), f(cut, panels); };

    std::vector<float> out = copy(before.data(), rows * n);
    LinearArgs args{inputs.data(), k,          rows,       k, n,   w.bytes.data(), type, bias.data(),
                    DType::f32,    out.data(), DType::f32, n, true};
    parts([&](int64_t begin, int64_t end) { kernels().linear(args, begin, end); });
    for (int64_t i = 0; i < rows * n; ++i) expect(out[i] == before[i] + y[i], "linear", t, rows, n, k);

    std::vector<uint16_t> narrow(rows * n), narrowed(rows * n);
    args.y = narrow.data(), args.y_type = DType::bf16, args.accumulate = false;
    parts([&](int64_t begin, int64_t end) { kernels().linear(args, begin, end); });
    kernels().narrow(y.data(), narrowed.data(), DType::bf16, rows * n);
    expect(narrow == narrowed, "linear to bfloat16", t, rows, n, k);

    const std::vector<Sampler> greedy(rows);
    const HeadArgs head{inputs.data(), rows,       k,    n,    w.bytes.data(), type,
                        bias.data(),   DType::f32, 1.0f, 0.0f, greedy.data()};
    std::vector<HeadBest> best(2 * rows);
    head_init(best.data(), 2 * rows);
    kernels().head(head, best.data(), 0, cut);
    kernels().head(head, best.data() + rows, cut, panels);
    std::vector<int32_t> tokens(rows);
    kernels().head_finish(best.data(), 2, rows, tokens.data());
    for (int64_t r = 0; r < rows; ++r) {
      int32_t largest = 0;
      for (int32_t c = 1; c < n; ++c)
        if (y[r * n + c] > y[r * n + largest]) largest = c;
      expect(tokens[r] == largest, "head", t, rows, n, k);
    }
  }
  return products;
}

int check_table(const char* table) {
  choose_table(table);
  Random random(1);
  int products = 0;
  for (const WeightType type : {WeightType::f32, WeightType::bf16, WeightType::int8, WeightType::int4}) {
    products += check_matrix(random, type, 1, 1, 1);
    products += check_matrix(random, type, 9, 33, 1);
    products += check_matrix(random, type, 37, 70, 29);
    products += check_matrix(random, type, 133, 40, 58);  // as many panels as one row has in a tile, and one
    products += check_matrix(random, type, 21, 290, 58);  // several blocks of k
  }
  return products;
}

}  // namespace
}  // namespace jacobi::cpu

int main(int argc, char** argv) {
  try {
    for (int i = 1; i < argc; ++i) printf("{\"products\": %d}\n", jacobi::cpu::check_table(argv[i]));
  } catch (const std::exception& error) {
    fprintf(stderr, "product_driver: %s\n", error.what());
    return 1;
  }
  return 0;
}
