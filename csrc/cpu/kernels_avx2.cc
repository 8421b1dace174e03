// SPDX-License-Identifier: Apache-2.0
#define JAXFLASH_CPU_TARGET avx2
#include "cpu/kernels_impl.h"
