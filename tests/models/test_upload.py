"""Bytes on their way to a GPU: all of them, whatever their number."""

import pytest
import torch

from tiercel.models.upload import Uploader

PIECE = 2 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 1001), (5, PIECE), (7, 6 * PIECE + 13)], ids=str)
def test_bytes_arrive(shape, device):
    upload = Uploader(device)
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    for _ in range(2):  # its pinned memory is used again
        poisoned = torch.full(shape, 255, dtype=torch.uint8, device=device)
        del poisoned
        assert torch.equal(upload(data).cpu(), data)
