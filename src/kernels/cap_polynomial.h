// Softcap as a polynomial of the score, for blocks whose scores allow it: one for small scores and one for larger ones.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/host_device.h"

namespace hopper_attention {

// softcap * tanh(score * softmax scale / softcap) as exponent of 2, by odd powers of the score: kTerms FMA instructions
// a score more than without softcap, where tanh takes at least 1.25 operations of the exponential unit and as many
// instructions again. The highest power has a positive coefficient, so that scores below the range come out lower than
// they are.
template <int kTerms>
struct CapPolynomial {
  float of_power[kTerms] = {};  // of score, score^3, ...
  float per_exponent = 0;       // exponents of 2 -> tanh
  float most = 0;               // of the scores of a block
  float least = 0;              // of the largest score of a row so far
  float least_tanh = 0;         // the same as tanh
  float surely_from = 0;        // max(least, 0)

  // Exponent over score.
  HA_HOST_DEVICE float slope(float score) const {
    float const square = score * score;
    float sum = of_power[kTerms - 1];
    for (int i = kTerms - 2; i >= 0; --i) { sum = fmaf(square, sum, of_power[i]); }
    return sum;
  }

  // The exponent of a score, less `offset`.
  HA_HOST_DEVICE float operator()(float score, float offset) const { return fmaf(score, slope(score), -offset); }

  HA_HOST_DEVICE float tanh_of(float score) const { return score * slope(score) * per_exponent; }

  // Whether it serves a row in a block with this maximum, whatever was in the blocks before.
  HA_HOST_DEVICE bool surely_serves(float block_max) const { return (block_max >= surely_from) & (block_max <= most); }
  // The same where the largest score of these was `before`, as tanh.
  HA_HOST_DEVICE bool serves(float block_max, float before) const {
    return (block_max <= most) & ((block_max >= least) | (before >= least_tanh));
  }
};

// tanh(x) = x (c0 + c1 x^2 + ...) for |x| <= most_x, by Remez' algorithm with the relative error as weight.
template <int kTerms>
struct TanhFit {
  double of_power[kTerms];
  double most_x;
  // Of scores after the cap: their error stays below 8.3e-5, where the LSE may be wrong by 2e-4.
  double most_score;
  // How far below the largest score of a row the range has to reach: what is wrong with a million keys below it changes
  // the LSE by less than 1.8e-4.
  double weightless;
};
inline constexpr TanhFit<3> kNarrowFit{{0.99999580, -0.33278609, 0.12268611}, 0.375, 18.75, 14.5};  // within 4.4e-6
inline constexpr TanhFit<5> kWideFit{
    {0.99999773, -0.33318372, 0.13171844, -0.04763825, 0.01085477}, 0.8777, 35.0, 20.0};  // within 2.3e-6

// Serves no row where softcap is too small for such a range, and none where a coefficient is no normal number.
template <int kTerms>
CapPolynomial<kTerms> cap_polynomial(TanhFit<kTerms> const& fit, double scale, double softcap) {
  double const exponents = scale / std::log(2.0);
  double const inner = scale / softcap;
  double const most_tanh = std::min(std::tanh(fit.most_x), fit.most_score / softcap);
  double const least_tanh = fit.weightless / softcap - most_tanh;
  CapPolynomial<kTerms> cap{.per_exponent = static_cast<float>(std::log(2.0) / softcap),
                            .most = static_cast<float>(std::atanh(most_tanh) / inner),
                            .least_tanh = static_cast<float>(least_tanh)};
  bool serves = least_tanh < most_tanh;
  for (int i = 0; i < kTerms; ++i) {
    cap.of_power[i] = static_cast<float>(fit.of_power[i] * exponents * std::pow(inner, 2 * i));
    serves = serves && std::isnormal(cap.of_power[i]);
  }
  if (!serves) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return {.most = -kInfinity, .least = kInfinity, .least_tanh = kInfinity, .surely_from = kInfinity};
  }
  cap.least = static_cast<float>(std::atanh(least_tanh) / inner);
  cap.surely_from = std::max(cap.least, 0.0F);
  return cap;
}

struct CapPolynomials {
  CapPolynomial<3> narrow;
  CapPolynomial<5> wide;
};

inline CapPolynomials cap_polynomials(double scale, double softcap) {
  return {cap_polynomial(kNarrowFit, scale, softcap), cap_polynomial(kWideFit, scale, softcap)};
}

}  // namespace hopper_attention
