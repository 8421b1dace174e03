# SPDX-License-Identifier: Apache-2.0
#
# libjaxflash: the C API over all kernels, and its CMake package.

# What every part of the library is compiled with: jaxflash itself and the object
# libraries of its kernels.
add_library(jaxflash_options INTERFACE)
target_include_directories(jaxflash_options INTERFACE
  ${PROJECT_SOURCE_DIR}/csrc ${PROJECT_SOURCE_DIR}/csrc/include)
target_compile_options(jaxflash_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic>)

add_library(jaxflash SHARED
  csrc/api/status.cc csrc/api/support.cc csrc/api/tensor_checks.cc csrc/api/validate.cc)
add_library(jaxflash::jaxflash ALIAS jaxflash)
target_link_libraries(jaxflash PRIVATE $<BUILD_INTERFACE:jaxflash_options>)
target_link_options(jaxflash PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL)
target_include_directories(jaxflash INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc/include>
  $<INSTALL_INTERFACE:${install_includedir}>)
if(NOT SKBUILD)
  # The library takes structs of its own exact size, and a minor version may change it.
  set_target_properties(jaxflash PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()

add_subdirectory(csrc/cpu)
target_sources(jaxflash PRIVATE $<TARGET_OBJECTS:jaxflash_cpu>)
if(JAXFLASH_WITH_CUDA)
  add_subdirectory(csrc/cuda)
  target_sources(jaxflash PRIVATE $<TARGET_OBJECTS:jaxflash_cuda>)
  if(TARGET jaxflash_cuda_sm90)
    target_sources(jaxflash PRIVATE $<TARGET_OBJECTS:jaxflash_cuda_sm90>)
  endif()
  set(jaxflash_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
  set(jaxflash_CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
else()
  target_sources(jaxflash PRIVATE csrc/cuda_unavailable.cc)
endif()

include(CMakePackageConfigHelpers)
set(package_dir ${install_libdir}/cmake/jaxflash)
configure_package_config_file(cmake/jaxflashConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/jaxflashConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(
  ${CMAKE_CURRENT_BINARY_DIR}/jaxflashConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(TARGETS jaxflash EXPORT jaxflash
  LIBRARY DESTINATION ${install_libdir}
  ARCHIVE DESTINATION ${install_libdir}
  RUNTIME DESTINATION ${install_libdir})
install(DIRECTORY csrc/include/jaxflash DESTINATION ${install_includedir})
install(EXPORT jaxflash NAMESPACE jaxflash:: FILE jaxflashTargets.cmake
  DESTINATION ${package_dir})
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/jaxflashConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/jaxflashConfigVersion.cmake
  DESTINATION ${package_dir})
