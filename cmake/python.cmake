# SPDX-License-Identifier: Apache-2.0
#
# The modules jaxflash._cpu and jaxflash._cuda: XLA FFI handlers over libjaxflash.

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module
  OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

# The FFI refuses handlers that were compiled against a newer API than the running
# jaxlib has, and keeps older ones for a year or more: build with the oldest jaxlib that
# is supported, as pyproject.toml does, and one binary serves them all.
if(NOT JAXFLASH_FFI_INCLUDE_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('jaxlib')
print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE jaxlib_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(JAXFLASH_FFI_INCLUDE_DIR "${jaxlib_dir}/include")
endif()
if(NOT EXISTS "${JAXFLASH_FFI_INCLUDE_DIR}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "The XLA FFI headers were not found: install jaxlib for "
    "${Python_EXECUTABLE} or set JAXFLASH_FFI_INCLUDE_DIR (now "
    "'${JAXFLASH_FFI_INCLUDE_DIR}')")
endif()
message(STATUS "jaxflash: XLA FFI headers of ${JAXFLASH_FFI_INCLUDE_DIR}")

function(jaxflash_add_module name)
  nanobind_add_module(${name} STABLE_ABI NB_STATIC
    csrc/ffi/bind.cc csrc/ffi/slots.cc csrc/python/call_types.cc
    csrc/python/module.cc ${ARGN})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
  target_include_directories(${name} SYSTEM PRIVATE ${JAXFLASH_FFI_INCLUDE_DIR})
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  target_link_libraries(${name} PRIVATE jaxflash::jaxflash)
  set_target_properties(${name} PROPERTIES
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "\$ORIGIN/lib")
  install(TARGETS ${name} LIBRARY DESTINATION jaxflash)
endfunction()

jaxflash_add_module(_cpu csrc/ffi/cpu.cc csrc/python/cpu_module.cc)
if(jaxflash_CUDA_ARCHITECTURES)
  jaxflash_add_module(_cuda
    csrc/ffi/cuda.cc csrc/python/cuda_module.cc csrc/python/explain.cc)
  list(JOIN jaxflash_CUDA_ARCHITECTURES "," architectures)
  target_compile_definitions(_cuda PRIVATE
    "JAXFLASH_CUDA_ARCHITECTURES=\"${architectures}\""
    "JAXFLASH_CUDA_VERSION=\"${jaxflash_CUDA_VERSION}\"")
endif()
