// Kernels with one bug each, which prove that a tool of compute-sanitizer sees such bugs.
#pragma once

#include <string>
#include <vector>

namespace plants {

// Names for run(); each is a tool, or a tool and what of it is proven: "memcheck", "memcheck-tensor", "racecheck",
// "synccheck", "initcheck".
std::vector<std::string> names();

// Runs the kernel with that bug; false if there is no such plant, or it could not be run for another reason.
bool run(std::string const& name);

}  // namespace plants
