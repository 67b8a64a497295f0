"""What a run computes in."""

import torch


def resolved_precision(precision: str, device: torch.device) -> str:
    """``auto`` becomes ``bf16`` where the device computes it natively, else ``fp32``."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"
