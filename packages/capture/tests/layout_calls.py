"""Calls whose rules are judged: products, attention, norms, losses and experts. `layout_calls_moves` has the others.

A case is the op, its arguments from a `Draw`, and where it can be computed in parts (see `layout_judge`).
"""

from __future__ import annotations

from typing import Any

import torch

import piper_ops  # noqa: F401 - registers the ops
from packages.capture.tests.layout_judge import Draw, cases

aten = torch.ops.aten
piper = torch.ops.piper


def gqa(d: Draw, tokens: str = "TS") -> tuple[Any, ...]:
    """q [b, T, h x g, D], k and v [b, S, h, D]."""
    queries, keys = tokens
    return d.f(f"b{queries}hgD").flatten(2, 3), d.f(f"b{keys}hD"), d.f(f"b{keys}hD")


def gqa_gradient(
    d: Draw, tokens: str = "TS", mask: Any = None, causal: bool = False
) -> tuple[Any, ...]:
    q, k, v = gqa(d, tokens)
    out, lse = piper.attention(q, k, v, mask, causal, None, True)
    return d.f(f"b{tokens[0]}hgD").flatten(2, 3), q, k, v, out, lse, mask, causal


def mask_of(d: Draw, letters: str, *, additive: bool = False) -> Any:
    """A mask whose dimensions are named; H stands for all heads of queries."""
    shape = [d.n("hg" if c == "H" else c) for c in letters]
    bits = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    bits[..., 0] = True
    return torch.where(bits, 0.5, float("-inf")).double() if additive else bits


def masked(d: Draw, letters: str, *, additive: bool = False, tokens: str = "TS") -> tuple[Any, ...]:
    return *gqa(d, tokens), mask_of(d, letters, additive=additive), False, None, True


def layer_norm(d: Draw, x: str, inner: str) -> tuple[Any, ...]:
    """The gradient of the result, x, its normalised shape and the statistics."""
    given = d.f(x)
    _, mean, rstd = torch.native_layer_norm(given, d.shape(inner), None, None, 1e-5)
    return d.f(x), given, d.shape(inner), mean, rstd


def rms_norm(d: Draw, x: str, inner: str) -> tuple[Any, ...]:
    given = d.f(x)
    return d.f(x), given, d.shape(inner), piper.rms_norm(given, d.shape(inner), None, 1e-5)[1]


def choices(d: Draw) -> Any:
    """The experts that 6 tokens chose, of 4 of which the last one is empty."""
    return torch.stack([d.order("2", 3) for _ in range(6)])


def grouped(d: Draw, rows: str, columns: str) -> tuple[Any, ...]:
    """14 rows of 4 experts, of which one has none, and two rows behind theirs; then rows of columns."""
    return (
        d.f("7" + "2" + rows).flatten(0, 1),
        torch.tensor([5, 0, 3, 4]),
        d.f("7" + "2" + columns).flatten(0, 1),
    )


def group_norm(d: Draw, mask: tuple[bool, ...]) -> tuple[Any, ...]:
    x, rows, groups, channels = d.f("rgCS").flatten(1, 2), d.n("r"), d.n("g"), d.n("gC")
    _, mean, rstd = aten.native_group_norm(x, None, None, rows, channels, d.n("S"), groups, 1e-5)
    return (
        d.f("rgCS").flatten(1, 2),
        x,
        mean,
        rstd,
        d.f("gC").flatten(),
        rows,
        channels,
        d.n("S"),
        groups,
        mask,
    )


def convolved(
    d: Draw, *, bias: bool = False, transposed: bool = False, channels: str = "1io"
) -> tuple[Any, ...]:
    """`channels` has the letters of groups, input and output channels of a group."""
    groups, ins, outs = channels
    first, second = (ins, outs) if transposed else (outs, ins)
    x, weight = (
        d.f(f"r{groups}{ins}54").flatten(1, 2),
        d.f(f"{groups}{first}{second}32").flatten(0, 1),
    )
    added = d.f(f"{groups}{outs}").flatten() if bias else None
    return x, weight, added, [1, 1], [1, 0], [1, 1], transposed, [0, 0], d.n(groups)


def convolution_gradient(d: Draw, mask: tuple[bool, bool, bool], **options: Any) -> tuple[Any, ...]:
    x, weight, bias, *rest = convolved(d, **options)
    out = aten.convolution(x, weight, bias, *rest)
    return out.cos(), x, weight, [out.shape[1]] if mask[2] else None, *rest, mask


