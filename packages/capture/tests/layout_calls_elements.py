"""Calls of element-wise ops, whose rules are judged: each element by itself, along broadcast dimensions too."""

from __future__ import annotations

from typing import Any

import torch

from packages.capture.tests.layout_judge import cases

aten = torch.ops.aten


def _words(text: str) -> list[str]:
    return text.split()


ONE = _words(
    "abs acos acosh asin asinh atan atanh ceil celu clone cos cosh elu erf erfc erfinv exp exp2 expm1 floor frac "
    "gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 "
    "logical_not logit mish nan_to_num neg reciprocal relu relu6 round rsqrt selu sigmoid sign signbit silu sin "
    "sinh softplus softshrink sqrt square tan tanh trunc detach alias lift_fresh lift_fresh_copy zeros_like "
    "ones_like positive"
)
TWO = _words(
    "atan2 fmax fmin hypot maximum minimum logaddexp logical_and logical_or logical_xor nextafter copy"
)
PAIRS = _words(
    "add sub mul div true_divide fmod remainder eq ne lt le gt ge copysign xlogy heaviside clamp_min clamp_max"
)
GRADIENTS = _words("gelu silu sigmoid tanh hardswish hardsigmoid mish")
INTEGERS = _words(
    "bitwise_and bitwise_or bitwise_xor __lshift__ __rshift__ gcd lcm add mul eq floor_divide"
)
SCALARS = _words("add sub mul div rsub eq ne lt le gt ge remainder fmod")


def _op(name: str, overload: str = "default") -> Any:
    packet = getattr(aten, name)
    return getattr(packet, overload) if overload in packet.overloads() else packet


FAMILIES = cases(
    {
        **{n: (_op(n), lambda d: (d.p("rt"),), "== -> ==") for n in ONE},
        **{n: (_op(n), lambda d: (d.f("rt"), d.f("r1")), "== =1 -> ==") for n in TWO},
        **{n: (_op(n, "Tensor"), lambda d: (d.f("r1"), d.f("t")), "=1 = -> ==") for n in PAIRS},
        **{f"{n} with a number": (_op(n, "Tensor"), lambda d: (d.f("rt"), d.f("")), "== . -> ==") for n in PAIRS[:6]},
        **{f"{n} of a scalar": (_op(n, "Scalar"), lambda d: (d.f("rt"), 2), "== -> ==") for n in SCALARS},
        **{f"{n} gradient": (_op(f"{n}_backward"), lambda d: (d.f("rt"), d.f("rt")), "== == -> ==") for n in GRADIENTS},
        **{
            f"{n} of integers": (_op(n, "Tensor"), lambda d: (d.i("rt", 9), 1 + d.i("t", 3)), "== = -> ==")
            for n in INTEGERS
        },
    }
)  # fmt: skip

