# The kernel objects, and the CUDA runtime that they and the host code link statically.
include(cuda_compiler)

# In front of the long files, which end in pairs of equal length.
foreach(unit combine append schedule)
  list(PREPEND kernel_sources ${CMAKE_CURRENT_SOURCE_DIR}/src/instantiations/${unit}.cu)
  list(APPEND kernel_units ${unit})
endforeach()
# What ptxas said of files that were part of this build tree before.
file(GLOB ptxas_logs ${CMAKE_CURRENT_BINARY_DIR}/ptxas/*.txt)
foreach(log IN LISTS ptxas_logs)
  get_filename_component(unit ${log} NAME_WE)
  if(NOT unit IN_LIST kernel_units)
    file(REMOVE ${log})
  endif()
endforeach()
add_library(hopper_attention_kernels OBJECT ${kernel_sources})
target_include_directories(hopper_attention_kernels PRIVATE include src)
target_include_directories(hopper_attention_kernels SYSTEM PRIVATE ${cutlass_include})
target_compile_features(hopper_attention_kernels PRIVATE cuda_std_20)
# Without the GDC define, the waits of dependent launches compile to nothing.
target_compile_definitions(hopper_attention_kernels PRIVATE CUTLASS_ENABLE_GDC_FOR_SM90 NDEBUG)
target_compile_options(hopper_attention_kernels PRIVATE
  -O3 --expt-relaxed-constexpr
  -Xcompiler=-fvisibility=hidden
  -Xptxas=-v)
set_target_properties(hopper_attention_kernels PROPERTIES
  CUDA_ARCHITECTURES 90a-real
  CUDA_SEPARABLE_COMPILATION OFF
  UNITY_BUILD ON  # of CUDA sources by CMake 3.31 and newer; the groups stand in instantiations.cmake
  UNITY_BUILD_MODE GROUP
  # wgmma serialisation is only an informational note to ptxas; the gate makes it an error.
  CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE};${CMAKE_CURRENT_SOURCE_DIR}/cmake/ptxas_gate.py;${CMAKE_CURRENT_BINARY_DIR}/ptxas"
  JOB_POOL_COMPILE kernels)

set_property(GLOBAL APPEND PROPERTY JOB_POOLS kernels=${kernel_jobs})
message(STATUS "Kernels: ${kernel_jobs} files at a time, ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}")
