#include "tensor_argument.h"

#include <array>
#include <string>

#include "hopper_attention/errors.h"

namespace hopper_attention::python {
namespace {

using dlpack::DLTensor;
using dlpack::ExchangeApi;

DataType data_type(nb::dlpack::dtype dtype) {
  if (dtype.lanes != 1) { return DataType::kUnsupported; }
  if (dtype.code == dlpack::kBfloat && dtype.bits == 16) { return DataType::kBFloat16; }
  if (dtype.code == dlpack::kFloat && dtype.bits == 16) { return DataType::kFloat16; }
  if (dtype.code == dlpack::kFloat && dtype.bits == 32) { return DataType::kFloat32; }
  if (dtype.code == dlpack::kInt && dtype.bits == 32) { return DataType::kInt32; }
  if (dtype.code == dlpack::kUInt && dtype.bits == 8) { return DataType::kUInt8; }
  return DataType::kUnsupported;
}

std::string name_of_type(nb::handle object) { return nb::str(object.type().attr("__name__")).c_str(); }

ExchangeApi const* look_up(nb::handle type) {
  nb::object const capsule = nb::getattr(type, dlpack::kTypeAttribute, nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) { return nullptr; }
  auto const* header =
      static_cast<dlpack::ExchangeApiHeader const*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  while (header != nullptr && header->version.major != dlpack::kMajorVersion) { header = header->prev_api; }
  return reinterpret_cast<ExchangeApi const*>(header);
}

// Types whose table was found. They are few (torch.Tensor, Parameter) and are kept alive, so that their addresses stay
// theirs. Guarded by the GIL.
struct KnownType {
  PyObject* type = nullptr;
  ExchangeApi const* api = nullptr;
};
constinit std::array<KnownType, 4> known_types{};

constinit bool host_counts_as_cuda = false;

}  // namespace

void count_host_memory_as_cuda(bool counts) { host_counts_as_cuda = counts; }

ExchangeApi const* exchange_api(nb::handle type) {
  for (KnownType& known : known_types) {
    if (known.type == type.ptr()) { return known.api; }
    if (known.type != nullptr) { continue; }
    ExchangeApi const* const api = look_up(type);
    if (api != nullptr) { known = {type.inc_ref().ptr(), api}; }
    return api;
  }
  return look_up(type);
}

TensorArgument::TensorArgument(char const* name, nb::handle object) {
  if (object.is_none()) { return; }
  api_ = exchange_api(object.type());
  if (api_ != nullptr && api_->dltensor_from_py_object_no_sync != nullptr) {
    DLTensor source;
    if (api_->dltensor_from_py_object_no_sync(object.ptr(), &source) == 0) {
      read_tensor(name, source, tensor_);
      return;
    }
    nb::python_error cause;
    nb::raise_from(cause, PyExc_TypeError,
                   "%s: this %s has no memory that a kernel could read (a FakeTensor, a tensor inside "
                   "torch.func or torch.compile, a sparse or meta tensor?)",
                   name, name_of_type(object).c_str());
  }
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(object, array)) {
    throw InvalidType(std::string(name) + ": a tensor is needed, found " + name_of_type(object));
  }
  DLTensor source;
  source.data = const_cast<void*>(static_cast<void const*>(array.data()));
  source.device = {array.device_type(), array.device_id()};
  source.ndim = static_cast<std::int32_t>(array.ndim());
  source.dtype = array.dtype();
  source.shape = const_cast<std::int64_t*>(array.shape_ptr());
  source.strides = const_cast<std::int64_t*>(array.stride_ptr());
  kept_ = std::move(array);
  read_tensor(name, source, tensor_);
}

void read_tensor(char const* name, DLTensor const& source, Tensor& tensor) {
  bool const cuda = source.device.device_type == dlpack::kCuda;
  if (!cuda && source.device.device_type != dlpack::kCpu && source.device.device_type != dlpack::kCudaHost) {
    throw InvalidArgument(std::string(name) + ": must be in the memory of a CUDA device, found DLPack device type " +
                          std::to_string(source.device.device_type));
  }
  if (source.ndim > kMaxRank) {
    throw InvalidArgument(std::string(name) + ": at most " + std::to_string(kMaxRank) + " dims are possible, found " +
                          std::to_string(source.ndim));
  }
  tensor.data = source.data == nullptr ? nullptr : static_cast<char*>(source.data) + source.byte_offset;
  tensor.dtype = data_type(source.dtype);
  tensor.device = cuda ? source.device.device_id : host_counts_as_cuda ? 0 : kCpuDevice;
  tensor.rank = source.ndim;
  if (source.strides != nullptr) {
    for (int dim = 0; dim < source.ndim; ++dim) {
      tensor.shape[dim] = source.shape[dim];
      tensor.stride[dim] = source.strides[dim];
    }
  } else {  // before DLPack 1.2 a contiguous tensor
    std::int64_t stride = 1;
    for (int dim = source.ndim - 1; dim >= 0; --dim) {
      tensor.shape[dim] = source.shape[dim];
      tensor.stride[dim] = stride;
      stride *= tensor.shape[dim];
    }
  }
}

Stream current_stream(ExchangeApi const& api, int device) {
  if (device == kCpuDevice || host_counts_as_cuda) { return nullptr; }
  void* stream = nullptr;
  if (api.current_work_stream(dlpack::kCuda, device, &stream) != 0) { throw nb::python_error(); }
  return static_cast<Stream>(stream);
}

Stream TensorArgument::current_stream() const {
  return api_ == nullptr ? nullptr : python::current_stream(*api_, tensor_.device);
}

}  // namespace hopper_attention::python
