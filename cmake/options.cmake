# What a build can be asked for. Every option is also read from the environment variable of the same name, so that
# `HOPPER_ATTENTION_HEAD_DIMS=128 pip install .` works; -D on the command line wins.

# Lists may be separated by commas or spaces in the environment, where a semicolon needs quotes.
function(hopper_attention_option name type default help)
  if(DEFINED ENV{${name}} AND NOT "$ENV{${name}}" STREQUAL "")
    string(REGEX REPLACE "[, ]+" ";" default "$ENV{${name}}")
  endif()
  set(${name} "${default}" CACHE ${type} "${help}")
endfunction()

hopper_attention_option(HOPPER_ATTENTION_HEAD_DIMS STRING "all" "Head dims to build kernels for, e.g. 64;128, or all")
hopper_attention_option(HOPPER_ATTENTION_DTYPES STRING "all" "Element types to build kernels for, e.g. bf16;fp16, or all")
hopper_attention_option(HOPPER_ATTENTION_HOST_ONLY BOOL OFF "Leave out the kernels and everything that needs CUDA")
hopper_attention_option(HOPPER_ATTENTION_PREBUILT PATH "" "Directory of a built libhopper_attention.so to take instead of building one")
hopper_attention_option(HOPPER_ATTENTION_CUTLASS_INCLUDE PATH "" "CUTLASS headers; default: those of the nvidia-cutlass wheel")
hopper_attention_option(HOPPER_ATTENTION_KERNEL_JOBS STRING "" "Kernel files compiled at a time; default: as many as free memory holds")
hopper_attention_option(HOPPER_ATTENTION_KERNEL_PARTS STRING "" "Files that share the kernels of a head dim; default: as many as keep all kernel jobs busy")
hopper_attention_option(HOPPER_ATTENTION_WERROR BOOL OFF "Compiler warnings are errors")

# scikit-build-core defines SKBUILD: a wheel is the Python package and no tests.
if(DEFINED SKBUILD)
  set(for_wheel ON)
  set(for_development OFF)
else()
  set(for_wheel OFF)
  set(for_development ON)
endif()
option(HOPPER_ATTENTION_PYTHON "Build the Python module" ${for_wheel})
option(HOPPER_ATTENTION_TESTS "Build the C++ tests" ${for_development})
