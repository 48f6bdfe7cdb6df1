// A Python tensor -> hopper_attention::Tensor.
#pragma once

#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "dlpack_exchange.h"
#include "hopper_attention/types.h"

namespace hopper_attention::python {

namespace nb = nanobind;

// A tensor argument for the time of one call. Reads it through the DLPack C exchange API of its type (0.1 us), else
// through nb::ndarray, that is __dlpack__ or the buffer protocol (3 us). None is a tensor that is not given.
class TensorArgument {
 public:
  // Raises TypeError, naming the argument, for an object that is no tensor; ValueError for memory that is neither CUDA
  // nor host.
  TensorArgument(char const* name, nb::handle object);

  Tensor const& tensor() const { return tensor_; }

  // The stream on which the tensor's framework works now on the tensor's device; null, the default stream, if it does
  // not say.
  Stream current_stream() const;

 private:
  Tensor tensor_;
  dlpack::ExchangeApi const* api_ = nullptr;
  std::optional<nb::ndarray<nb::ro>> kept_;  // what the fallback borrows from
};

// Into `tensor`, which is not given yet. Raises ValueError, naming the argument, for memory that is neither CUDA nor
// host, and for too many dims.
void read_tensor(char const* name, dlpack::DLTensor const& source, Tensor& tensor);

// The stream on which the framework of `api` works now on `device`; null on the CPU.
Stream current_stream(dlpack::ExchangeApi const& api, int device);

// For tests: whether tensors in host memory count as tensors of CUDA device 0.
void count_host_memory_as_cuda(bool counts);

// The exchange table of tensors of `type`, nullptr if it has none that this module understands.
dlpack::ExchangeApi const* exchange_api(nb::handle type);

}  // namespace hopper_attention::python