SINGLE = cases({
    "add, alpha": (aten.add.Tensor, lambda d: (d.f("rt"), d.f("t")), "== = -> ==", {"alpha": -3}),
    "add of booleans": (aten.add.Tensor, lambda d: (d.b("rt"), d.b("t")), "== = -> =="),
    "add of a column": (aten.add.Tensor, lambda d: (d.f("r1"), d.f("rt")), "=1 == -> =="),
    "sub, alpha": (aten.sub.Tensor, lambda d: (d.f("rt"), d.f("")), "== . -> ==", {"alpha": 2}),
    "mul by booleans": (aten.mul.Tensor, lambda d: (d.f("rt"), d.b("rt")), "== == -> =="),
    "div, rounded": (aten.div.Tensor_mode, lambda d: (d.f("rt"), d.f("t")), "== = -> ==", {"rounding_mode": "floor"}),
    "pow": (aten.pow.Tensor_Scalar, lambda d: (d.f("rt"), 2), "== -> =="),
    "pow of two": (aten.pow.Tensor_Tensor, lambda d: (d.p("rt"), d.p("t")), "== = -> =="),
    "pow of a number": (aten.pow.Scalar, lambda d: (2, d.p("rt")), "== -> =="),
    "bitwise_not": (aten.bitwise_not, lambda d: (d.b("rt"),), "== -> =="),
    "where": (aten.where.self, lambda d: (d.b("t1"), d.f("rtw"), d.f("")), "=1 === . -> ==="),
    "where, two": (aten.where.self, lambda d: (d.b("rtw"), d.f("rtw"), d.f("w")), "=== === = -> ==="),
    "where, number": (aten.where.ScalarOther, lambda d: (d.b("rt"), d.f("rt"), 1.5), "== == -> =="),
    "where, zero": (aten.where.ScalarOther, lambda d: (d.b("rt"), d.f("rt"), 0.0), "== == -> =="),
    "where, zero first": (aten.where.ScalarSelf, lambda d: (d.b("rt"), 0.0, d.f("t")), "== = -> =="),
    "where, numbers": (aten.where.Scalar, lambda d: (d.b("rt"), 1.0, 0.0), "== -> =="),
    "masked_fill": (aten.masked_fill.Scalar, lambda d: (d.f("rhts"), d.b("ts"), -1e9), "==== == -> ===="),
    "masked_fill, zero": (aten.masked_fill.Scalar, lambda d: (d.f("rt"), d.b("r1"), 0), "== =1 -> =="),
    "masked_fill, tensor": (aten.masked_fill.Tensor, lambda d: (d.f("rt"), d.b("t"), d.f("")), "== = . -> =="),
    "clamp": (aten.clamp, lambda d: (d.f("rt"), -0.5, 0.5), "== -> =="),
    "clamp by tensors": (aten.clamp.Tensor, lambda d: (d.f("rt"), d.f("t"), None), "== = -> =="),
    "lerp": (aten.lerp.Scalar, lambda d: (d.f("rt"), d.f("rt"), 0.3), "== == -> =="),
    "lerp by a tensor": (aten.lerp.Tensor, lambda d: (d.f("rt"), d.f("rt"), d.f("t")), "== == = -> =="),
    "addcmul": (aten.addcmul, lambda d: (d.f("rt"), d.f("t"), d.f("r1")), "== = =1 -> ==", {"value": 2}),
    "addcdiv": (aten.addcdiv, lambda d: (d.f("rt"), d.f("t"), d.p("r1")), "== = =1 -> =="),
    "_to_copy": (aten._to_copy, lambda d: (d.f("rt"),), "== -> ==", {"dtype": torch.float32}),
    "_to_copy, equal dtype": (aten._to_copy, lambda d: (d.f("rt"),), "== -> ==", {"dtype": torch.float64}),
    "full_like": (aten.full_like, lambda d: (d.f("rt"), 2.0), "== -> =="),
    "fill": (aten.fill.Scalar, lambda d: (d.f("rt"), 2.0), "== -> =="),
    "fill by a tensor": (aten.fill.Tensor, lambda d: (d.f("rt"), d.f("")), "== . -> =="),
    "frexp": (aten.frexp.Tensor, lambda d: (d.f("rt"),), "== -> == =="),
    "dropout of nothing": (aten.native_dropout, lambda d: (d.f("rt"), 0.5, False), "== -> == =="),
    "dropout gradient": (aten.native_dropout_backward, lambda d: (d.f("rt"), d.b("rt"), 1.25), "== == -> =="),
    "relu gradient": (aten.threshold_backward, lambda d: (d.f("rt"), d.f("rt"), 0), "== == -> =="),
    "leaky_relu gradient": (aten.leaky_relu_backward, lambda d: (d.f("rt"), d.f("rt"), 0.1, False), "== == -> =="),
    "elu gradient": (aten.elu_backward, lambda d: (d.f("rt"), 1, 1, 1, False, d.f("rt")), "== == -> =="),
    "hardtanh gradient": (aten.hardtanh_backward, lambda d: (d.f("rt"), d.f("rt"), -1, 1), "== == -> =="),
    "softplus gradient": (aten.softplus_backward, lambda d: (d.f("rt"), d.f("rt"), 1, 20), "== == -> =="),
    "softshrink gradient": (aten.softshrink_backward, lambda d: (d.f("rt"), d.f("rt"), 0.5), "== == -> =="),
    "hardshrink gradient": (aten.hardshrink_backward, lambda d: (d.f("rt"), d.f("rt"), 0.5), "== == -> =="),
    "logit gradient": (aten.logit_backward, lambda d: (d.f("rt"), d.p("rt")), "== == -> =="),
    "gelu gradient, "
    "tanh": (aten.gelu_backward, lambda d: (d.f("rt"), d.f("rt")), "== == -> ==", {"approximate": "tanh"}),
    "round, decimals": (aten.round.decimals, lambda d: (d.f("rt"),), "== -> ==", {"decimals": 1}),
})  # fmt: skip
