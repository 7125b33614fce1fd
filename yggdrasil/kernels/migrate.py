"""Move whole KV pages: what contraction of the page pool does to the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["move_pages_"]


def move_pages_(storage_PX: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Pages `sources[i]` become pages `targets[i]`.

    Args:
        storage_PX: Page-major, any number of further dimensions.
        sources: Page ids.
        targets: As many, each once, none of them a source.

    Cost: one gather and one scatter of these pages.
    Source: Nightjar section 5.3, step 4.
    """
    assert len(sources) == len(targets) == len({*targets}) and not {*sources} & {*targets}, "a page would be read after it was overwritten"
    source_I, target_I = torch.tensor([sources, targets], dtype=torch.int64, device=storage_PX.device)
    storage_PX.index_copy_(0, target_I, storage_PX.index_select(0, source_I))
