// Acceptance, commit and redraft on random states, and on states with values that no step wrote, in arrays of exactly
// their size:  rules_driver ROUNDS  prints {"steps": n, "refused": n, "taken": n, "layouts": n, "moved": n}.
//
// What a check lets through must not reach outside an array; which state is refused with which words, and that redraft
// is right, is tested elsewhere.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/redraft_check.h"
#include "cpu/commit.h"
#include "random.h"

namespace jacobi {
namespace {

struct Counts {
  int64_t steps = 0;    // of states that steps wrote
  int64_t refused = 0;  // states with wrong values that a check refused
  int64_t taken = 0;    // and that none refused
  int64_t layouts = 0;  // acceptances on random trees
  int64_t moved = 0;    // cache rows
};

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

// The second sequence of a batch of two, whose first has some rows and one empty segment.
struct State {
  int32_t block_size, blocks, candidates, pool_rows, pool_width;
  double spawn_ratio;
  std::vector<int32_t> cu_rows, cu_segments, tokens, text, pool, columns, stops, predictions, accepted_rows;
  std::vector<Segment> segments;
  std::vector<int32_t> cached;
  int32_t num_accepted = 0;
  bool fixed_point = false;

  explicit State(Random& random)
      : block_size(random.within(1, 6)),
        blocks(random.within(1, 4)),
        candidates(random.within(0, 4)),
        pool_rows(random.within(0, 5)),
        pool_width(random.within(0, 20)),
        spawn_ratio(random.within(0, 10) / 10.0),
        cached(1) {
    const int32_t before = random.within(0, 3), slack = random.within(0, 3);
    const int32_t rows = before + blocks * block_size + slack + candidates * (block_size - 1);
    const int32_t prompt = random.within(1, 40), more = random.within(0, 60);
    cu_rows = {0, before, rows};
    cu_segments = {0, 1, 2 + candidates};
    tokens.resize(rows), predictions.resize(rows), accepted_rows.resize(rows);
    text.resize(prompt + more + random.within(0, 2));
    for (int32_t& token : text) token = random.within(0, 3);
    pool.resize(pool_rows * (1 + pool_width));
    stops.resize(random.within(0, 2));
    for (int32_t& token : stops) token = random.chance(0.5) ? -1 : 3;
    columns.resize(kStateColumns);
    columns[kTextLen] = columns[kPromptLen] = prompt;
    columns[kMaxLen] = prompt + more;
    columns[kNumFinal] = columns[kActive] = 1;
    columns[kPoolStart] = random.chance(0.5) ? prompt : 0;
    segments.resize(2 + candidates);
    segments[0] = {0, 0, -1, 0};
    segments[1] = {before, 0, -1, 0};
    for (int32_t c = 0; c < candidates; ++c) segments[2 + c] = {rows - (candidates - c) * (block_size - 1), 0, 1, 0};
  }

  Layout layout() const {
    return {cu_rows.data(), segments.data(), cu_segments.data(), 2, static_cast<int32_t>(tokens.size()),
            2 + candidates};
  }
  RedraftArgs args() {
    RedraftArgs a{};
    a.sequence = {tokens.data(),
                  segments.data(),
                  1,
                  cu_rows[1],
                  cu_rows[2],
                  cached.data(),
                  text.data(),
                  static_cast<int32_t>(text.size()),
                  pool.data(),
                  pool_rows,
                  pool_width,
                  columns.data(),
                  stops.data(),
                  static_cast<int32_t>(stops.size())};
    a.predictions = predictions.data(), a.accepted_rows = accepted_rows.data();
    a.num_accepted = num_accepted, a.fixed_point = fixed_point;
    a.block_size = block_size, a.blocks = blocks, a.candidates = candidates, a.spawn_ratio = spawn_ratio;
    return a;
  }
  // As the ops check, in their order.
  bool sound() {
    const auto option = [](int32_t value) { return value >= 1 && value <= 1 << 20; };
    return check_layout(layout()).error == LayoutError::kNone && option(block_size) && option(blocks) &&
           cu_segments[1] == 1 && check_redraft(args()).error == RedraftError::kNone;
  }