def loss(d: Draw, reduction: str) -> tuple[Any, ...]:
    target = d.i("r", d.n("C"))
    target[1] = -100
    return d.f("rC"), target, reduction


def loss_gradient(d: Draw, reduction: str) -> tuple[Any, ...]:
    logits, target, _ = loss(d, reduction)
    lse = piper.cross_entropy(logits, target, reduction)[1]
    return d.f("r" if reduction == "none" else ""), logits, target, lse, reduction


def nll(d: Draw, reduction: int) -> tuple[Any, ...]:
    return d.f("rC").log_softmax(1), d.i("r", d.n("C")), d.p("C"), reduction, -100


def nll_gradient(d: Draw, reduction: int) -> tuple[Any, ...]:
    given = nll(d, reduction)
    return d.f("r" if reduction == 0 else ""), *given, aten.nll_loss_forward(*given)[1]


E4M3 = torch.float8_e4m3fn


def scaled(d: Draw, x: str, scale: str) -> tuple[Any, ...]:
    """A matrix and the scales of its blocks, by letters of [rows, columns] with a comma between; B is a block."""
    rows, columns = x.split(",")
    matrix = d.f(rows + columns).reshape(d.n(rows), d.n(columns))
    return matrix, d.p(scale.replace(",", "")).view([d.n(s) for s in scale.split(",")]).float()


def float8_product(d: Draw, *given: str) -> tuple[Any, ...]:
    """The arguments of a product of two quantised matrices."""
    (a, scale_a), (b, scale_b) = scaled(d, *given[:2]), scaled(d, *given[2:])
    return a.to(E4M3), scale_a, b.to(E4M3), scale_b, torch.float64, False


