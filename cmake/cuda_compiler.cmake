# The CUDA compiler: CUDACXX or CMAKE_CUDA_COMPILER if set, else the one of the PyPI wheels, else the system's. The wheels
# have no libcudart.so, at which find_package(CUDAToolkit) fails: headers and the static runtime are taken from the
# compiler's own tree.
function(find_in_wheels out path)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/find_in_wheels.py ${path}
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${out} ${found} PARENT_SCOPE)
endfunction()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_in_wheels(wheel_nvcc nvidia/cu13/bin/nvcc)
  if(wheel_nvcc)
    set(CMAKE_CUDA_COMPILER ${wheel_nvcc})
  endif()
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()

set(CMAKE_CUDA_ARCHITECTURES 90a-real)
set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # linked below, also by targets without CUDA sources
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "CUDA 12.8 or newer is needed, found ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER})")
endif()

find_library(cudart_static_library cudart_static REQUIRED NO_CACHE
  HINTS ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} NO_DEFAULT_PATH)
find_package(Threads REQUIRED)
add_library(cudart_static STATIC IMPORTED)
set_target_properties(cudart_static PROPERTIES
  IMPORTED_LOCATION ${cudart_static_library}
  INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}"
  INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")

set(cutlass_include ${HOPPER_ATTENTION_CUTLASS_INCLUDE})
if(NOT cutlass_include)
  find_in_wheels(cutlass_include cutlass_library/source/include)
endif()
if(NOT EXISTS "${cutlass_include}/cutlass/cutlass.h")
  message(FATAL_ERROR "No CUTLASS headers found: pip install --no-deps nvidia-cutlass==4.2.0.0 for ${Python_EXECUTABLE}, "
    "or set HOPPER_ATTENTION_CUTLASS_INCLUDE")
endif()
