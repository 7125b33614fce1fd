"""Move pages of KV to other pages, as a shrinking pool does with the pages at its end.

```
storage   [ 0 | 1 | 2 | 3 | 4 | 5 ]        sources 5, 3    no source is a target,
                ^-------------- 5          targets 1, 2    so moves may run in any order
                    ^-- 3
```

A page is one range of bytes: all layers, keys and values, heads and 16 slots.

Shapes: P = pages, X = the dimensions of a page. Here M = moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from yggdrasil.staging import upload

__all__ = ["move_pages_", "move_pages_reference_"]


def move_pages_(
    storage_PX: Tensor, sources: Sequence[int] | Tensor, targets: Sequence[int] | Tensor
) -> None:
    """Copy page `sources[i]` to page `targets[i]`, for every i; sources keep their bytes.

    Args:
        storage_PX: Contiguous, pages first; any dtype. The rest of the shape is a page.
        sources: Page numbers: a sequence, or an int32 or int64 tensor on the storage's device.
        targets: The same number of pages, of the same type; all different, none among the sources.

    Raises:
        ValueError: page numbers in sequences that break these rules. Tensors are not checked, because that
            would be a sync.

    Cost: reads and writes every moved page once. On CUDA one upload of sequences, one kernel, no sync.
    Source: Nightjar section 5 (migration of blocks when the pool contracts).

    Example:
        >>> import torch
        >>> storage = torch.arange(12.0).view(4, 3)
        >>> move_pages_(storage, [3], [1])
        >>> storage[1].tolist()
        [9.0, 10.0, 11.0]
    """
    if len(sources) != len(targets):
        raise ValueError(
            f"move_pages_: {len(sources)} sources and {len(targets)} targets; each source has one target"
        )
    if not isinstance(sources, Tensor) and not isinstance(targets, Tensor):
        _check(sources, targets, len(storage_PX))
    if len(sources) == 0:
        return
    source_M, target_M = _numbers(sources, targets, storage_PX.device)
    if storage_PX.is_cuda:
        # Triton takes a second to import: only a device needs it
        from yggdrasil.kernels.migrate_triton import launch_

        launch_(storage_PX, source_M, target_M)
    else:
        move_pages_reference_(storage_PX, source_M, target_M)


def move_pages_reference_(storage_PX: Tensor, source_M: Tensor, target_M: Tensor) -> None:
    """`move_pages_` page by page: the specification of the kernel, and the code for a CPU."""
    for source, target in zip(source_M.tolist(), target_M.tolist(), strict=True):
        storage_PX[target].copy_(storage_PX[source])


def _check(sources: Sequence[int], targets: Sequence[int], num_pages: int) -> None:
    outside = [page for page in (*sources, *targets) if not 0 <= page < num_pages]
    if outside:
        raise ValueError(f"move_pages_: page {outside[0]} is not among the storage's {num_pages}")
    if len(set(targets)) != len(targets):
        raise ValueError(f"move_pages_: a target comes twice in {list(targets)}")
    both = sorted(set(sources) & set(targets))
    if both:
        raise ValueError(
            f"move_pages_: page {both[0]} is source and target; move it to a free page first, in a call of "
            "its own"
        )


def _numbers(
    sources: Sequence[int] | Tensor, targets: Sequence[int] | Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both as tensors; two sequences take one upload."""
    if isinstance(sources, Tensor) and isinstance(targets, Tensor):
        return sources, targets
    source_M, target_M = upload(
        [[int(page) for page in each] for each in (sources, targets)], device, dtype=torch.int32
    )
    return source_M, target_M