FLOAT8 = cases({
    "float8_scale of rows": (piper.float8_scale, lambda d: (d.f("mk"), 1, 0, E4M3, True), "=- -> =1"),
    "float8_scale of columns": (piper.float8_scale, lambda d: (d.f("mk"), 0, 1, E4M3, True), "-= -> 1="),
    "float8_scale of all": (piper.float8_scale, lambda d: (d.f("mk"), 0, 0, E4M3, False), "-- -> 11"),
    "float8_scale of blocks": (
        piper.float8_scale, lambda d: (d.f("mkB").flatten(1), 1, d.n("B"), E4M3, True), "=(=-) -> =="
    ),
    "float8_cast by rows": (piper.float8_cast, lambda d: (*scaled(d, "m,k", "m,1"), E4M3), "== =1 -> =="),
    "float8_cast by one scale": (piper.float8_cast, lambda d: (*scaled(d, "m,k", "1,1"), E4M3), "== 11 -> =="),
    "float8_cast by blocks": (
        piper.float8_cast, lambda d: (*scaled(d, "m,kB", "m,k"), E4M3), "=(=-) == -> =(=-)"
    ),
    "float8_mm by rows": (piper.float8_mm, lambda d: float8_product(d, "m,k", "m,1", "k,n", "1,n"), "=+ =1 += 1= -> =="),
    "float8_mm by tensors": (
        piper.float8_mm, lambda d: float8_product(d, "m,k", "1,1", "k,n", "1,1"), "=+ 11 += 11 -> =="
    ),
    "float8_mm by blocks": (
        piper.float8_mm, lambda d: float8_product(d, "m,kB", "m,k", "kB,n", "k,n"), "=(+-) =+ (+-)= += -> =="
    ),
})  # fmt: skip
PRODUCTS = cases({
    "mm": (aten.mm, lambda d: (d.f("mk"), d.f("kn")), "=+ += -> =="),
    "mm, square": (aten.mm, lambda d: (d.f("mk"), d.f("kk")), "=+ += -> =="),
    "bmm": (aten.bmm, lambda d: (d.f("bmk"), d.f("bkn")), "==+ =+= -> ==="),
    "mv": (aten.mv, lambda d: (d.f("mk"), d.f("k")), "=+ + -> ="),
    "dot": (aten.dot, lambda d: (d.f("k"), d.f("k")), "+ + -> ."),
    "addmm": (aten.addmm, lambda d: (d.f("n"), d.f("mk"), d.f("kn")), "= =- -= -> =="),
    "addmm, matrix": (aten.addmm, lambda d: (d.f("mn"), d.f("mk"), d.f("kn")), "== =- -= -> "
                                                                               "==", {"beta": 2, "alpha": 3}),
    "addmm, column": (aten.addmm, lambda d: (d.f("m1"), d.f("mk"), d.f("kn")), "=1 =- -= -> =="),
    "addmv": (aten.addmv, lambda d: (d.f("m"), d.f("mk"), d.f("k")), "= =- - -> ="),
    "baddbmm": (aten.baddbmm, lambda d: (d.f("bmn"), d.f("bmk"), d.f("bkn")), "=== ==- =-= -> ===", {"alpha": 0.5}),
    "baddbmm, row": (aten.baddbmm, lambda d: (d.f("1n"), d.f("bmk"), d.f("bkn")), "1= ==- =-= -> ==="),
    "convolution": (aten.convolution, convolved, "=+-- =+-- -> ==--"),
    "convolution, bias": (aten.convolution, lambda d: convolved(d, bias=True), "=--- =--- = -> ==--"),
    "convolution, "
    "transposed": (aten.convolution, lambda d: convolved(d, bias=True, transposed=True), "=--- -=-- = -> ==--"),
    "convolution, "
    "depthwise": (aten.convolution, lambda d: convolved(d, bias=True, channels="g11"), "==-- =1-- = -> ==--"),
    "convolution, groups": (aten.convolution, lambda d: convolved(d, channels="gIO"), "=(=-)-- (=-)--- -> =(=-)--"),
    "convolution, transposed groups": (
        aten.convolution, lambda d: convolved(d, transposed=True, channels="gIO"), "=(=-)-- (=-)--- -> =(=-)--",
    ),
    "convolution gradient": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (True, True, False)), "++-- ++-- ++-- -> ++-- "
                                                                                           "++-- 0",
    ),
    "convolution gradient, bias": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (True, True, True), bias=True),
        "++-- +--- +--- -> +--- +--- +",
    ),
    "convolution gradient, first layer": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (False, True, True), bias=True),
        "++-- +--- +--- -> 0 +--- +",
    ),
    "convolution gradient, frozen": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (True, False, False)), "++-- ++-- ++-- -> ++-- 0 "
                                                                                            "0",
    ),
    "convolution gradient, only bias": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (False, False, True), channels="gIO"),
        "+(--)-- +(--)-- (--)--- -> 0 0 (--)",
    ),
    "convolution gradient, transposed": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (True, True, True), transposed=True),
        "++-- +--- -+-- -> +--- -+-- +",
    ),
    "convolution gradient, groups": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (True, True, True), channels="gIO"),
        "+(=-)-- +(=-)-- (=-)--- -> +(=-)-- (=-)--- (=-)",
    ),
    "convolution gradient, weight of groups": (
        aten.convolution_backward, lambda d: convolution_gradient(d, (False, True, False), transposed=True, channels="gIO"),
        "+(+-)-- +(+-)-- (+-)--- -> 0 (+-)--- 0",
    ),
})  # fmt: skip

