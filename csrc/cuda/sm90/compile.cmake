# SPDX-License-Identifier: Apache-2.0
#
# cmake -P compile.cmake -- <command>: runs a compiler and fails where ptxas reports a
# performance loss, which it calls neither a warning nor an error: products that it runs
# one after the other, a wait for products that it adds, a setmaxnreg that it ignores.
cmake_minimum_required(VERSION 3.24)

set(command)
set(output)
set(in_command FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(index RANGE ${last})
  set(argument "${CMAKE_ARGV${index}}")
  if(in_command)
    list(APPEND command "${argument}")
    if(previous STREQUAL "-o")
      set(output "${argument}")
    endif()
  elseif(argument STREQUAL "--")
    set(in_command TRUE)
  endif()
  set(previous "${argument}")
endforeach()

execute_process(COMMAND ${command}
  OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE result)
if(text)
  message("${text}")
endif()
if(text MATCHES "Potential Performance Loss|warpgroup.wait is injected")
  file(REMOVE "${output}")
  message(FATAL_ERROR "ptxas gave up what the kernel is built on")
elseif(NOT result EQUAL 0)
  message(FATAL_ERROR "the compiler failed")
endif()
