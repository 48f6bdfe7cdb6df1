// The parts of the module, each with its own file.
#pragma once

#include <string>

#include <nanobind/nanobind.h>

#include "hopper_attention/forward.h"

namespace hopper_attention::python {

namespace nb = nanobind;

void bind_forward(nb::module_& module);
void bind_attend(nb::module_& module);
void bind_operator_arguments(nb::module_& module);
void bind_torch(nb::module_& module);
void bind_append(nb::module_& module);
void bind_combine(nb::module_& module);
void bind_schedule(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_device(nb::module_& module);
void bind_testing(nb::module_& module);

// "bfloat16", "float16", "float32", "int32", "uint8"; "unsupported" for anything else.
char const* dtype_text(DataType dtype);
char const* family_text(KernelFamily family);
DataType parse_dtype(std::string const& text);  // kUnsupported for anything else

}  // namespace hopper_attention::python