ATTENTION = cases({
    "attention": (piper.attention, lambda d: (*gqa(d), None, False, None, True), "==(==)- =-=- =-=- -> ==(==)- "
                                                                                 "=(==)="),
    "attention, one token": (
        piper.attention, lambda d: (*gqa(d, "1S"), None, False, None, True), "=1(==)- =-=- =-=- -> =1(==)- =(==)1",
    ),
    "attention, queries": (
        piper.attention, lambda d: (*gqa(d, "tS"), None, False, None, True), "==(==)- =-=- =-=- -> ==(==)- =(==)=",
    ),
    "attention, causal": (
        piper.attention, lambda d: (*gqa(d, "tt"), None, True, None, True), "=-(==)- =-=- =-=- -> =-(==)- =(==)-",
    ),
    "attention, window": (
        piper.attention, lambda d: (*gqa(d, "tt"), None, True, None, True, 2), "=-(==)- =-=- =-=- -> =-(==)- =(==)-",
    ),
    "attention, mask": (piper.attention, lambda d: masked(d, "TS"), "==(==)- =-=- =-=- =- -> ==(==)- =(==)="),
    "attention, additive mask": (
        piper.attention, lambda d: masked(d, "b11S", additive=True), "==(==)- =-=- =-=- =11- -> ==(==)- =(==)=",
    ),
    "attention, mask of rows": (piper.attention, lambda d: masked(d, "b1TS"), "==(==)- =-=- =-=- =1=- -> ==(==)- =(==)="),
    "attention, mask of heads": (
        piper.attention, lambda d: masked(d, "HTS", additive=True), "==(==)- =-=- =-=- (==)=- -> ==(==)- =(==)=",
    ),
    "attention, full mask": (
        piper.attention, lambda d: masked(d, "bHtS", tokens="tS"), "==(==)- =-=- =-=- =(==)=- -> ==(==)- =(==)=",
    ),
    "attention gradient": (piper.attention_dgrad, gqa_gradient, "=+(=+)- =+(=+)- =-=- =-=- =+(=+)- =(=+)+ -> "
                                                                "=+(=+)- =-=- =-=-"),
    "attention gradient, queries": (
        piper.attention_dgrad, lambda d: gqa_gradient(d, "tS"), "=+(=+)- =+(=+)- =-=- =-=- =+(=+)- =(=+)+ -> "
                                                                "=+(=+)- =-=- =-=-",
    ),
    "attention gradient, causal": (
        piper.attention_dgrad, lambda d: gqa_gradient(d, "tt", causal=True),
        "=-(=+)- =-(=+)- =-=- =-=- =-(=+)- =(=+)- -> =-(=+)- =-=- =-=-",
    ),
    "attention gradient, mask": (
        piper.attention_dgrad, lambda d: gqa_gradient(d, mask=mask_of(d, "b1TS")),
        "=+(=+)- =+(=+)- =-=- =-=- =+(=+)- =(=+)+ =1+- -> =+(=+)- =-=- =-=-",
    ),
    "attention gradient, heads' mask": (
        piper.attention_dgrad, lambda d: gqa_gradient(d, mask=mask_of(d, "1HTS")),
        "=+(=+)- =+(=+)- =-=- =-=- =+(=+)- =(=+)+ 1(=+)+- -> =+(=+)- =-=- =-=-",
    ),
})  # fmt: skip

