// Which part of an accumulator of the transposed products, keys or columns of V times at most 32 queries, a thread
// holds.
#pragma once

#include "kernels/cute.h"

#include <cstdint>

namespace hopper_attention {

using namespace cute;

// Of the rows of a tile, which are columns here, those of which a thread holds some scores and some of O.
constexpr int columns_of_thread(int rows) { return rows / 4; }

// An accumulator of 64 m x 4 kColumns as (column, row) of this thread: (kColumns, 2 m).
template <int kColumns, class Accumulator>
__device__ __forceinline__ auto columns_view(Accumulator& acc) {
  constexpr int kTiles = decltype(size(acc))::value / (2 * kColumns);
  return make_tensor(acc.data(), Layout<Shape<Shape<_2, Int<kColumns / 2>>, Shape<_2, Int<kTiles>>>,
                                        Stride<Stride<_1, _4>, Stride<_2, Int<2 * kColumns>>>>{});
}

// Where the thread's column c and its row r of a columns_view() lie in the accumulator.
struct ThreadColumns {
  int first_column;
  int first_row;

  __device__ __forceinline__ explicit ThreadColumns(int thread)
      : first_column(thread % 4 * 2), first_row(thread / 32 * 16 + thread % 32 / 4) {}

  __device__ __forceinline__ int column(int c) const { return first_column + c / 2 * 8 + c % 2; }
  __device__ __forceinline__ int row(int r) const { return first_row + r % 2 * 8 + r / 2 * 64; }
};

// Two values as one register of 16-bit ones.
template <class Element>
__device__ __forceinline__ uint32_t packed_pair(float a, float b) {
  cutlass::Array<float, 2> const pair{a, b};
  auto const rounded = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
  return reinterpret_cast<uint32_t const&>(rounded);
}

// Stores rows r and r + 1 of a columns_view(), rounded, with rows and columns exchanged: as matrices of 8x8, four at a
// time. value(c, r) is what the thread has; row(c) is where this lane writes 8 values of those that begin at column c
// of a thread: it has TransposedRow::row of 16 columns, and its values begin at TransposedRow::column.
template <class Element, int kColumns, class Value, class Row>
__device__ __forceinline__ void store_transposed(int r, Value value, Row row) {
  CUTE_UNROLL
  for (int first = 0; first < kColumns; first += 4) {
    uint32_t matrices[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      int const c = first + i / 2 * 2;
      matrices[i] = packed_pair<Element>(value(c, r + i % 2), value(c + 1, r + i % 2));
    }
    SM90_U16x8_STSM_T::copy(matrices[0], matrices[1], matrices[2], matrices[3],
                            *reinterpret_cast<uint128_t*>(row(first)));
  }
}

// Where a lane writes what store_transposed() exchanges: which of 16 rows of the tile, and from which key or column of
// V on, of those of the first 64.
struct TransposedRow {
  int row;
  int column;

  __device__ __forceinline__ explicit TransposedRow(int thread)
      : row(thread % 8 + thread / 16 % 2 * 8), column(thread / 32 * 16 + thread / 8 % 2 * 8) {}
};

}  // namespace hopper_attention
