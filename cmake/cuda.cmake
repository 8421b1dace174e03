# SPDX-License-Identifier: Apache-2.0
#
# Decides whether CUDA kernels are built and with which nvcc. Sets JAXFLASH_WITH_CUDA.
# An explicit CMAKE_CUDA_COMPILER or CUDACXX wins, then the system's nvcc, then that of
# the CUDA wheels in the build environment's Python.

# sm_80 as SASS and PTX, sm_90 and sm_120 as SASS. The code of sm_80 also runs on 8.6,
# 8.7 and 8.9 (same major version), and its PTX on whatever is not listed: each further
# architecture would cost megabytes and minutes without making a kernel faster.
set(default_architectures 80 90-real 120-real)

set(JAXFLASH_WITH_CUDA OFF)
string(TOUPPER "${JAXFLASH_CUDA}" cuda_mode)
if(cuda_mode STREQUAL "")
  set(cuda_mode AUTO)
endif()
if(NOT cuda_mode MATCHES "^(AUTO|ON|PIP|OFF)$")
  message(FATAL_ERROR "JAXFLASH_CUDA must be AUTO, ON, PIP or OFF, got ${JAXFLASH_CUDA}")
endif()
if(cuda_mode STREQUAL "OFF")
  message(STATUS "jaxflash: CPU-only build, as JAXFLASH_CUDA=${JAXFLASH_CUDA} asks")
  return()
endif()

# Sets `nvcc` to the compiler of the wheels nvidia-cuda-nvcc and friends, if installed,
# and `wheel_python` to the interpreter that was asked for them.
function(find_wheel_nvcc)
  find_package(Python 3.11 COMPONENTS Interpreter)
  if(NOT Python_Interpreter_FOUND)
    set(wheel_python "a Python of at least 3.11" PARENT_SCOPE)
    return()
  endif()
  set(wheel_python "${Python_EXECUTABLE}" PARENT_SCOPE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('nvidia')
print(';'.join(s.submodule_search_locations) if s else '')"
    OUTPUT_VARIABLE folders OUTPUT_STRIP_TRAILING_WHITESPACE)
  list(TRANSFORM folders APPEND "/cu13/bin")
  find_program(nvcc nvcc PATHS ${folders} NO_DEFAULT_PATH NO_CACHE)
  set(nvcc "${nvcc}" PARENT_SCOPE)
endfunction()

if(cuda_mode STREQUAL "PIP")
  find_wheel_nvcc()
elseif(CMAKE_CUDA_COMPILER)
  set(nvcc "${CMAKE_CUDA_COMPILER}")
elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
  set(nvcc "$ENV{CUDACXX}")
else()
  find_program(nvcc nvcc
    HINTS ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda /opt/cuda
    PATH_SUFFIXES bin
    NO_CACHE)
  if(NOT nvcc)
    find_wheel_nvcc()
  endif()
endif()

if(nvcc)
  set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "nvcc" FORCE)
  if(NOT JAXFLASH_CUDA_ARCHITECTURES)
    set(JAXFLASH_CUDA_ARCHITECTURES ${default_architectures})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${JAXFLASH_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  # The library must load on machines that have no CUDA runtime.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  set(JAXFLASH_WITH_CUDA ON)
  message(STATUS "jaxflash: CUDA kernels by ${nvcc} ${CMAKE_CUDA_COMPILER_VERSION} "
                 "for ${CMAKE_CUDA_ARCHITECTURES}")
elseif(cuda_mode STREQUAL "AUTO")
  message(STATUS "jaxflash: no nvcc was found, so this is a CPU-only build. Put nvcc on "
                 "PATH, set CUDACXX, or set JAXFLASH_CUDA=pip to build with CUDA wheels")
else()
  message(FATAL_ERROR "JAXFLASH_CUDA=${JAXFLASH_CUDA} needs nvcc, but none was found: "
    "put it on PATH, set CUDACXX, or install the wheels nvidia-cuda-nvcc, "
    "nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime and nvidia-cuda-cccl for "
    "${wheel_python}")
endif()
