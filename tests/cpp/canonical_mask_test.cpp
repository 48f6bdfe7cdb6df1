// Masks as users state them, in the form that plans and kernels get.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>

#include "hopper_attention/forward.h"
#include "kernels/interval_mask.h"
#include "tensors.h"

namespace hopper_attention {

TEST_CASE("validate: masks that mean the same become the same") {
  auto const mask = [](std::int64_t seqlen_q, std::int64_t seqlen_k, Arguments options) {
    Arguments args = valid_call({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k});
    args.causal = options.causal;
    args.window_left = options.window_left;
    args.window_right = options.window_right;
    args.attention_chunk = options.attention_chunk;
    return validate(args).mask;
  };
  MaskParams const none;
  CHECK(mask(5, 7, {.causal = true}) == MaskParams{.right = 0});
  CHECK(mask(5, 7, {.causal = true, .window_right = 3}) == MaskParams{.right = 0});
  CHECK(mask(5, 7, {.window_left = 5}) == MaskParams{.left = 5});
  CHECK(mask(5, 7, {.window_left = 6}) == none);
  CHECK(mask(5, 7, {.window_right = 3}) == MaskParams{.right = 3});
  CHECK(mask(5, 7, {.window_right = 4}) == none);
  CHECK(mask(1, 7, {.causal = true}) == none);
  CHECK(mask(5, 7, {.window_left = std::int64_t{1} << 62, .window_right = std::int64_t{1} << 62}) == none);
  CHECK(mask(5, 7, {.attention_chunk = 6}) == MaskParams{.chunk = 6});
  CHECK(mask(5, 7, {.attention_chunk = 7}) == none);
  CHECK(mask(9, 7, {.attention_chunk = 7}) == MaskParams{.chunk = 7});
  CHECK(mask(9, 7, {.attention_chunk = std::int64_t{1} << 62}) == MaskParams{.chunk = 9});
  CHECK(mask(9, 7, {.causal = true, .attention_chunk = 7}) == MaskParams{.right = 0});
}

TEST_CASE("make_problem: where lengths are on the device, no bound on them changes the mask") {
  int lengths = 0;
  Tensor given;
  given.rank = 1;
  given.data = &lengths;
  auto const mask = [&](std::int64_t longest, Arguments options) {
    options.seqused_k = given;
    return make_problem({DataType::kBFloat16, 2, longest, longest, 1, 1, 64, 64}, options).mask;
  };
  for (std::int64_t const longest : {1, 7, 100'000}) {
    CHECK(mask(longest, {.causal = true}) == MaskParams{.right = 0});
    CHECK(mask(longest, {.window_left = 6, .window_right = 4}) == MaskParams{.left = 6, .right = 4});
    CHECK(mask(longest, {.attention_chunk = 7}) == MaskParams{.chunk = 7});
    CHECK(mask(longest, {.causal = true, .attention_chunk = 100}) == MaskParams{.right = 0, .chunk = 100});
    CHECK(mask(longest, {.window_left = std::int64_t{1} << 62}) == MaskParams{});
  }
  CHECK(mask(5, {.cp_world_size = 4, .cp_rank = 3}) == MaskParams{.cp_world = 4, .cp_rank = 3});
}

TEST_CASE("validate: the canonical mask shows every query the same keys as what was asked") {
  std::mt19937 random(4);
  auto const pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 5000; ++i) {
    int const seqlen_q = pick(1, 14);
    int const seqlen_k = pick(0, 14);
    MaskParams const asked{.left = pick(-1, 16), .right = pick(-1, 16), .chunk = pick(0, 1) * pick(0, 18)};
    Arguments args = valid_call({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k});
    args.window_left = asked.left;
    args.window_right = asked.right;
    args.attention_chunk = asked.chunk;
    MaskParams const canonical = validate(args).mask;
    for (int row = 0; row < seqlen_q; ++row) {
      KeyInterval const a = visible(asked, row, {seqlen_q, seqlen_k});
      KeyInterval const b = visible(canonical, row, {seqlen_q, seqlen_k});
      CAPTURE(seqlen_q);
      CAPTURE(seqlen_k);
      CAPTURE(asked.left);
      CAPTURE(asked.right);
      CAPTURE(asked.chunk);
      CAPTURE(row);
      REQUIRE((a.empty() ? b.empty() : a.begin == b.begin && a.end == b.end));
    }
  }
}

}  // namespace hopper_attention
