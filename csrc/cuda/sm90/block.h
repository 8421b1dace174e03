// SPDX-License-Identifier: Apache-2.0
//
// What every block of the Hopper kernels has to do with.
#pragma once

namespace jaxflash::sm90 {

constexpr int kWarpgroup = 128;  // threads

// What a block may use of an SM.
constexpr int kSharedMemory = 232448;  // bytes
constexpr int kRegisters = 65536;

}  // namespace jaxflash::sm90
