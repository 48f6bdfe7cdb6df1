// Which part of an accumulator of the transposed products, keys or columns of V times at most 16 queries, a thread
// holds.
#pragma once

#include "kernels/cute.h"

#include <cstdint>

namespace hopper_attention {

using namespace cute;

// Rows of the tile, which are columns here, of which a thread holds some scores and some of O.
inline constexpr int kColumnsPerThread = 4;

// An accumulator of 64 m x 16 as (column, row) of this thread: (4, 2 m).
template <class Accumulator>
__device__ __forceinline__ auto columns_view(Accumulator& acc) {
  constexpr int kTiles = decltype(size(acc))::value / 8;
  return make_tensor(acc.data(),
                     Layout<Shape<Shape<_2, _2>, Shape<_2, Int<kTiles>>>, Stride<Stride<_1, _4>, Stride<_2, _8>>>{});
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

// Stores 8x8 matrices of 16-bit values, of which each thread holds two columns of a row, with rows and columns
// exchanged. `row` is where the row of this lane's matrix goes: lanes 0 to 7 have those of the first one.
template <class Element>
__device__ __forceinline__ void store_transposed(Element* row, uint32_t (&matrices)[4]) {
  SM90_U16x8_STSM_T::copy(matrices[0], matrices[1], matrices[2], matrices[3], *reinterpret_cast<uint128_t*>(row));
}

// Two values as one register of 16-bit ones.
template <class Element>
__device__ __forceinline__ uint32_t packed_pair(float a, float b) {
  cutlass::Array<float, 2> const pair{a, b};
  auto const rounded = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
  return reinterpret_cast<uint32_t const&>(rounded);
}

}  // namespace hopper_attention
