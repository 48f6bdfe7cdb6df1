# hopper_attention_warnings(<target>): warnings for C++ that is ours; third-party headers are system headers.
function(hopper_attention_warnings target)
  # GCC 12 reports array-bounds inside std::sort of short arrays, wrongly.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wno-missing-field-initializers;-Wno-array-bounds>)
  if(HOPPER_ATTENTION_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
endfunction()
