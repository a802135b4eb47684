"""What a wrapped model leaves to torch is row invariant on this machine, and the rest is ours or refused."""

from __future__ import annotations

import pytest
import torch

from tests.decoding.row_ops import KEPT, differing

# The widths where vectors end: below a vector, one more than a vector, odd, a head, hidden sizes.
WIDTHS = (1, 5, 17, 64, 127, 577, 1365, 1536)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_to_torch(name: str, dtype: torch.dtype) -> None:
    found = {width: where for width in WIDTHS if (where := differing(KEPT[name], dtype, width))}
    assert not found
