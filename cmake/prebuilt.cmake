# libhopper_attention.so as another build of the same sources made it.
set(prebuilt_library ${HOPPER_ATTENTION_PREBUILT}/libhopper_attention.so)
if(NOT EXISTS ${prebuilt_library})
  message(FATAL_ERROR "HOPPER_ATTENTION_PREBUILT: there is no ${prebuilt_library}")
endif()
add_library(hopper_attention SHARED IMPORTED)
add_library(hopper_attention::hopper_attention ALIAS hopper_attention)
set_target_properties(hopper_attention PROPERTIES
  IMPORTED_LOCATION ${prebuilt_library}
  INTERFACE_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_SOURCE_DIR}/include
  INTERFACE_COMPILE_FEATURES cxx_std_20)
