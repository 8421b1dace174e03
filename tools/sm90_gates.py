"""Gates of the Hopper kernels, csrc/cuda/sm90.

What makes these kernels fast is that products run behind the threads' backs, and all of
it can be lost in the compiler without a wrong result:

- HGMMA: the products, whose number follows from the tiles,
- waits: those of the source. A compiler that gives up on asynchronous products waits
  behind each of them,
- exp: with pin_wait, it lies between the wait for S and the wait for O,
- registers: setmaxnreg asks for what the tables say, and no register is above it,
- local memory: no stack, and no access to it between the products.
"""

import re
import types
from collections.abc import Callable

import sass

# The architecture that is disassembled.
ARCHITECTURE = "sm_90a"

# Of a tile configuration, how many of the exp of a step may lie outside the window.
EXP_OUTSIDE = 2


def forward_products(config: types.SimpleNamespace) -> int:
    """S and O of the masked and the full loop and of the last tile, S of the start."""
    return 4 * (config.head_dim // 16) + 3 * (config.block_kv // 16)


def fused_products(config: types.SimpleNamespace) -> int:
    """S, dP, dV, dK, dQ of both steps; dQ of a step passed over, and the last one."""
    scores = 2 * (config.head_dim // 16)
    sums_over_rows = 2 * (config.block_q // 16)
    dq = config.block_q // 64 * (config.block_kv // 16)
    return 2 * (scores + sums_over_rows) + 4 * dq


def instructions_of_sum(head_dim: int) -> int:
    """Into how many parts start_sum cuts an accumulator."""
    return 2 if head_dim == 256 else 1


def dkv_products(config: types.SimpleNamespace) -> int:
    """Of two roles: scores before and in the loop, the sum in and behind it."""
    steps = config.block_q // 16 * instructions_of_sum(config.head_dim)
    return 2 * 2 * (config.head_dim // 16 + steps)


def dq_products(config: types.SimpleNamespace) -> int:
    """S and dP before and in the loop, dQ in the loop and behind it."""
    steps = config.dq_block_kv // 16 * instructions_of_sum(config.head_dim)
    return 2 * (2 * (config.head_dim // 16) + steps)


PRODUCTS: dict[str, Callable[[types.SimpleNamespace], int]] = {
    "forward": forward_products,
    "backward_fused": fused_products,
    "backward_dkv": dkv_products,
    "backward_dq": dq_products,
}

# wgmma_wait_group in the source: forward 1 + 2 per loop + 2, fused 6 per step + 2 per
# dQ without a step, dkv 3 per role, dq 2 per step + 1.
WAITS = {"forward": 7, "backward_fused": 16, "backward_dkv": 6, "backward_dq": 5}


def highest_register(kernel: sass.Kernel) -> int:
    """The highest register number; HGMMA names the first of its accumulators only."""
    highest = 0
    for text in kernel.instructions:
        highest = max([highest, *map(int, re.findall(r"\bR(\d+)\b", text))])
        if match := re.search(r"HGMMA\.64x(\d+)x16\S* R(\d+)", text):
            columns, first = map(int, match.groups())
            highest = max(highest, first + columns // 2 - 1)
    return highest


def exp_in_windows(kernel: sass.Kernel) -> list[int]:
    """How many exp lie between each wait for S and the next wait, which is for O."""
    counts, count = [], None
    for text in kernel.instructions:
        if "WARPGROUP.DEPBAR.LE" in text:
            if count is not None:
                counts.append(count)
            count = 0 if text.endswith("0x1") else None
        elif count is not None and "MUFU.EX2" in text:
            count += 1
    return counts


def check_products(kernel: sass.Kernel, config: types.SimpleNamespace) -> list[str]:
    """Products, waits and local memory of a kernel with products."""
    errors = []
    products = kernel.find("HGMMA")
    expected = PRODUCTS[kernel.name](config)
    if len(products) != expected:
        errors.append(f"{len(products)} HGMMA instructions, its tiles need {expected}")
    waits = len(kernel.find(r"WARPGROUP\.DEPBAR"))
    if waits != WAITS[kernel.name]:
        errors.append(f"{waits} waits for products, {WAITS[kernel.name]} in the source")
    between = [i for i in kernel.find("LDL|STL") if products[0] < i < products[-1]]
    if between:
        errors.append(f"{len(between)} accesses to local memory between its products")
    return errors


def check_registers(kernel: sass.Kernel, consumers: int, loader: int) -> list[str]:
    """setmaxnreg, and what the kernel uses of it."""
    errors = []
    requests = {
        int(kernel.instructions[i].split()[-1], 16) for i in kernel.find("USETMAXREG")
    }
    if requests != {consumers, loader}:
        errors.append(
            f"setmaxnreg asks for {sorted(requests)}, the table says "
            f"{loader} and {consumers}"
        )
    highest = highest_register(kernel)
    if highest >= consumers:
        errors.append(f"uses register {highest}, its consumers have {consumers}")
    return errors


def check_window(kernel: sass.Kernel, config: types.SimpleNamespace) -> list[str]:
    """The exp of a step, of which a thread has one per element of S."""
    if not config.pin_wait:
        return []
    wanted = config.block_kv // 2 - EXP_OUTSIDE
    counts = exp_in_windows(kernel)
    # The third window is that of the last tile, beside which O becomes out.
    if len(counts) == 3 and min(counts[:2]) >= wanted:
        return []
    return [
        f"{counts} exp beside the products of the two loops, at least {wanted} wanted"
    ]


def check(kernels: list[sass.Kernel]) -> list[str]:
    """What is wrong with these kernels."""
    forward = sass.table("sm90/tile_config.h", "ForwardConfig", "kForwardConfigs")
    backward = sass.table(
        "sm90/backward_config.h", "BackwardConfig", "kBackwardConfigs"
    )
    consumers = sass.constant("sm90/backward_config.h", "kConsumerRegisters")
    producer = sass.constant("sm90/backward_config.h", "kProducerRegisters")
    wide = [i for i, config in enumerate(backward) if config.dq_block_q]
    fused = [i for i, config in enumerate(backward) if not config.dq_block_q]
    errors = []
    for name, indices in {
        "forward": range(len(forward)),
        "backward_rows": range(len(backward)),
        "backward_fused": fused,
        "backward_dkv": wide,
        "backward_dq": wide,
    }.items():
        errors += sass.missing(kernels, "sm90", name, indices)
    for kernel in kernels:
        found = []
        if kernel.stack > 0:
            found.append(f"{kernel.stack} bytes of stack")
        if kernel.instructions and kernel.name == "forward":
            config = forward[kernel.index]
            found += check_products(kernel, config)
            found += check_registers(
                kernel, config.consumer_registers, config.loader_registers
            )
            found += check_window(kernel, config)
        elif kernel.instructions and kernel.name in PRODUCTS:
            found += check_products(kernel, backward[kernel.index])
            found += check_registers(kernel, consumers, producer)
        errors += [f"{kernel}: {error}" for error in found]
    return errors
