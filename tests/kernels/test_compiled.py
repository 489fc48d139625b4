"""Ahead-of-time compilation, which needs no GPU: what each kernel takes of a device's registers, memories and instructions."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from recguide_kernels import kv_commit, logit_stats, segment_attention  # noqa: E402
from recguide_kernels.work import tile_rows  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreted kernel is not compiled"),
]

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
CAPABILITIES = (80, 90, 100)
"""Of 90 and 100 Triton compiles the variants with the architecture's own instructions, sm_90a and sm_100a."""
SIZES = (64, 80, 96, 128, 256)
SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes that a block can have."""
TENSOR_CORES = {80: r"\bmma\.sync", 90: r"\bwgmma\.mma_async", 100: r"\btcgen05\.mma"}
REGISTERS = 65_536
"""Of a multiprocessor."""


class Compiled:
    """A kernel for one architecture: `registers` a thread, `stack` bytes a thread (spills lie there), `shared` bytes a block."""

    def __init__(self, binary: Any, folder: Path) -> None:
        self.ptx: str = binary.asm["ptx"]
        self.shared: int = binary.metadata.shared
        path = folder / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
        found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
        assert found, done.stdout
        self.registers, self.stack = int(found[1]), int(found[2])


def compiled(
    kernel: Any, capability: int, folder: Path, types: dict[str, str], constants: dict[str, object], **options: int
) -> Compiled:
    """
    Compile with what a launch would know: pointers and strides are multiples of 16. Arguments without a type are int32.

    Args:
        kernel: a jitted function.
        capability (`int`): 90 for sm_90.
        folder (`Path`): for a temporary file.
        types (`dict[str, str]`): of the arguments, `*bf16` a pointer.
        constants (`dict[str, object]`): the constexpr arguments, and those that are None.
        options: `num_warps`, `num_stages`.
    """
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [n for n in names if signature[n] != "constexpr" and ("*" in signature[n] or n.endswith("stride"))]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    binary = Compiled(triton.compile(source, target=target, options=options), folder)
    assert binary.stack == 0, f"registers spill: {binary.stack} bytes of stack"
    assert binary.registers * 32 * options["num_warps"] <= REGISTERS
    assert binary.shared <= SHARED_MEMORY[capability]
    return binary


def attend(capability: int, dtype: torch.dtype, size: int, tokens: int, group: int, folder: Path) -> Compiled:
    rows = tile_rows(tokens, group, dtype)
    layout = segment_attention.tiling(rows, size, dtype)
    element = f"*{TYPES[dtype]}"
    types = dict.fromkeys(("query", "keys", "values", "key_cache", "value_cache", "out"), element)
    types |= {"partial_out": "*fp32", "partial_lse": "*fp32", "items": "*i32", "visible": "*i64", "tables": "*i32"}
    constants: dict[str, object] = {
        "GROUP": group,
        "HEAD_DIM": size,
        "ROWS": rows,
        "KEYS": layout.keys,
        "BLOCK_D": segment_attention.block_d(size),
        "UPCAST": False,
    }
    return compiled(
        segment_attention.attend_kernel,
        capability,
        folder,
        types | {"scale": "fp32"},
        constants,
        num_warps=layout.num_warps,
        num_stages=layout.num_stages,
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_attention_of_fused_rounds(capability: int, dtype: torch.dtype, size: int, tmp_path: Path) -> None:
    binary = attend(capability, dtype, size, 64, 4, tmp_path)
    assert re.search(TENSOR_CORES[capability], binary.ptx), "no tensor cores"


@pytest.mark.parametrize(("capability", "tokens"), [(80, 8), (90, 4), (100, 8)])
def test_attention_of_short_rounds(capability: int, tokens: int, tmp_path: Path) -> None:
    """Tiles of 16 and 32 rows, which are too low for the later architectures' own instructions."""
    binary = attend(capability, torch.bfloat16, 128, tokens, 4, tmp_path)
    assert re.search(TENSOR_CORES[80], binary.ptx), "no tensor cores"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("size", "group"), [*((size, 4) for size in SIZES), (128, 32)])
def test_attention_in_float32(capability: int, size: int, group: int, tmp_path: Path) -> None:
    binary = attend(capability, torch.float32, size, 64, group, tmp_path)
    assert "tf32" not in binary.ptx, "products are rounded"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_merge(capability: int, dtype: torch.dtype, size: int, tmp_path: Path) -> None:
    rows, width = tile_rows(64, 4, dtype), segment_attention.block_d(size)
    types = {"partial_out": "*fp32", "partial_lse": "*fp32", "out": f"*{TYPES[dtype]}", "merges": "*i32"}
    constants: dict[str, object] = {"GROUP": 4, "HEAD_DIM": size, "ROWS": rows, "BLOCK_D": width}
    warps = segment_attention.merge_warps(rows, width)
    compiled(segment_attention.merge_kernel, capability, tmp_path, types, constants, num_warps=warps)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("top", [2, 3])
def test_logit_stats(capability: int, dtype: torch.dtype, noise: bool, top: int, tmp_path: Path) -> None:
    types = {"logits": f"*{TYPES[dtype]}", "state": "*fp32", "tokens": "*i32", "keys": "*i64"}
    constants: dict[str, object] = {"EXCLUDED": (5, 131_000), "NOISE": noise, "PART": logit_stats.PART, "TOP": top}
    if not noise:
        constants["keys"] = None
    compiled(logit_stats.part_kernel, capability, tmp_path, types, constants, num_warps=logit_stats.NUM_WARPS)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_logit_stats_join(capability: int, tmp_path: Path) -> None:
    types = {"state": "*fp32", "tokens": "*i32", "ids": "*i64", "numbers": "*fp32"}
    compiled(logit_stats.join_kernel, capability, tmp_path, types, {"PARTS": 32, "TOP": 3, "SLOTS": 4}, num_warps=1)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_kv_commit(capability: int, dtype: torch.dtype, size: int, tmp_path: Path) -> None:
    element = f"*{TYPES[dtype]}"
    types = {"new": element, "cache": element, "places": "*i32", "counts": "*i64", "tables": "*i32"}
    constants: dict[str, object] = {
        "HEAD_DIM": size,
        "BLOCK_D": segment_attention.block_d(size),
        "BLOCK_TOKENS": kv_commit.BLOCK_TOKENS,
    }
    compiled(kv_commit.commit_kernel, capability, tmp_path, types, constants, num_warps=4)


def test_a_spill_is_recognised(tmp_path: Path) -> None:
    """The checker can fail: a tile of 64 rows in one warp does not stay in registers."""
    types = {"partial_out": "*fp32", "partial_lse": "*fp32", "out": "*fp32", "merges": "*i32"}
    constants: dict[str, object] = {"GROUP": 4, "HEAD_DIM": 128, "ROWS": 64, "BLOCK_D": 128}
    with pytest.raises(AssertionError, match="registers spill"):
        compiled(segment_attention.merge_kernel, 90, tmp_path, types, constants, num_warps=1)
