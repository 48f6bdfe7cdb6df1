// Softcap as a polynomial of the score, for blocks whose scores allow it: one for small scores and one for larger ones.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "kernels/host_device.h"

namespace hopper_attention {

// Odd polynomials of a score, less `offset`, from the coefficients of score, score^3, ... An instruction has one
// constant operand: with another one in a register, each score would cost an instruction more where none is free.
struct OfDegree5 {
  static constexpr int kTerms = 3;
  float middle = 0, rest = 0, top = 0;

  // top * score * ((score^2 + middle)^2 + rest)
  static OfDegree5 of(double const (&of_power)[kTerms]) {
    double const middle = of_power[1] / of_power[2] / 2;
    return {static_cast<float>(middle), static_cast<float>(of_power[0] / of_power[2] - middle * middle),
            static_cast<float>(of_power[2])};
  }
  HA_HOST_DEVICE float operator()(float score, float offset) const {
    float const inner = fmaf(score, score, middle);
    return fmaf(score * top, fmaf(inner, inner, rest), -offset);
  }
  bool is_normal() const { return std::isnormal(middle) && std::isnormal(2 * rest) && std::isnormal(top); }
};

struct OfDegree9 {
  static constexpr int kTerms = 5;
  float of_power[kTerms] = {};

  static OfDegree9 of(double const (&of_power)[kTerms]) {
    OfDegree9 polynomial;
    std::copy(std::begin(of_power), std::end(of_power), polynomial.of_power);
    return polynomial;
  }
  HA_HOST_DEVICE float operator()(float score, float offset) const {
    float const square = score * score;
    float sum = of_power[kTerms - 1];
    for (int i = kTerms - 2; i >= 0; --i) { sum = fmaf(square, sum, of_power[i]); }
    return fmaf(score, sum, -offset);
  }
  bool is_normal() const {
    return std::all_of(std::begin(of_power), std::end(of_power), [](float c) { return std::isnormal(c); });
  }
};

// softcap * tanh(score * softmax scale / softcap) as exponent of 2: three instructions a score more than without
// softcap (of degree 9 five), where tanh takes at least 1.25 operations of the exponential unit and as many
// instructions again. The highest power has a positive coefficient, so that scores below the range come out lower than
// they are.
template <class Polynomial>
struct CapPolynomial : Polynomial {
  float per_exponent = 0;  // exponents of 2 -> tanh
  float most = 0;          // of the scores of a block
  float least = 0;         // of the largest score of a row so far
  float least_tanh = 0;    // the same as tanh
  float surely_from = 0;   // max(least, 0)

  HA_HOST_DEVICE float tanh_of(float score) const { return (*this)(score, 0.0F) * per_exponent; }

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
template <class Polynomial>
CapPolynomial<Polynomial> cap_polynomial(TanhFit<Polynomial::kTerms> const& fit, double scale, double softcap) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  double const exponents = scale / std::log(2.0);
  double const inner = scale / softcap;
  double const most_tanh = std::min(std::tanh(fit.most_x), fit.most_score / softcap);
  double const least_tanh = fit.weightless / softcap - most_tanh;
  double of_power[Polynomial::kTerms];
  for (int i = 0; i < Polynomial::kTerms; ++i) { of_power[i] = fit.of_power[i] * exponents * std::pow(inner, 2 * i); }
  CapPolynomial<Polynomial> cap{Polynomial::of(of_power)};
  if (!(least_tanh < most_tanh) || !cap.is_normal()) { return {{}, 0.0F, -kInfinity, kInfinity, kInfinity, kInfinity}; }
  cap.per_exponent = static_cast<float>(std::log(2.0) / softcap);
  cap.most = static_cast<float>(std::atanh(most_tanh) / inner);
  cap.least = static_cast<float>(std::atanh(least_tanh) / inner);
  cap.least_tanh = static_cast<float>(least_tanh);
  cap.surely_from = std::max(cap.least, 0.0F);
  return cap;
}

struct CapPolynomials {
  CapPolynomial<OfDegree5> narrow;
  CapPolynomial<OfDegree9> wide;
};

inline CapPolynomials cap_polynomials(double scale, double softcap) {
  return {cap_polynomial<OfDegree5>(kNarrowFit, scale, softcap), cap_polynomial<OfDegree9>(kWideFit, scale, softcap)};
}

}  // namespace hopper_attention
