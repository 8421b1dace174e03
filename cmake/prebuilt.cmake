# SPDX-License-Identifier: Apache-2.0
#
# Binds a libjaxflash that was built before, for another Python for instance.
find_package(jaxflash ${PROJECT_VERSION} EXACT REQUIRED CONFIG
  PATHS "${JAXFLASH_PREBUILT_DIR}" NO_DEFAULT_PATH)
message(STATUS "jaxflash: binding the libjaxflash of ${jaxflash_DIR}")
if(SKBUILD)
  get_filename_component(prebuilt_package "${jaxflash_DIR}/../../.." ABSOLUTE)
  install(DIRECTORY "${prebuilt_package}/lib" "${prebuilt_package}/include"
    DESTINATION jaxflash)
endif()
