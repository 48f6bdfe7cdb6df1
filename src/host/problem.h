// Shape and options -> Problem.
#pragma once

#include <cstdint>

#include "hopper_attention/forward.h"

namespace hopper_attention {

// Whether the device alone knows the lengths of the sequences.
bool has_lengths_on_device(Arguments const& args);

// make_problem() for a caller that knows how many rows q, and packed k, have in all sequences.
Problem make_problem(ProblemShape const& shape, Arguments const& options, std::int64_t total_q, std::int64_t total_k);

}  // namespace hopper_attention
