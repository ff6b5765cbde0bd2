"""DeepSeek-V4's operators inside vLLM, for models that live there out of its tree.

    from tiercel.vllm_bridge import register
    register()

Each operator of `tiercel.ops.library` becomes a `CustomOp` of vLLM, a module under the operator's
name with ``tiercel_`` before it, whose forward is ``torch.ops.tiercel.<operator>``: on a GPU its
kernels, elsewhere PyTorch's operators, and shapes alone for compilers. A model makes it with
``CustomOp.op_registry["tiercel_moe_route"]()``. vLLM calls `register` in all its processes if a
package names it as an entry point of the group ``vllm.general_plugins``.

Nothing in Tiercel imports this module, and importing it imports neither vLLM nor PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from tiercel.errors import InstallationError

OPERATORS: Final = (
    *("mhc_mix_pre", "mhc_mix_post", "mhc_mix_collapse", "latent_rope", "latent_write"),
    *("index_key_write", "indexer_topk", "sparse_attention", "moe_route", "moe_route_hash"),
    *("moe_experts", "grouped_linear", "linear", "kv_compress_step"),
)
PREFIX: Final = "tiercel_"
# Where vLLM has `CustomOp`: up to 0.16, and later.
_PLACES: Final = ("vllm.model_executor.custom_op", "vllm.model_executor.hw_agnostic.custom_op")


def register() -> dict[str, type]:
    """Make all operators known to vLLM in this process; again, it changes nothing.

    Returns:
        The modules' classes by name.

    Raises:
        InstallationError: vLLM is not installed, or has no `CustomOp`.
    """
    base = _custom_op()
    importlib.import_module("tiercel.ops.library")
    operators = importlib.import_module("torch").ops.tiercel
    known: dict[str, type] = base.op_registry
    for operator in OPERATORS:
        name = PREFIX + operator
        if name not in known:
            base.register(name)(_module_class(base, name, getattr(operators, operator)))
    return {PREFIX + operator: known[PREFIX + operator] for operator in OPERATORS}


def _custom_op() -> Any:
    """VLLM's base class of operators."""
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise InstallationError(
            "tiercel.vllm_bridge needs vLLM, which is not installed.",
            hint="Install it beside Tiercel: pip install vllm.",
        ) from error
    for place in _PLACES:
        try:
            return importlib.import_module(place).CustomOp
        except (ImportError, AttributeError):
            continue
    raise InstallationError(
        f"this vLLM has no CustomOp in {' or '.join(_PLACES)}.",
        hint="Tiercel's operators are torch.ops.tiercel.* without it: import tiercel.ops.library.",
    )


def _module_class(base: type, name: str, operator: Any) -> type:
    """A module whose forward is an operator on every device."""

    def call(self: object, *args: object, **kwargs: object) -> object:  # noqa: ARG001
        return operator(*args, **kwargs)

    methods = dict.fromkeys(("forward_native", "forward_cuda", "forward_cpu"), call)
    return type(name, (base,), methods | {"__doc__": f"torch.ops.tiercel.{operator.__name__}"})
