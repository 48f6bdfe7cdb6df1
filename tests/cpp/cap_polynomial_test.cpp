// Softcap as a polynomial against tanh.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cap_polynomial.h"

namespace hopper_attention {
namespace {

constexpr double kLog2E = 1.442695040888963407;

double capped(double score, double softcap) { return softcap * std::tanh(score / softcap); }

TEST_CASE("what the polynomial serves is within half of what the LSE may be wrong by") {
  for (double const softcap : {21.0, 30.0, 50.0, 80.0, 200.0, 5000.0}) {
    for (double const scale : {1.0 / 16.0, 0.08838834764, 1.0, 1e-3, 300.0}) {
      CAPTURE(softcap);
      CAPTURE(scale);
      CapPolynomial const polynomial = cap_polynomial(scale, softcap);
      float const most = polynomial.most;
      CHECK(most * scale >= 7.4);
      for (int i = -1000; i <= 1000; ++i) {
        float const score = most * static_cast<float>(i) / 1000.0F;
        double const exact = capped(score * scale, softcap);
        CHECK(std::abs(polynomial(score, 0.0F) / kLog2E - exact) < 1e-4);
        CHECK(std::abs(polynomial.tanh_of(score) - exact / softcap) * softcap < 1e-4);
        CHECK(std::abs(polynomial(score, 2.5F) - (polynomial(score, 0.0F) - 2.5F)) < 1e-5);
      }
    }
  }
}

TEST_CASE("scores below the range change the sum of a row by less than the LSE may be wrong by") {
  constexpr double kKeys = 1e6;
  for (double const softcap : {20.3, 22.0, 25.0, 30.0, 50.0, 200.0}) {
    CAPTURE(softcap);
    CapPolynomial const polynomial = cap_polynomial(1.0, softcap);
    double const largest = softcap * polynomial.least;  // the smallest that it serves: then keys below weigh most
    for (double score = -polynomial.most; score > -1000.0; score *= 1.01) {
      auto const weight_of = [&](double s) { return kKeys * std::exp(s - largest); };
      double const exact = weight_of(capped(score, softcap));
      double const taken = weight_of(polynomial(static_cast<float>(score), 0.0F) / kLog2E);
      CAPTURE(score);
      CHECK(std::abs(std::log1p(taken) - std::log1p(exact)) < 2e-4);
    }
  }
}

TEST_CASE("lower scores never come out higher, and -inf is -inf") {
  CapPolynomial const polynomial = cap_polynomial(0.125, 50.0);
  float before = polynomial(polynomial.most, 0.0F);
  for (float score = polynomial.most; score > -1e30F; score -= std::max(0.01F, 0.01F * std::abs(score))) {
    float const now = polynomial(score, 0.0F);
    REQUIRE(now <= before);
    before = now;
  }
  CHECK(polynomial(-std::numeric_limits<float>::infinity(), 3.0F) == -std::numeric_limits<float>::infinity());
}

TEST_CASE("rows that it serves: neither too large, nor so small that what is below the range counts") {
  CapPolynomial const of_50 = cap_polynomial(1.0, 50.0);
  CHECK(of_50.serves(18.74F, of_50.tanh_of(18.74F)));
  CHECK_FALSE(of_50.serves(18.76F, of_50.tanh_of(18.76F)));
  CHECK(of_50.serves(0.0F, 0.0F));
  CHECK_FALSE(of_50.serves(-5.0F, -0.1F));
  CHECK(of_50.serves(-5.0F, 0.1F));  // a block before had a larger score
  CHECK_FALSE(of_50.serves(std::numeric_limits<float>::infinity(), 1.0F));
  CHECK_FALSE(of_50.serves(std::numeric_limits<float>::quiet_NaN(), 0.1F));
}

TEST_CASE("it serves nothing where softcap is small, or a coefficient is no normal number") {
  struct Never {
    double scale, softcap;
  };
  for (auto const [scale, softcap] : {Never{1.0, 1.0}, Never{1.0, 20.0}, Never{std::ldexp(1.0, -100), 50.0},
                                      Never{1e30, 50.0}, Never{1e-30, 50.0}, Never{1.0, 1e30}}) {
    CAPTURE(scale);
    CAPTURE(softcap);
    CapPolynomial const polynomial = cap_polynomial(scale, softcap);
    for (float const score : {-1e30F, -1.0F, 0.0F, 1e-30F, 5.0F, 1e30F}) {
      CHECK_FALSE(polynomial.serves(score, 1.0F));
    }
  }
}

}  // namespace
}  // namespace hopper_attention
