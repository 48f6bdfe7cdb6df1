# In a wheel everything goes into the Python package: the library beside the module, headers in include/, the CMake package
# in lib/cmake/, where find_package sees it with CMAKE_PREFIX_PATH=$(python -m hopper_attention.cmake_dir).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(DEFINED SKBUILD)
  set(library_dir .)
  set(include_dir include)
  set(config_dir lib/cmake/hopper_attention)
else()
  set(library_dir ${CMAKE_INSTALL_LIBDIR})
  set(include_dir ${CMAKE_INSTALL_INCLUDEDIR})
  set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hopper_attention)
endif()

if(HOPPER_ATTENTION_PREBUILT)
  install(FILES ${prebuilt_library} DESTINATION ${library_dir} COMPONENT library
    PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
else()
  install(TARGETS hopper_attention LIBRARY DESTINATION ${library_dir} COMPONENT library)
endif()
install(DIRECTORY include/hopper_attention DESTINATION ${include_dir} COMPONENT library FILES_MATCHING PATTERN "*.h")

set(config_build_dir ${CMAKE_CURRENT_BINARY_DIR}/cmake)
configure_package_config_file(cmake/hopper_attentionConfig.cmake.in ${config_build_dir}/hopper_attentionConfig.cmake
  INSTALL_DESTINATION ${config_dir} PATH_VARS library_dir include_dir)
write_basic_package_version_file(${config_build_dir}/hopper_attentionConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${config_build_dir}/hopper_attentionConfig.cmake ${config_build_dir}/hopper_attentionConfigVersion.cmake
  DESTINATION ${config_dir} COMPONENT library)

if(HOPPER_ATTENTION_PYTHON AND DEFINED SKBUILD)
  install(TARGETS _core LIBRARY DESTINATION . COMPONENT python)
  install(FILES ${kernel_sources_hash} DESTINATION . COMPONENT python)
endif()
