// commit: the winning path's key and value rows move to their committed places in the cache.
//
// Query row r of a sequence was appended at cache row L + (r - row_begin); accepted row i belongs at cache row L + i.
// Rows ascend along a path, so a source never lies before its destination and copies in ascending order are safe in
// place. The main chain's rows are in place already: when it wins, nothing is read or written.
// Bytes moved otherwise: 2 caches x layers x moved rows x row_bytes, read and written once.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace jacobi::cpu {

// Key or value caches of all layers; strides in bytes. A row is [num_kv_heads, head_dim], dense.
struct CacheView {
  char* data;
  int64_t layer_stride;
  int64_t slab_stride;  // from sequence to sequence, or from page to page
  int64_t row_stride;
};

struct CommitArgs {
  CacheView k_cache;
  CacheView v_cache;
  int32_t layers;
  int64_t row_bytes;
  int32_t sequence;           // b
  const int32_t* page_table;  // [max_pages] of this sequence, or nullptr: contiguous
  int32_t page_size;
  int32_t cache_seqlen;          // L, before the commit
  const int32_t* accepted_rows;  // [num_accepted] of this sequence, ascending
  int32_t num_accepted;
  int32_t row_begin;  // first query row of this sequence
};

// Bytes from the start of a layer to cache row `position` of the sequence.
inline int64_t cache_row_offset(const CommitArgs& args, const CacheView& cache, int32_t position) {
  if (args.page_table == nullptr) return args.sequence * cache.slab_stride + position * cache.row_stride;
  return args.page_table[position / args.page_size] * cache.slab_stride +
         (position % args.page_size) * cache.row_stride;
}

// Index of the first accepted row that is not in place; num_accepted when all are.
inline int32_t first_moved_row(const CommitArgs& args) {
  int32_t i = 0;
  while (i < args.num_accepted && args.accepted_rows[i] - args.row_begin == i) ++i;
  return i;
}

// Moves the rows of one sequence in every layer. The caller advances the length by num_accepted.
inline void commit_sequence(const CommitArgs& args) {
  const int32_t first = first_moved_row(args);
  if (first == args.num_accepted) return;
  for (int32_t layer = 0; layer < args.layers; ++layer) {
    for (const CacheView* cache : {&args.k_cache, &args.v_cache}) {
      char* const base = cache->data + layer * cache->layer_stride;
      for (int32_t i = first; i < args.num_accepted; ++i) {
        const int32_t source = args.cache_seqlen + args.accepted_rows[i] - args.row_begin;
        std::memcpy(base + cache_row_offset(args, *cache, args.cache_seqlen + i),
                    base + cache_row_offset(args, *cache, source), static_cast<size_t>(args.row_bytes));
      }
    }
  }
}

}  // namespace jacobi::cpu
