# SPDX-License-Identifier: Apache-2.0
#
# Decides whether CUDA kernels are built and with which nvcc. Sets JAXFLASH_WITH_CUDA.
# An explicit CMAKE_CUDA_COMPILER or CUDACXX wins, then the system's nvcc, then that of
# the CUDA wheels in the build environment's Python.

set(JAXFLASH_WITH_CUDA OFF)
if(NOT JAXFLASH_CUDA)
  message(STATUS "jaxflash: CUDA kernels are off (JAXFLASH_CUDA=${JAXFLASH_CUDA})")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(JAXFLASH_NVCC nvcc
    HINTS ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda /opt/cuda
    PATH_SUFFIXES bin)
  if(NOT JAXFLASH_NVCC)
    find_package(Python 3.11 COMPONENTS Interpreter)
  endif()
  if(NOT JAXFLASH_NVCC AND Python_Interpreter_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('nvidia')
print(';'.join(s.submodule_search_locations) if s else '')"
      OUTPUT_VARIABLE nvidia_dirs OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(TRANSFORM nvidia_dirs APPEND "/cu13/bin")
    find_program(JAXFLASH_NVCC nvcc PATHS ${nvidia_dirs} NO_DEFAULT_PATH)
  endif()
  if(JAXFLASH_NVCC)
    set(CMAKE_CUDA_COMPILER "${JAXFLASH_NVCC}" CACHE FILEPATH "nvcc")
  endif()
endif()

if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_ARCHITECTURES ${JAXFLASH_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  # Hidden from the linker's search: a wheel must not need a CUDA runtime on its machine.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(JAXFLASH_WITH_CUDA ON)
  message(STATUS "jaxflash: CUDA kernels with ${CMAKE_CUDA_COMPILER} "
                 "${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
elseif(JAXFLASH_CUDA STREQUAL "AUTO")
  message(STATUS "jaxflash: no nvcc found, so this is a CPU-only build. Put nvcc on PATH, "
                 "set CUDACXX, or build with the CUDA wheels (make CUDA=pip)")
else()
  message(FATAL_ERROR "JAXFLASH_CUDA=${JAXFLASH_CUDA} needs nvcc, but none was found on "
                      "PATH, in CUDACXX or among the build environment's CUDA wheels")
endif()