NORMS = cases({
    "layer_norm": (piper.layer_norm, lambda d: (d.f("rtw"), d.shape("w"), d.f("w"), d.f("w"), 1e-5), "==- - - -> ==- "
                                                                                                     "==1 ==1"),
    "layer_norm, two dimensions": (
        piper.layer_norm, lambda d: (d.f("rVW"), d.shape("VW"), None, None, 1e-5), "=-- -> =-- =11 =11",
    ),
    "layer_norm_dgrad": (piper.layer_norm_dgrad, lambda d: (*layer_norm(d, "rtW", "W"), d.f("W")), "==- ==- ==1 ==1 - "
                                                                                                   "-> ==-"),
    "layer_norm_wgrad": (
        piper.layer_norm_wgrad, lambda d: (*layer_norm(d, "rtw", "w"), torch.float64, [True, True]), "++= ++= ++1 ++1 "
                                                                                                     "-> = =",
    ),
    "layer_norm_wgrad, weight": (
        piper.layer_norm_wgrad, lambda d: (*layer_norm(d, "rvw", "vw"), torch.float64, [True, False]), "+++ +++ +11 "
                                                                                                       "+11 -> ++ 0",
    ),
    "layer_norm_wgrad, bias": (
        piper.layer_norm_wgrad, lambda d: (*layer_norm(d, "rw", "w"), torch.float64, [False, True]), "++ ++ +1 +1 -> 0 "
                                                                                                     "+",
    ),
    "layer_norm_backward": (
        piper.layer_norm_backward, lambda d: (*layer_norm(d, "rtW", "W"), d.f("W"), [True, True]), "++- ++- ++1 ++1 - "
                                                                                                   "-> ++- - -",
    ),
    "layer_norm_backward, weight": (
        piper.layer_norm_backward, lambda d: (*layer_norm(d, "rtW", "W"), d.f("W"), [True, False]),
        "++- ++- ++1 ++1 - -> ++- - 0",
    ),
    "layer_norm_backward, bias": (
        piper.layer_norm_backward, lambda d: (*layer_norm(d, "rtW", "W"), None, [False, True]), "++- ++- ++1 ++1 -> "
                                                                                                "++- 0 -",
    ),
    "rms_norm": (piper.rms_norm, lambda d: (d.f("rtw"), d.shape("w"), d.f("w"), 1e-5), "==- - -> ==- ==1"),
    "rms_norm_dgrad": (piper.rms_norm_dgrad, lambda d: (*rms_norm(d, "rtw", "w"), d.f("w")), "==- ==- ==1 - -> ==-"),
    "rms_norm_wgrad": (piper.rms_norm_wgrad, lambda d: (*rms_norm(d, "rtw", "w"), torch.float64), "++= ++= ++1 -> ="),
    "native_layer_norm": (
        aten.native_layer_norm, lambda d: (d.f("rtw"), d.shape("w"), d.f("w"), None, 1e-5), "==- - -> ==- ==1 ==1",
    ),
    "native_layer_norm_backward": (
        aten.native_layer_norm_backward, lambda d: (*layer_norm(d, "rtw", "w"), d.f("w"), d.f("w"), [True, True, True]),
        "++- ++- ++1 ++1 - - -> ++- - -",
    ),
    "native_layer_norm_backward, weights": (
        aten.native_layer_norm_backward, lambda d: (*layer_norm(d, "rtw", "w"), d.f("w"), d.f("w"), [False, True, True]),
        "+++ +++ ++1 ++1 + + -> 0 + +",
    ),
    "native_layer_norm_backward, bias": (
        aten.native_layer_norm_backward, lambda d: (*layer_norm(d, "rtw", "w"), d.f("w"), d.f("w"), [True, False, True]),
        "++- ++- ++1 ++1 - - -> ++- 0 -",
    ),
    "batch_norm of averages": (
        aten._native_batch_norm_legit_no_training,
        lambda d: (d.f("rcS"), d.f("c"), d.f("c"), d.f("c"), d.f("c").square() + 1, 0.1, 1e-5),
        "+++ + + + + -> +++ 0 0",
    ),
    "group_norm": (
        aten.native_group_norm,
        lambda d: (d.f("rgCS").flatten(1, 2), d.f("gC").flatten(), None, d.n("r"), d.n("gC"), d.n("S"), d.n("g"), 1e-5),
        "=(=-)- (=-) -> =(=-)- == ==",
    ),
    "group_norm gradient": (
        aten.native_group_norm_backward, lambda d: group_norm(d, (True, True, True)),
        "+(=-)- +(=-)- += += (=-) -> +(=-)- (=-) (=-)",
    ),
    "group_norm gradient, frozen": (
        aten.native_group_norm_backward, lambda d: group_norm(d, (True, False, False)), "+(+-)- +(+-)- ++ ++ (+-) -> "
                                                                                        "+(+-)- 0 0",
    ),
    "group_norm gradient, weights": (
        aten.native_group_norm_backward, lambda d: group_norm(d, (False, True, True)), "-(--)- -(--)- -- -- (--) -> 0 "
                                                                                       "(--) (--)",
    ),
})  # fmt: skip