  // Predictions that often agree with the guesses, acceptance, and what commit does to the length.
  void evaluate(Random& random) {
    std::fill(predictions.begin(), predictions.end(), -1);
    for (const Segment& s : segments)
      for (int32_t row = s.start; row < s.start + s.length; ++row)
        predictions[row] =
            row + 1 < s.start + s.length && random.chance(0.7) ? std::max(tokens[row + 1], 0) : random.within(0, 3);
    std::vector<int32_t> accepted_of_segment(1 + candidates);
    const AcceptResult result =
        accept_sequence({segments.data(), 1, 2 + candidates, cu_rows[1], cu_rows[2], tokens.data(), predictions.data(),
                         columns[kNumFinal], accepted_of_segment.data(), accepted_rows.data()});
    num_accepted = result.num_accepted, fixed_point = result.fixed_point;
    cached[0] += num_accepted;
  }

  // One value that no step would write.
  void spoil(Random& random) {
    const auto any_of = [&](std::vector<int32_t>& values) -> int32_t* {
      return values.empty() ? nullptr : &values[random.within(0, static_cast<int32_t>(values.size()) - 1)];
    };
    Segment& segment = segments[random.within(0, 1 + candidates)];
    int32_t* const fields[] = {&columns[random.within(0, kDone)],
                               &columns[random.within(0, kDone)],
                               any_of(tokens),
                               any_of(text),
                               any_of(pool),
                               any_of(stops),
                               any_of(predictions),
                               any_of(accepted_rows),
                               any_of(cu_rows),
                               any_of(cu_segments),
                               &segment.start,
                               &segment.length,
                               &segment.parent,
                               &segment.visible,
                               cached.data(),
                               &num_accepted,
                               &block_size,
                               &blocks};
    int32_t* const field = fields[random.within(0, std::size(fields) - 1)];
    if (field == nullptr) return;
    const bool near = random.chance(0.5) && *field < INT32_MAX - 2 && *field > INT32_MIN + 2;
    *field = near ? *field + random.within(-2, 2) : random.anything();
  }
};

void decode(Random& random, Counts& counts) {
  State state(random);
  for (int step = 0; step < 200; ++step) {
    for (int i = random.within(0, 2); i > 0; --i) {
      State spoiled = state;
      for (int n = random.within(1, 3); n > 0; --n) spoiled.spoil(random);
      const bool taken = spoiled.sound();
      ++(taken ? counts.taken : counts.refused);
      if (!taken) continue;
      redraft_sequence(spoiled.args());
      spoiled.evaluate(random);
      if (spoiled.sound()) redraft_sequence(spoiled.args());
    }
    expect(state.sound(), "a state that steps wrote is refused");
    redraft_sequence(state.args());
    ++counts.steps;
    if (state.columns[kDone] != kRunning) return;
    state.evaluate(random);
  }
  throw std::runtime_error("decoding does not end");
}

void accept(Random& random, Counts& counts) {
  const int32_t count = random.within(1, 6), first_row = random.within(0, 2);
  std::vector<Segment> segments;
  int32_t row = first_row;
  for (int32_t s = 0; s < count; ++s) {
    const int32_t parent = random.within(-1, s - 1), length = random.within(0, 5);
    row += random.within(0, 1);
    segments.push_back({row, length, parent, parent < 0 ? 0 : random.within(0, segments[parent].length)});
    row += length;
  }
  if (random.chance(0.3)) {
    Segment& s = segments[random.within(0, count - 1)];
    *std::vector{&s.start, &s.length, &s.parent, &s.visible}[random.within(0, 3)] = random.anything();
  }
  segments.shrink_to_fit();
  const std::vector<int32_t> cu_rows{0, first_row, row}, cu_segments{0, 0, count};
  if (check_layout({cu_rows.data(), segments.data(), cu_segments.data(), 2, row, count}).error != LayoutError::kNone)
    return;
  std::vector<int32_t> tokens(row), predictions(row), accepted_rows(row), accepted_of_segment(count);
  for (int32_t& token : tokens) token = random.within(0, 1);
  for (int32_t& token : predictions) token = random.within(0, 1);
  const AcceptResult result =
      accept_sequence({segments.data(), 0, count, first_row, row, tokens.data(), predictions.data(), random.anything(),
                       accepted_of_segment.data(), accepted_rows.data()});
  for (int32_t i = first_row + 1; i < first_row + result.num_accepted; ++i)
    expect(accepted_rows[i] > accepted_rows[i - 1], "accepted rows do not ascend");
  ++counts.layouts;
}

void commit(Random& random, Counts& counts) {
  const bool paged = random.chance(0.5);
  const int32_t layers = random.within(1, 2), row_bytes = random.within(1, 9), begin = random.within(0, 4);
  const int32_t length = random.within(0, 7), rows = random.within(1, 9), page_size = random.within(1, 4);
  const int32_t pages = (length + rows + page_size - 1) / page_size, slab = paged ? page_size : length + rows;
  std::vector<int32_t> page_table(pages);
  for (int32_t i = 0; i < pages; ++i) page_table[i] = pages - 1 - i;
  const int64_t layer_bytes = int64_t{paged ? pages : 1} * slab * row_bytes;
  std::vector<char> k(layers * layer_bytes), v(layers * layer_bytes);
  for (auto* cache : {&k, &v})
    for (char& byte : *cache) byte = static_cast<char>(random.within(0, 255));
  const std::vector<char> k_before = k, v_before = v;
  std::vector<int32_t> accepted;
  for (int32_t r = 0; r < rows; ++r)
    if (random.chance(0.6)) accepted.push_back(begin + r);
  accepted.shrink_to_fit();

  const auto view = [&](std::vector<char>& cache) {
    return cpu::CacheView{cache.data(), layer_bytes, int64_t{slab} * row_bytes, row_bytes};
  };
  const cpu::CommitArgs args{view(k),
                             view(v),
                             layers,
                             row_bytes,
                             0,
                             paged ? page_table.data() : nullptr,
                             page_size,
                             length,
                             accepted.data(),
                             static_cast<int32_t>(accepted.size()),
                             begin};
  cpu::commit_sequence(args);
  for (int32_t layer = 0; layer < layers; ++layer)
    for (int32_t i = 0; i < args.num_accepted; ++i) {
      const int64_t to = layer * layer_bytes + cpu::cache_row_offset(args, args.k_cache, length + i);
      const int64_t from =
          layer * layer_bytes + cpu::cache_row_offset(args, args.k_cache, length + accepted[i] - begin);
      expect(std::memcmp(&k[to], &k_before[from], row_bytes) == 0, "commit: a key is not in its place");
      expect(std::memcmp(&v[to], &v_before[from], row_bytes) == 0, "commit: a value is not in its place");
      counts.moved += from != to;
    }
}

void run(int rounds) {
  Counts counts;
  for (int i = 0; i < rounds; ++i) {
    Random random(i);
    decode(random, counts);
    accept(random, counts);
    commit(random, counts);
  }
  printf("{\"steps\": %lld, \"refused\": %lld, \"taken\": %lld, \"layouts\": %lld, \"moved\": %lld}\n",
         static_cast<long long>(counts.steps), static_cast<long long>(counts.refused),
         static_cast<long long>(counts.taken), static_cast<long long>(counts.layouts),
         static_cast<long long>(counts.moved));
}

}  // namespace
}  // namespace jacobi

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw std::runtime_error("usage: rules_driver ROUNDS");
    jacobi::run(std::stoi(argv[1]));
  } catch (const std::exception& error) {
    fprintf(stderr, "rules_driver: %s\n", error.what());
    return 1;
  }
  return 0;
}
