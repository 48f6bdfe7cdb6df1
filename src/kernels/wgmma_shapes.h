// S = Q K^T for block sizes that CuTe has no instruction for unless all of its extra shapes are compiled, which costs
// every file half a minute (CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED).
#pragma once

#include "kernels/cute.h"

namespace hopper_attention {

// One WGMMA of 64 x N x 16, both operands K-major in shared memory, fp32 accumulator. Source: PTX ISA, wgmma.mma_async.
template <class Element, int kColumns>
struct WgmmaSs {};

// Accumulator registers by eights, as names in the instruction and as operands.
#define HA_NAMES_40                                                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define HA_NAMES_56 HA_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define HA_NAMES_68 HA_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67"
#define HA_NAMES_72 HA_NAMES_68 ",%68,%69,%70,%71"
#define HA_NAMES_80 HA_NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define HA_NAMES_88 HA_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define HA_EIGHT(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define HA_OPERANDS_40 HA_EIGHT(0), HA_EIGHT(8), HA_EIGHT(16), HA_EIGHT(24), HA_EIGHT(32)
#define HA_OPERANDS_56 HA_OPERANDS_40, HA_EIGHT(40), HA_EIGHT(48)
#define HA_OPERANDS_64 HA_OPERANDS_56, HA_EIGHT(56)
#define HA_OPERANDS_68 HA_OPERANDS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define HA_OPERANDS_72 HA_OPERANDS_64, HA_EIGHT(64)
#define HA_OPERANDS_80 HA_OPERANDS_72, HA_EIGHT(72)
#define HA_OPERANDS_88 HA_OPERANDS_80, HA_EIGHT(80)

// kRegisters = columns / 2; A, B and P are the numbers of the operands that follow the accumulator.
#define HA_WGMMA(kElement, kType, kColumns, kRegisters, A, B, P)                                                 \
  template <>                                                                                                    \
  struct WgmmaSs<kElement, kColumns> {                                                                           \
    CUTE_DEVICE static void fma(uint64_t a, uint64_t b, float* d, GMMA::ScaleOut accumulate) {                   \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P ", 0; wgmma.mma_async.sync.aligned.m64n" #kColumns      \
                   "k16.f32." kType "." kType " {" HA_NAMES_##kRegisters "}, %" #A ", %" #B ", p, 1, 1, 0, 0; }" \
                   : HA_OPERANDS_##kRegisters                                                                    \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                         \
    }                                                                                                            \
  };
HA_WGMMA(cutlass::bfloat16_t, "bf16", 80, 40, 40, 41, 42)
HA_WGMMA(cutlass::half_t, "f16", 80, 40, 40, 41, 42)
HA_WGMMA(cutlass::bfloat16_t, "bf16", 112, 56, 56, 57, 58)
HA_WGMMA(cutlass::half_t, "f16", 112, 56, 56, 57, 58)
HA_WGMMA(cutlass::bfloat16_t, "bf16", 136, 68, 68, 69, 70)
HA_WGMMA(cutlass::half_t, "f16", 136, 68, 68, 69, 70)
HA_WGMMA(cutlass::bfloat16_t, "bf16", 160, 80, 80, 81, 82)
HA_WGMMA(cutlass::half_t, "f16", 160, 80, 80, 81, 82)
HA_WGMMA(cutlass::bfloat16_t, "bf16", 176, 88, 88, 89, 90)
HA_WGMMA(cutlass::half_t, "f16", 176, 88, 88, 89, 90)
#undef HA_WGMMA
#undef HA_OPERANDS_88
#undef HA_OPERANDS_80
#undef HA_OPERANDS_72
#undef HA_OPERANDS_68
#undef HA_OPERANDS_64
#undef HA_OPERANDS_56
#undef HA_OPERANDS_40
#undef HA_EIGHT
#undef HA_NAMES_88
#undef HA_NAMES_80
#undef HA_NAMES_72
#undef HA_NAMES_68
#undef HA_NAMES_56
#undef HA_NAMES_40

// The instruction for S = Q K^T with blocks of `kKeys` keys: CuTe's where it has one, else the one above.
template <class Element, int kKeys, int kHeadDim>
constexpr auto select_mma_qk() {
  if constexpr (kKeys == 80 || kKeys == 112 || kKeys == 136 || kKeys == 160 || kKeys == 176) {
    return WgmmaSs<Element, kKeys>{};
  } else {
    return GMMA::ss_op_selector<Element, Element, float, Shape<Int<64>, Int<kKeys>, Int<kHeadDim>>>();
  }
}

}  // namespace hopper_attention

namespace cute {

template <class Element, int kColumns>
struct MMA_Traits<hopper_attention::WgmmaSs<Element, kColumns>> {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = GMMA::smem_desc<GMMA::Major::K>;
  using FrgTypeB = GMMA::smem_desc<GMMA::Major::K>;
  using Shape_MNK = Shape<_64, Int<kColumns>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ABLayout<64, 16>;
  using BLayout = GMMA::ABLayout<kColumns, 16>;
  using CLayout = GMMA::CLayout_64xN<kColumns>;

  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;

  template <class TD, class DLayout, class TA, class ALayout_, class TB, class BLayout_, class TC, class CLayout_>
  CUTE_HOST_DEVICE constexpr friend void mma_unpack(MMA_Traits const& traits, Tensor<TD, DLayout>& d,
                                                    Tensor<TA, ALayout_> const& a, Tensor<TB, BLayout_> const& b,
                                                    Tensor<TC, CLayout_> const&) {
    hopper_attention::WgmmaSs<Element, kColumns>::fma(a[0], b[0], raw_pointer_cast(d.data()), traits.accumulate_);
  }
};

}  // namespace cute
