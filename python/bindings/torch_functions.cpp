#include "torch_functions.h"

#include <utility>

namespace hopper_attention::python {

constinit Torch torch{};

nb::object call(PyObject* function, std::initializer_list<PyObject*> args) {
  nb::object const kept = nb::borrow(function);  // use_torch() may let go of it meanwhile
  PyObject* const result = PyObject_Vectorcall(function, args.begin(), args.size(), nullptr);
  if (result == nullptr) { throw nb::python_error(); }
  return nb::steal(result);
}

bool is_watched() {
  int const has_modes = PyObject_IsTrue(call(torch.dispatch_modes).ptr());
  if (has_modes < 0) { throw nb::python_error(); }
  return has_modes != 0 || !call(torch.transform).is_none() || call(torch.is_tracing).ptr() == Py_True;
}

namespace {

void use_torch(nb::object tensor, nb::object parameter, nb::object is_grad_enabled, nb::object dispatch_modes,
               nb::object transform, nb::object is_tracing, nb::object empty_like, nb::object empty_output,
               nb::object empty_lse, nb::object empty_workspace) {
  Torch next;
  next.api = exchange_api(tensor);
  if (next.api != nullptr && next.api->dltensor_from_py_object_no_sync != nullptr) {
    next.tensor_type = tensor.release().ptr();
    next.parameter_type = parameter.release().ptr();
    next.is_grad_enabled = is_grad_enabled.release().ptr();
    next.dispatch_modes = dispatch_modes.release().ptr();
    next.transform = transform.release().ptr();
    next.is_tracing = is_tracing.release().ptr();
    next.empty_like = empty_like.release().ptr();
    next.empty_output = empty_output.release().ptr();
    next.empty_lse = empty_lse.release().ptr();
    next.empty_workspace = empty_workspace.release().ptr();
    next.requires_grad = nb::str("requires_grad").release().ptr();
  }
  Torch const before = std::exchange(torch, next);
  // A function that is replaced may hold tensors.
  for (PyObject* const held : {before.tensor_type, before.parameter_type, before.is_grad_enabled, before.dispatch_modes,
                               before.transform, before.is_tracing, before.empty_like, before.empty_output,
                               before.empty_lse, before.empty_workspace, before.requires_grad}) {
    Py_XDECREF(held);
  }
}

}  // namespace

void bind_torch(nb::module_& module) {
  module.def("use_torch", &use_torch, nb::arg("tensor"), nb::arg("parameter"), nb::arg("is_grad_enabled"),
             nb::arg("dispatch_modes"), nb::arg("transform"), nb::arg("is_tracing"), nb::arg("empty_like"),
             nb::arg("empty_output"), nb::arg("empty_lse"), nb::arg("empty_workspace"),
             "What attend_*() needs of torch: types of plain tensors; whether grad mode is on, how many dispatch modes "
             "and\n"
             "which transform there are, whether torch.jit.trace records; empty_like(x), empty_output(q, v), "
             "empty_lse(q),\n"
             "empty_workspace(bytes, q).\n"
             "Without effect if tensors of that type do not come in through the DLPack C exchange API.");
}

}  // namespace hopper_attention::python
