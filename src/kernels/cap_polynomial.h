// Softcap as a polynomial of the score, for blocks whose scores allow it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/host_device.h"

namespace hopper_attention {

// softcap * tanh(score * softmax scale / softcap) as exponent of 2: three FMA instructions a score, where tanh takes at
// least 1.25 operations of the exponential unit and as many instructions again. Scores below the range come out lower
// than they are.
struct CapPolynomial {
  float linear = 0, cubic = 0, quintic = 0;
  float per_exponent = 0;  // exponents of 2 -> tanh
  float most = 0;          // of the scores of a block
  float least = 0;         // of the largest score of a row so far, as tanh

  // Exponent over score.
  HA_HOST_DEVICE float slope(float score) const {
    float const square = score * score;
    return fmaf(square, fmaf(square, quintic, cubic), linear);
  }

  // The exponent of a score, less `offset`.
  HA_HOST_DEVICE float operator()(float score, float offset) const { return fmaf(score, slope(score), -offset); }

  HA_HOST_DEVICE float tanh_of(float score) const { return score * slope(score) * per_exponent; }

  // Whether it serves a row in a block with this maximum. `capped`: of the blocks before, too, as tanh.
  HA_HOST_DEVICE bool serves(float block_max, float capped) const { return block_max <= most && capped >= least; }
};

// tanh(x) = x (c0 + c1 x^2 + c2 x^4) for |x| <= 0.375, by Remez' algorithm: the relative error is at most 4.2e-6, that
// of a score of 18.75 8e-5, where the LSE may be wrong by 2e-4. A key below the range weighs at most e^-14.5 beside the
// largest one: a million of these change the LSE by less than 1.4e-4. Serves no row where softcap is below 20.2, and
// none where a coefficient is no normal number.
inline CapPolynomial cap_polynomial(double scale, double softcap) {
  constexpr double kMostX = 0.375;
  constexpr double kMostScore = 18.75;
  constexpr double kWeightless = 14.5;
  double const exponents = scale / std::log(2.0);
  double const inner = scale / softcap;
  double const most = std::min(kMostX * softcap, kMostScore);
  CapPolynomial const cap{.linear = static_cast<float>(0.99999580 * exponents),
                          .cubic = static_cast<float>(-0.33278609 * exponents * inner * inner),
                          .quintic = static_cast<float>(0.12268611 * exponents * std::pow(inner, 4)),
                          .per_exponent = static_cast<float>(std::log(2.0) / softcap),
                          .most = static_cast<float>(most / scale),
                          .least = static_cast<float>(kWeightless / softcap - std::tanh(most / softcap))};
  bool const is_precise = std::isnormal(cap.linear) && std::isnormal(cap.cubic) && std::isnormal(cap.quintic);
  CapPolynomial const never{.most = -std::numeric_limits<float>::infinity()};
  return is_precise && cap.least < std::tanh(most / softcap) ? cap : never;
}

}  // namespace hopper_attention
