"""Gates of the portable kernels, csrc/cuda/sm80.

- stack: registers spilled past what was measured when the kernels were timed,
- HMMA: the tensor core instructions of a kernel, whose number follows from its tiles.
"""

import types

import sass

# The architecture that is disassembled.
ARCHITECTURE = "sm_90"

# Bytes of stack that a kernel may use: measured with nvcc 13.0. What is spilled lies
# outside the loop over full tiles, or is an address that the loop reads once.
MAX_STACK = {"forward": 96}
# sm_80 has no vector red, whose addresses do not fit the registers at H = 256.
MAX_STACK_SM80_BACKWARD = 96
# Two stages at H = 128, which the shared memory of an SM of 12.0 has no room for.
MAX_STACK_SM120_FORWARD = 104


def forward_products(config: types.SimpleNamespace) -> int:
    """m16n8k16 products of a warp, in the masked and in the full loop."""
    row_tiles = config.block_q // (16 * config.num_warps)
    scores = config.block_kv // 8 * (config.head_dim // 16)
    outputs = config.head_dim // 8 * (config.block_kv // 16)
    row_sums = config.block_kv // 16
    return 2 * row_tiles * (scores + outputs + row_sums)


def backward_products(config: types.SimpleNamespace) -> int:
    """m16n8k16 products of a warp: S, dP, dV, dK and dQ are of one size."""
    num_warps = config.block_kv // (16 * config.row_tiles) * config.split
    of_block = (config.block_q // 8) * (config.block_kv // 16) * (config.head_dim // 16)
    return 5 * of_block // num_warps


def check(kernels: list[sass.Kernel]) -> list[str]:
    """What is wrong with these kernels."""
    configs = {
        "forward": sass.table("sm80/tile_config.h", "ForwardConfig", "kForwardConfigs"),
        "backward": sass.table(
            "sm80/tile_config.h", "BackwardConfig", "kBackwardConfigs"
        ),
    }
    products = {"forward": forward_products, "backward": backward_products}
    errors = []
    for name, rows in configs.items():
        errors += sass.missing(kernels, "sm80", name, range(len(rows)))
    for kernel in kernels:
        allowed = MAX_STACK.get(kernel.name, 0)
        if kernel.name == "backward" and kernel.architecture == "sm_80":
            allowed = MAX_STACK_SM80_BACKWARD
        if kernel.name == "forward" and kernel.architecture == "sm_120":
            allowed = MAX_STACK_SM120_FORWARD
        if kernel.stack > allowed:
            errors.append(
                f"{kernel}: {kernel.stack} bytes of stack, at most {allowed} allowed"
            )
        if kernel.instructions and kernel.name in products:
            found = len(kernel.find(r"HMMA\.16816"))
            expected = products[kernel.name](configs[kernel.name][kernel.index])
            if found != expected:
                errors.append(
                    f"{kernel}: {found} HMMA instructions, its tiles need {expected}"
                )
    return errors
