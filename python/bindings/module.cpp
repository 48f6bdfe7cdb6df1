// _core: the C++ API for Python. It translates and decides nothing.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "hopper_attention/errors.h"

namespace nb = nanobind;

namespace {

void translate(std::exception_ptr const& exception, void* /*unused*/) {
  try {
    std::rethrow_exception(exception);
  } catch (hopper_attention::InvalidArgument const& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (hopper_attention::InvalidType const& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (hopper_attention::NotImplemented const& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (hopper_attention::Error const& error) { PyErr_SetString(PyExc_RuntimeError, error.what()); }
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "Attention kernels for NVIDIA Hopper: the C++ API. Use the functions of hopper_attention instead.";
  nb::set_leak_warnings(false);  // a Plan in a global variable of the user is no reason to print
  nb::register_exception_translator(translate);
  module.def("version", &hopper_attention::version, "Version of the library.");
  hopper_attention::python::bind_device(module);
  hopper_attention::python::bind_plan(module);
  hopper_attention::python::bind_forward(module);
  hopper_attention::python::bind_attend(module);
  hopper_attention::python::bind_operator_arguments(module);
  hopper_attention::python::bind_torch(module);
  hopper_attention::python::bind_schedule(module);
  hopper_attention::python::bind_append(module);
  hopper_attention::python::bind_combine(module);
  hopper_attention::python::bind_testing(module);
}
