// Block layout: the segments of query tokens that one forward pass evaluates (docs: jacobi_kernels/layout.py).
//
// A segment is a causal run of query rows [start, start + length). It continues from the first `visible` tokens of its
// parent segment, or straight from the committed tokens when parent is -1. The path of a query token is: the committed
// tokens of its sequence, the visible part of every ancestor (outermost first), its own segment up to itself.
// A segment with visible 0 continues from its parent's own start: it is a sibling of the parent.
//
// Inside a sequence parents come first, and segments lie in ascending rows without overlap; so rows ascend along every
// path. Rows that no segment covers are holes.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace jacobi {

struct Segment {
  int32_t start;    // absolute query row
  int32_t length;   // number of rows, 0 allowed
  int32_t parent;   // absolute segment index, or -1
  int32_t visible;  // leading tokens of the parent that it continues from
};
static_assert(sizeof(Segment) == 16, "a row of the segments tensor is one Segment");

struct Layout {
  const int32_t* cu_seqlens_q;  // [batch + 1]
  const Segment* segments;      // [num_segments]
  const int32_t* cu_segments;   // [batch + 1]
  int32_t batch;
  int32_t rows;  // T, query rows of all sequences
  int32_t num_segments;
};

// Number of query tokens on the path before the first token of `segment` (committed tokens not counted).
inline JACOBI_HD int32_t path_length_before(const Segment* segments, int32_t segment) {
  int32_t count = 0;
  while (segments[segment].parent >= 0) {
    count += segments[segment].visible;
    segment = segments[segment].parent;
  }
  return count;
}

// Writes the query rows of the path before the first token of `segment`, in logical order; returns their number, which
// is path_length_before. The path of token i of the segment is these rows, then start .. start + i.
inline JACOBI_HD int32_t gather_path(const Segment* segments, int32_t segment, int32_t* rows) {
  const int32_t count = path_length_before(segments, segment);
  int32_t end = count;
  while (segments[segment].parent >= 0) {
    const int32_t visible = segments[segment].visible;
    segment = segments[segment].parent;
    end -= visible;
    for (int32_t i = 0; i < visible; ++i) rows[end + i] = segments[segment].start + i;
  }
  return count;
}

// The nearest ancestor that holds the token before the first token of `segment`, or -1 for a root (nothing but
// committed tokens before it). *visible: how many leading tokens of that ancestor are on the path.
inline JACOBI_HD int32_t predecessor_segment(const Segment* segments, int32_t segment, int32_t* visible) {
  while (segments[segment].parent >= 0) {
    *visible = segments[segment].visible;
    segment = segments[segment].parent;
    if (*visible > 0) return segment;
  }
  *visible = 0;
  return -1;
}

// Query row of the token before the first token of `segment`, or -1 for a root.
inline JACOBI_HD int32_t predecessor_row(const Segment* segments, int32_t segment) {
  int32_t visible;
  const int32_t ancestor = predecessor_segment(segments, segment, &visible);
  return ancestor < 0 ? -1 : segments[ancestor].start + visible - 1;
}

enum class LayoutError : int32_t {
  kNone = 0,
  kSequenceRows,      // cu_seqlens_q must start at 0, ascend, and end at the number of query rows
  kSequenceSegments,  // cu_segments must start at 0, ascend, and end at the number of segments
  kLength,            // length must not be negative
  kRows,              // rows must lie inside the sequence's rows
  kOrder,             // rows must begin at or behind the end of the segment before
  kParent,            // parent must be -1 or an earlier segment of the same sequence
  kVisible,           // visible must be 0 .. length of the parent (0 without a parent)
};

struct LayoutCheck {
  LayoutError error;
  int32_t index;  // of the offending entry of cu_seqlens_q or cu_segments, or of the offending segment
};

inline JACOBI_HD bool partitions(const int32_t* offsets, int32_t batch, int32_t total, int32_t* index) {
  for (int32_t b = 0; b <= batch; ++b) {
    *index = b;
    if (offsets[b] < (b ? offsets[b - 1] : 0) || (b == 0 && offsets[0] != 0)) return false;
  }
  return offsets[batch] == total;
}

// Checks the segments of sequence b; the offsets have been checked.
inline JACOBI_HD LayoutCheck check_sequence(const Layout& layout, int32_t b) {
  const int32_t end_row = layout.cu_seqlens_q[b + 1];
  int32_t next_row = layout.cu_seqlens_q[b];
  for (int32_t s = layout.cu_segments[b]; s < layout.cu_segments[b + 1]; ++s) {
    const Segment segment = layout.segments[s];
    if (segment.length < 0) return {LayoutError::kLength, s};
    if (segment.start < layout.cu_seqlens_q[b] || segment.start > end_row || segment.length > end_row - segment.start)
      return {LayoutError::kRows, s};
    if (segment.start < next_row) return {LayoutError::kOrder, s};
    if (segment.parent < -1 || segment.parent >= s || (segment.parent >= 0 && segment.parent < layout.cu_segments[b]))
      return {LayoutError::kParent, s};
    const int32_t limit = segment.parent < 0 ? 0 : layout.segments[segment.parent].length;
    if (segment.visible < 0 || segment.visible > limit) return {LayoutError::kVisible, s};
    next_row = segment.start + segment.length;
  }
  return {LayoutError::kNone, 0};
}

// Checks every rule above; O(batch + segments).
inline JACOBI_HD LayoutCheck check_layout(const Layout& layout) {
  int32_t index = 0;
  if (!partitions(layout.cu_seqlens_q, layout.batch, layout.rows, &index)) return {LayoutError::kSequenceRows, index};
  if (!partitions(layout.cu_segments, layout.batch, layout.num_segments, &index))
    return {LayoutError::kSequenceSegments, index};
  for (int32_t b = 0; b < layout.batch; ++b) {
    const LayoutCheck check = check_sequence(layout, b);
    if (check.error != LayoutError::kNone) return check;
  }
  return {LayoutError::kNone, 0};
}

}  // namespace jacobi
