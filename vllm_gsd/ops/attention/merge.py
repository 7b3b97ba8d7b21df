"""Merging attention that was computed over disjoint sets of keys.

    out = sum(e^(lse[p] - lse_all) * part[p]),   lse_all = log(sum(e^lse[p]))

FlashAttention (Dao et al., 2022) and Flash-Decoding merge in this way. Here it joins the spans of a prefix, or a prefix
that another kernel attends and a tree that ours attends.
"""

import torch

from vllm_gsd.ops.dispatch import check_tensor, require_triton

_PARTS = 32  # one kernel for all numbers of parts up to this
_OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_attention(
    output: torch.Tensor,
    parts: torch.Tensor,
    part_lses: torch.Tensor,
    lse: torch.Tensor | None = None,
    end_row: torch.Tensor | None = None,
) -> None:
    """Write the merged attention into ``output``, and its log-sum-exp into ``lse`` if given.

    Args:
        output: ``[num_rows, num_heads, head_size]`` float32, bfloat16 or float16.
        parts: ``[num_parts, num_rows, num_heads, head_size]``, each normalised over its own keys; float32,
            bfloat16 or float16. A part without keys may hold any values.
        part_lses: float32 ``[num_parts, num_rows, num_heads]``, natural logarithms; for a part without keys -inf
            or, as from FlashAttention 2, inf.
        lse: float32 ``[num_rows, num_heads]``; written.
        end_row: int32 or int64 ``[1]`` on the same device; rows from it on are left unchanged.

    A row without keys in any part becomes 0 and its lse -inf. Arithmetic is in float32. The call is safe to capture:
    shapes are fixed and nothing is read back.
    """
    check_parts(output, parts, part_lses, lse, end_row)
    require_triton("merge_attention", output)
    from vllm_gsd.ops.attention.merge_triton import merge_kernel, triton

    num_parts, num_rows, num_heads, head_size = parts.shape
    if not num_rows:
        return
    merge_kernel[(num_rows, num_heads)](
        output, output if lse is None else lse, parts, part_lses, part_lses if end_row is None else end_row, num_parts,
        *output.stride()[:2], 0 if lse is None else lse.stride(0), *parts.stride()[:3], *part_lses.stride()[:2],
        HEAD_SIZE=head_size, BLOCK_P=triton.next_power_of_2(max(_PARTS, num_parts)),
        BLOCK_D=triton.next_power_of_2(head_size), HAS_END=end_row is not None, STORE_LSE=lse is not None, num_warps=4,
    )  # fmt: skip


def check_parts(
    output: torch.Tensor,
    parts: torch.Tensor,
    part_lses: torch.Tensor,
    lse: torch.Tensor | None,
    end_row: torch.Tensor | None,
) -> None:
    """Raise ValueError for the first argument of ``merge_attention`` that does not fit."""
    check_tensor("output", output, output.device, 3, *_OUTPUT_DTYPES)
    check_tensor("parts", parts, output.device, 4, *_OUTPUT_DTYPES)
    check_tensor("part_lses", part_lses, output.device, 3, torch.float32)
    if parts.shape[1:] != output.shape or part_lses.shape != parts.shape[:3]:
        raise ValueError(
            f"parts {list(parts.shape)} and part_lses {list(part_lses.shape)} must be [num_parts, *output's rows and "
            f"heads] for an output {list(output.shape)}"
        )
    if lse is not None:
        check_tensor("lse", lse, output.device, 2, torch.float32)
        if lse.shape != output.shape[:2]:
            raise ValueError(f"lse is {list(lse.shape)}, but must be {list(output.shape[:2])}")
    if end_row is not None:
        check_tensor("end_row", end_row, output.device, 1, torch.int32, torch.int64, rows=1)
