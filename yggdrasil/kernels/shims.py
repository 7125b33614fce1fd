"""The C entry points of operators.cpp, as AOTInductor wants them declared."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["c_shims"]


def c_shims() -> dict[Any, list[str]]:
    """Operator to declaration, for Inductor's `custom_ops_to_c_shims`; the library must be loaded."""
    tensor = "AtenTensorHandle"
    output = "AtenTensorHandle*"
    return {
        torch.ops.ygg.packed_linear.default: [
            f"AOTITorchError aoti_torch_cpu_packed_linear({tensor} x, {tensor} packed, {output} bias, int64_t out_features, {output} out)"
        ],
        torch.ops.ygg.read_linear.default: [
            f"AOTITorchError aoti_torch_cpu_read_linear({tensor} x, {tensor} meta, {tensor} packed, {output} bias, int64_t out_features, {output} out)"
        ],
        torch.ops.ygg.packed_linears.default: [
            f"AOTITorchError aoti_torch_cpu_packed_linears({tensor} x, const {tensor}* packed, int64_t num_packed, const {tensor}** bias, int64_t num_bias, "
            f"const int64_t* out_features, int64_t num_out_features, {output} out)"
        ],
        torch.ops.ygg.gated_linear.default: [
            f"AOTITorchError aoti_torch_cpu_gated_linear({tensor} x, {tensor} gate, {output} gate_bias, {tensor} up, {output} up_bias, int64_t out_features, "
            f"{output} out)"
        ],
        torch.ops.ygg.attend.default: [
            f"AOTITorchError aoti_torch_cpu_attend({tensor} query, {tensor} key, {tensor} value, {tensor} key_cache, {tensor} value_cache, "
            f"{tensor} meta, {tensor} pages, double scale, {output} out)"
        ],
        torch.ops.ygg.candidates.default: [
            f"AOTITorchError aoti_torch_cpu_candidates({tensor} logits, {tensor} meta, int64_t count, {output} log_probs, {output} tokens)"
        ],
    }
