// Softcap as polynomials against tanh.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cap_polynomial.h"

namespace hopper_attention {
namespace {

constexpr double kLog2E = 1.442695040888963407;

double capped(double score, double softcap) { return softcap * std::tanh(score / softcap); }

// What both polynomials have to fulfil.
template <class Polynomial>
void check_within_range(CapPolynomial<Polynomial> const& polynomial, double scale, double softcap) {
  float const most = polynomial.most;
  for (int i = -1000; i <= 1000; ++i) {
    float const score = most * static_cast<float>(i) / 1000.0F;
    double const exact = capped(score * scale, softcap);
    CHECK(std::abs(polynomial(score, 0.0F) / kLog2E - exact) < 1e-4);
    CHECK(std::abs(polynomial.tanh_of(score) - exact / softcap) * softcap < 1e-4);
    CHECK(std::abs(polynomial(score, 2.5F) - (polynomial(score, 0.0F) - 2.5F)) < 1e-5);
  }
}

template <class Polynomial>
void check_below_range(CapPolynomial<Polynomial> const& polynomial, double softcap) {
  constexpr double kKeys = 1e6;
  double const largest = softcap * polynomial.least_tanh;  // the smallest that it serves: then keys below weigh most
  CHECK(capped(polynomial.least, softcap) == doctest::Approx(largest));
  for (double score = -polynomial.most; score > -1000.0; score *= 1.01) {
    auto const weight_of = [&](double s) { return kKeys * std::exp(s - largest); };
    double const exact = weight_of(capped(score, softcap));
    double const taken = weight_of(polynomial(static_cast<float>(score), 0.0F) / kLog2E);
    CAPTURE(score);
    CHECK(std::abs(std::log1p(taken) - std::log1p(exact)) < 1.8e-4);
  }
}

template <class Polynomial>
void check_order(CapPolynomial<Polynomial> const& polynomial) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float before = polynomial(polynomial.most, 0.0F);
  for (float score = polynomial.most; score > -1e30F; score -= std::max(0.01F, 0.01F * std::abs(score))) {
    float const now = polynomial(score, 0.0F);
    REQUIRE(now <= before);
    before = now;
  }
  CHECK(polynomial(-kInfinity, 3.0F) == -kInfinity);
}

TEST_CASE("what a polynomial serves is within half of what the LSE may be wrong by") {
  for (double const softcap : {21.0, 30.0, 50.0, 80.0, 200.0, 5000.0}) {
    for (double const scale : {1.0 / 16.0, 0.08838834764, 1.0, 1e-3, 300.0}) {
      CAPTURE(softcap);
      CAPTURE(scale);
      CapPolynomials const polynomials = cap_polynomials(scale, softcap);
      CHECK(polynomials.narrow.most * scale >= 7.4);
      check_within_range(polynomials.narrow, scale, softcap);
      if (scale / softcap < 1e-4) { continue; }  // the wide one's last coefficient is none
      CHECK(polynomials.wide.most * scale >= 18.0);
      check_within_range(polynomials.wide, scale, softcap);
    }
  }
}

TEST_CASE("the wide polynomial serves softcaps for which the narrow one does not") {
  CHECK_FALSE(cap_polynomials(0.125, 15.0).narrow.serves(0.0F, 1.0F));
  for (double const softcap : {14.3, 16.0, 20.0}) {
    CAPTURE(softcap);
    check_within_range(cap_polynomials(0.125, softcap).wide, 0.125, softcap);
    CHECK(cap_polynomials(0.125, softcap).wide.serves(0.0F, 1.0F));
  }
}

TEST_CASE("scores below the range change the sum of a row by less than the LSE may be wrong by") {
  for (double const softcap : {14.3, 15.0, 20.3, 22.0, 25.0, 30.0, 50.0, 200.0}) {
    CAPTURE(softcap);
    CapPolynomials const polynomials = cap_polynomials(1.0, softcap);
    if (softcap > 20.2) { check_below_range(polynomials.narrow, softcap); }
    check_below_range(polynomials.wide, softcap);
  }
}

TEST_CASE("lower scores never come out higher, and -inf is -inf") {
  for (double const softcap : {25.0, 50.0, 300.0}) {
    CAPTURE(softcap);
    CapPolynomials const polynomials = cap_polynomials(0.125, softcap);
    check_order(polynomials.narrow);
    check_order(polynomials.wide);
  }
}

TEST_CASE("rows that a polynomial serves: neither too large, nor so small that what is below the range counts") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  CapPolynomial<OfDegree5> const of_50 = cap_polynomials(1.0, 50.0).narrow;
  CHECK(of_50.serves(18.74F, -1.0F));
  CHECK_FALSE(of_50.serves(19.8F, 1.0F));
  CHECK(of_50.serves(0.0F, -1.0F));
  CHECK_FALSE(of_50.serves(-5.0F, -0.1F));
  CHECK(of_50.serves(-5.0F, 0.1F));  // a block before had a larger score
  CHECK_FALSE(of_50.serves(kInfinity, 1.0F));
  CHECK_FALSE(of_50.serves(kNan, 0.1F));
  // Maxima that came out negative, or NaN, are no maxima.
  for (float const score : {-0.5F, -kInfinity, kInfinity, kNan, -kNan, 19.8F}) {
    CHECK_FALSE(of_50.surely_serves(score));
  }
  for (float const score : {0.0F, 1.0F, 18.74F}) { CHECK(of_50.surely_serves(score)); }
  CapPolynomial<OfDegree5> const of_21 = cap_polynomials(1.0, 21.0).narrow;
  CHECK(of_21.least > 0.0F);
  CHECK_FALSE(of_21.surely_serves(0.99F * of_21.least));
  CHECK(of_21.surely_serves(1.01F * of_21.least));
}

TEST_CASE("it serves nothing where softcap is small, or a coefficient is no normal number") {
  struct Never {
    double scale, softcap;
  };
  for (auto const [scale, softcap] : {Never{1.0, 1.0}, Never{1.0, 14.0}, Never{std::ldexp(1.0, -100), 50.0},
                                      Never{1e30, 50.0}, Never{1e-30, 50.0}, Never{1.0, 1e30}}) {
    CAPTURE(scale);
    CAPTURE(softcap);
    CapPolynomials const polynomials = cap_polynomials(scale, softcap);
    for (float const score : {-std::numeric_limits<float>::infinity(), -1e30F, -1.0F, 0.0F, 1e-30F, 5.0F, 1e30F,
                              std::numeric_limits<float>::infinity()}) {
      CHECK_FALSE(polynomials.narrow.serves(score, 1.0F));
      CHECK_FALSE(polynomials.narrow.surely_serves(score));
      CHECK_FALSE(polynomials.wide.serves(score, 1.0F));
      CHECK_FALSE(polynomials.wide.surely_serves(score));
    }
  }
}

}  // namespace
}  // namespace hopper_attention
