"""The CUDA source that decodes weights, for rows by number in the file's layout, on a processor."""

import pytest
import torch

from tests.ops.test_dequantize import as_tensor, random_blocks
from tiercel.kernels import q4k_dequantize as kernel
from tiercel.ops.dequantize import dequantize


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q5_K", "Q8_0"])
@pytest.mark.usefixtures("on_processor")
def test_rows_by_number(type_name):
    weight = as_tensor(random_blocks(type_name, 21, 3).reshape(21, -1), type_name, "cpu")
    whole = dequantize(weight, torch.float32)
    for index in (None, torch.tensor([20]), torch.randint(0, 21, (35,))):
        out = torch.full_like(whole if index is None else whole[index], float("nan"))
        rows = None if index is None else index.int()
        kernel.launch_q4k_dequantize(weight.ordered_planes(), type_name, out, rows)
        assert torch.equal(out, whole if index is None else whole[index])