LOSSES = cases({
    "cross_entropy": (piper.cross_entropy, lambda d: loss(d, "none"), "=- = -> = ="),
    "cross_entropy, mean": (piper.cross_entropy, lambda d: loss(d, "mean"), "-- - -> . -"),
    "cross_entropy, sum": (piper.cross_entropy, lambda d: loss(d, "sum"), "+- + -> . +"),
    "cross_entropy gradient": (piper.cross_entropy_dgrad, lambda d: loss_gradient(d, "none"), "= =- = = -> =-"),
    "cross_entropy gradient, mean": (piper.cross_entropy_dgrad, lambda d: loss_gradient(d, "mean"), ". -- - - -> --"),
    "cross_entropy gradient, sum": (piper.cross_entropy_dgrad, lambda d: loss_gradient(d, "sum"), ". =- = = -> =-"),
    "nll_loss": (aten.nll_loss_forward, lambda d: nll(d, 0), "+- + - -> + ."),
    "nll_loss, mean": (aten.nll_loss_forward, lambda d: nll(d, 1), "-- - - -> . ."),
    "nll_loss, sum": (aten.nll_loss_forward, lambda d: nll(d, 2), "+- + - -> . ."),
    "nll_loss of one row": (aten.nll_loss_forward, lambda d: (d.f("C"), d.i("", 2), None, 1, -100), "- . -> . ."),
    "nll_loss gradient": (aten.nll_loss_backward, lambda d: nll_gradient(d, 0), "= =- = - . -> =-"),
    "nll_loss gradient, mean": (aten.nll_loss_backward, lambda d: nll_gradient(d, 1), ". -- - - . -> --"),
    "nll_loss gradient, sum": (aten.nll_loss_backward, lambda d: nll_gradient(d, 2), ". =- = - . -> =-"),
    "mse_loss": (aten.mse_loss, lambda d: (d.f("rc"), d.f("rc"), 0), "== == -> =="),
    "mse_loss, mean": (aten.mse_loss, lambda d: (d.f("rc"), d.f("rc")), "-- -- -> ."),
    "mse_loss, sum": (aten.mse_loss, lambda d: (d.f("rc"), d.f("c"), 2), "++ + -> ."),
    "mse_loss gradient": (aten.mse_loss_backward, lambda d: (d.f("rc"), d.f("rc"), d.f("rc"), 0), "== == == -> =="),
    "mse_loss gradient, mean": (aten.mse_loss_backward, lambda d: (d.f(""), d.f("rc"), d.f("rc"), 1), ". -- -- -> --"),
    "mse_loss gradient, sum": (aten.mse_loss_backward, lambda d: (d.f(""), d.f("rc"), d.f("rc"), 2), ". == == -> =="),
    "smooth_l1_loss, sum": (aten.smooth_l1_loss, lambda d: (d.f("rc"), d.f("rc"), 2, 0.5), "++ ++ -> ."),
    "smooth_l1_loss gradient, sum": (
        aten.smooth_l1_loss_backward, lambda d: (d.f(""), d.f("rc"), d.f("rc"), 2, 0.5), ". == == -> ==",
    ),
    "huber_loss, sum": (aten.huber_loss, lambda d: (d.f("rc"), d.f("rc"), 2, 0.5), "++ ++ -> ."),
    "huber_loss gradient": (aten.huber_loss_backward, lambda d: (d.f("rc"), d.f("rc"), d.f("rc"), 0, 0.5), "== == == -> =="),
    "binary_cross_entropy, "
    "sum": (aten.binary_cross_entropy, lambda d: (d.p("rc"), d.p("rc"), d.p("c"), 2), "++ ++ + -> ."),
    "binary_cross_entropy gradient, mean": (
        aten.binary_cross_entropy_backward, lambda d: (d.f(""), d.p("rc"), d.p("rc"), None, 1), ". -- -- -> --",
    ),
    "binary_cross_entropy gradient, sum": (
        aten.binary_cross_entropy_backward, lambda d: (d.f(""), d.p("rc"), d.p("rc"), d.p("c"), 2), ". == == = -> ==",
    ),
})  # fmt: skip

EXPERTS = cases({
    "route": (piper.route, lambda d: (d.f("6w"), choices(d), 4), "-- -- -> -- -"),
    "route gradient": (piper.route_dgrad, lambda d: (d.f("62w").flatten(0, 1), choices(d)), "-= -- -> -="),
    "grouped_mm": (piper.grouped_mm, lambda d: (*grouped(d, "k", "k")[:2], d.f("4kn")), "-+ - -+= -> -="),
    "grouped_mm gradient": (piper.grouped_mm_dgrad, lambda d: (*grouped(d, "n", "n")[:2], d.f("4kn")), "-+ - -=+ -> "
                                                                                                       "-="),
    "grouped_mm gradient of matrices": (piper.grouped_mm_wgrad, lambda d: grouped(d, "k", "n"), "-= - -= -> -=="),
    "grouped_add": (piper.grouped_add, lambda d: (*grouped(d, "k", "k")[:2], d.f("4k")), "-= - -= -> -="),
    "grouped_add gradient of biases": (piper.grouped_add_wgrad, lambda d: grouped(d, "k", "k")[:2], "-= - -> -="),
    "unroute": (piper.unroute, lambda d: (d.f("62w").flatten(0, 1), choices(d), d.f("62")), "-= -- -- -> -="),
    "unroute gradient": (piper.unroute_dgrad, lambda d: (d.f("6w"), choices(d), d.f("62")), "-= -- -- -> -="),
    "unroute gradient of shares": (
        piper.unroute_wgrad, lambda d: (d.f("6w"), choices(d), d.f("62w").flatten(0, 1), torch.float64), "-+ -- -+ -> "
                                                                                                         "--",
    ),
})  # fmt: skip
