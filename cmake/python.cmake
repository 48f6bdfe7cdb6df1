# The nanobind module, beside libhopper_attention.so in the Python package.
execute_process(
  COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE)
find_package(nanobind CONFIG REQUIRED)

file(GLOB binding_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/python/bindings/*.cpp)
nanobind_add_module(_core STABLE_ABI NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS ${binding_sources})
target_link_libraries(_core PRIVATE hopper_attention::hopper_attention)
hopper_attention_warnings(_core)
set_target_properties(_core PROPERTIES
  LIBRARY_OUTPUT_DIRECTORY ${package_dir}
  BUILD_RPATH_USE_ORIGIN ON
  INSTALL_RPATH $ORIGIN)

# Which kernels the package has: reports of the benchmark name them by this hash.
set(kernel_sources_hash ${package_dir}/kernel_sources.sha256)
add_custom_target(kernel_sources_hash ALL
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/kernel_sources_hash ${kernel_sources_hash}
  BYPRODUCTS ${kernel_sources_hash}
  COMMENT "Hash of the kernel sources")

# A build tree holds a whole package, so that PYTHONPATH=<build>/python runs it: the Python files are links to the sources.
if(NOT DEFINED SKBUILD)
  file(MAKE_DIRECTORY ${package_dir})
  file(GLOB package_files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/python/hopper_attention/*)
  foreach(file IN LISTS package_files)
    get_filename_component(name ${file} NAME)
    if(NOT name MATCHES "\\.so$|^__pycache__$")
      file(CREATE_LINK ${file} ${package_dir}/${name} SYMBOLIC)
    endif()
  endforeach()
endif()
