// Every failure is one of these exceptions; nothing in the library calls exit() or abort().
#pragma once

#include <stdexcept>

#include "hopper_attention/types.h"

namespace hopper_attention {

// Base of all errors that the library raises.
class HOPPER_ATTENTION_EXPORT Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A value that is not allowed: ValueError in Python.
class HOPPER_ATTENTION_EXPORT InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A dtype or kind of object that is not allowed: TypeError in Python.
class HOPPER_ATTENTION_EXPORT InvalidType : public Error {
 public:
  using Error::Error;
};

// A feature or kernel that this build does not have: NotImplementedError in Python.
class HOPPER_ATTENTION_EXPORT NotImplemented : public Error {
 public:
  using Error::Error;
};

// The driver, the device or a launch failed: RuntimeError in Python.
class HOPPER_ATTENTION_EXPORT CudaError : public Error {
 public:
  using Error::Error;
};

}  // namespace hopper_attention
