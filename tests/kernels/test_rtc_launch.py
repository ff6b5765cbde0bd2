"""What launches tell the CUDA driver, with a driver that notes it down."""

import ctypes
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from tiercel.errors import InternalError
from tiercel.kernels.runtime import rtc

STREAM = 77


class Driver:
    """Takes what the driver would; answers with `code`."""

    def __init__(self):
        self.code, self.launches, self.maps = 0, [], []

    def cuLaunchKernelEx(self, config, function, places, extra):  # noqa: N802
        config = config._obj
        kinds = [config.attributes[i] for i in range(config.num_attributes)]
        assert all(kind.value == 1 for kind in kinds)
        assert extra is None
        self.launches.append(
            {
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "smem_bytes": config.smem_bytes,
                "stream": config.stream,
                "attributes": [kind.id for kind in kinds],
                "function": function.value,
                "values": [ctypes.c_int.from_address(place).value for place in places],
            }
        )
        return self.code

    def cuTensorMapEncodeTiled(self, place, kind, rank, address, *rest):  # noqa: N802
        dims, steps, box, ones, interleave, swizzle, *_ = rest
        self.maps.append(
            (kind, rank, address.value, *map(tuple, (dims, steps, box, ones)), swizzle)
        )
        assert place.value % 64 == 0
        assert interleave == 0
        return self.code

    def cuGetErrorString(self, code, text):  # noqa: N802
        text._obj.value = b"out of luck"


@pytest.fixture
def driver(monkeypatch):
    """A device 0 is current."""
    driver = Driver()
    monkeypatch.setattr(rtc, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, stream, lambda index: STREAM + index, raising=False)
    return driver


def test_a_kernel_is_loaded_once_for_launches_of_all_sizes(driver, monkeypatch):
    """Loading waits for the device, and a launch of another size may come within a step."""
    loads, limits = [], []
    driver.cuModuleLoadData = lambda module, cubin: loads.append(cubin) or 0
    driver.cuModuleGetFunction = lambda function, module, name: 0
    driver.cuFuncSetAttribute = lambda function, kind, size: limits.append((kind, size)) or 0
    monkeypatch.setattr(rtc, "load_cubin", lambda source, arch: b"cubin")
    monkeypatch.setattr(rtc, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: MagicMock())
    source, device = rtc.KernelSource("any", (("SIZE", 1),)), torch.device("cuda", 0)
    sizes = (0, 70000, 50000, 90000, 70000)
    kernels = [rtc.load_kernel(source, device, size) for size in sizes]
    assert [kernel.smem_bytes for kernel in kernels] == list(sizes)
    assert loads == [b"cubin"]
    assert limits == [(8, 70000), (8, 90000)]  # never lowered


KERNEL = rtc.Kernel("any", ctypes.c_void_p(1234), torch.device("cuda", 0), 4567)


def test_sizes_and_arguments_keep_their_order(driver):
    arguments = [ctypes.c_int(5), ctypes.c_int(-6), ctypes.c_int(7)]
    rtc.launch(KERNEL, 2, 96, arguments, grid_y=3, grid_z=4)
    rtc.launch(KERNEL, 8, 32, [])
    first, second = driver.launches
    assert first == {
        "grid": (2, 3, 4),
        "block": (96, 1, 1),
        "smem_bytes": 4567,
        "stream": STREAM,
        "attributes": [],
        "function": 1234,
        "values": [5, -6, 7],
    }
    assert second["grid"] == (8, 1, 1)


# Of cuda.h: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION and _COOPERATIVE.
@pytest.mark.parametrize("is_dependent", [False, True])
@pytest.mark.parametrize("is_cooperative", [False, True])
def test_attributes_are_those_requested(is_dependent, is_cooperative, driver):
    options = {"is_dependent": is_dependent, "is_cooperative": is_cooperative}
    rtc.launch(KERNEL, 1, 32, [], **options)
    assert driver.launches[0]["attributes"] == [6] * is_dependent + [2] * is_cooperative


def test_a_refusal_says_what_was_launched(driver):
    driver.code = 701
    with pytest.raises(InternalError, match=r"any: launching 3 x 64 .* error 701, out of luck"):
        rtc.launch(KERNEL, 3, 64, [])


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, 6), (torch.bfloat16, 9)], ids=str)
def test_a_tensor_map_says_where_boxes_are(dtype, kind, driver):
    """Sizes in elements, steps in bytes, innermost first."""
    x = torch.zeros(10, 8, 128, dtype=dtype)
    first = rtc.make_tensor_map(x, (128, 8, 10), (128, 1024), (64, 1, 32))
    assert rtc.make_tensor_map(x, (128, 8, 10), (128, 1024), (64, 1, 32)) is first
    sizes = ((128, 8, 10), (256, 2048), (64, 1, 32), (1, 1, 1))
    assert driver.maps == [(kind, 3, x.data_ptr(), *sizes, 3)]  # 3: swizzle of 128 bytes


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")],
)
def test_chips_have_the_compilers_names(capability, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert rtc.device_arch(device) == arch
    assert rtc.has_dependent_launch(device) == (capability >= (9, 0))
