"""Calls whose rules are judged: views, parts of tensors, reductions, look-ups, and tensors made of numbers."""

from __future__ import annotations

from typing import Any

import torch

from packages.capture.tests.layout_judge import Draw, cases

aten = torch.ops.aten


def embedding_gradient(d: Draw, padding: int = -1, by_count: bool = False) -> tuple[Any, ...]:
    return d.f("rtw"), d.i("rt", d.n("V")), d.n("V"), padding, by_count


def scattered(d: Draw) -> tuple[Any, ...]:
    """Into [r, 9, w], to places of which no two are equal, so that what is written does not depend on an order."""
    return d.f("r9w"), 1, d.order("rw6", 9).transpose(1, 2).contiguous(), d.f("r6w")


VIEWS = cases({
    "view, merge": (aten.view, lambda d: (d.f("rtw"), [d.n("rt"), d.n("w")]), "=== -> (==)="),
    "view, split": (aten.view, lambda d: (d.f("rhg").flatten(1), d.shape("rhg")), "=(==) -> ==="),
    "view, regroup": (aten.view, lambda d: (d.f("hg").flatten(0, 1).view(-1, 1), [d.n("h"), 1, d.n("g")]), "(==)1 -> =1="),
    "view of a number": (aten.view, lambda d: (d.f(""), [1, 1]), ". -> 11"),
    "view, tangled": (aten.view, lambda d: (d.f("64").flatten().view(4, 6), [6, 4]), "-- -> --"),
    "_unsafe_view": (aten._unsafe_view, lambda d: (d.f("rt4"), [d.n("rt"), 4]), "=== -> (==)="),
    "reshape": (aten.reshape, lambda d: (d.f("rhg"), [d.n("r"), d.n("hg")]), "=== -> =(==)"),
    "permute": (aten.permute, lambda d: (d.f("abc"), [2, 0, -2]), "=== -> ==="),
    "transpose": (aten.transpose.int, lambda d: (d.f("abc"), -1, 0), "=== -> ==="),
    "t": (aten.t, lambda d: (d.f("ab"),), "== -> =="),
    "t of a vector": (aten.t, lambda d: (d.f("a"),), "= -> ="),
    "unsqueeze": (aten.unsqueeze, lambda d: (d.f("ab"), -2), "== -> =1="),
    "unsqueeze of a number": (aten.unsqueeze, lambda d: (d.f(""), 0), ". -> 1"),
    "squeeze": (aten.squeeze.dim, lambda d: (d.f("a1b"), 1), "=1= -> =="),
    "squeeze of more than one": (aten.squeeze.dim, lambda d: (d.f("ab"), -1), "=- -> =-"),
    "squeeze, dimensions": (aten.squeeze.dims, lambda d: (d.f("1a1b"), [0, -2, 3]), "1=1- -> =-"),
    "squeeze, all": (aten.squeeze, lambda d: (d.f("1a"),), "1- -> -"),
    "expand": (aten.expand, lambda d: (d.f("h1w"), [d.n("r"), -1, d.n("g"), d.n("w")]), "=1= -> ===="),
    "expand of a number": (aten.expand, lambda d: (d.f(""), d.shape("rw")), ". -> =="),
    "select": (aten.select.int, lambda d: (d.f("aBc"), -2, 1), "=-= -> =="),
    "select_backward": (aten.select_backward, lambda d: (d.f("ac"), d.shape("aBc"), 1, 0), "== -> =-="),
    "unbind": (aten.unbind.int, lambda d: (d.f("a3c"), 1), "=-= -> == == =="),
    "slice, all": (aten.slice.Tensor, lambda d: (d.f("ab"), 1, 0, 2**63 - 1), "== -> =="),
    "slice, block": (aten.slice.Tensor, lambda d: (d.f("a3b").flatten(1), -1, d.n("b"), 2 * d.n("b")), "=(-=) -> =="),
    "slice, last block": (aten.slice.Tensor, lambda d: (d.f("3ba").flatten(0, 1), 0, -d.n("b")), "(-=)= -> =="),
    "slice, part": (aten.slice.Tensor, lambda d: (d.f("ab"), 1, 1, 4), "=- -> =-"),
    "slice, steps": (aten.slice.Tensor, lambda d: (d.f("ab"), 1, 0, 6, 2), "=- -> =-"),
    "slice_backward, block": (
        aten.slice_backward, lambda d: (d.f("ab"), [d.n("a"), 2 * d.n("b")], 1, d.n("b"), 2 * d.n("b"), 1), "== -> =(-=)",
    ),
    "slice_backward, all": (aten.slice_backward, lambda d: (d.f("ab"), d.shape("ab"), 1, 0, 2**63 - 1, 1), "== -> =="),
    "slice_backward, "
    "part": (aten.slice_backward, lambda d: (d.f("aB"), d.shape("a7"), 1, 1, 1 + d.n("B"), 1), "=- -> =-"),
    "diagonal": (aten.diagonal, lambda d: (d.f("a3c4"), 1, -3, -1), "=-=- -> ==-"),
    "diagonal_backward": (aten.diagonal_backward, lambda d: (d.f("a3"), [d.n("a"), 3, 4], 1, 1, 2), "=- -> =--"),
    "diag_embed": (aten.diag_embed, lambda d: (d.f("aB"), 0, 0, 2), "=- -> -=-"),
    "tril": (aten.tril, lambda d: (d.f("aBC"), -1), "=-- -> =--"),
    "triu": (aten.triu, lambda d: (d.f("aBC"), 1), "=-- -> =--"),
    "unfold": (aten.unfold, lambda d: (d.f("a7b"), 1, 3, 2), "=-= -> =-=-"),
    "unfold_backward": (aten.unfold_backward, lambda d: (d.f("a3b3"), [d.n("a"), 7, d.n("b")], 1, 3, 2), "=-=- -> =-="),
})  # fmt: skip

PARTS = cases({
    "split": (aten.split.Tensor, lambda d: (d.f("a3b").flatten(1), d.n("b"), -1), "=(-=) -> == == =="),
    "split, uneven": (aten.split.Tensor, lambda d: (d.f("a7"), 3, 1), "=- -> =- =- =1"),
    "split_with_sizes": (aten.split_with_sizes, lambda d: (d.f("2ba").flatten(0, 1), [d.n("b")] * 2), "(-=)= -> == =="),
    "split_with_sizes, uneven": (aten.split_with_sizes, lambda d: (d.f("6a"), [2, 4]), "-= -> -= -="),
    "cat": (aten.cat, lambda d: ([d.f("ab"), d.f("ab"), d.f("ab")], -1), "== == == -> =(-=)"),
    "cat, uneven": (aten.cat, lambda d: ([d.f("a4"), d.f("a2")], 1), "=- =- -> =-"),
    "cat, an empty vector": (aten.cat, lambda d: ([d.f("ab"), d.f("0")], 0), "== 0 -> =="),
    "stack": (aten.stack, lambda d: ([d.f("ab"), d.f("ab")], 1), "== == -> =-="),
    "slice_scatter, block": (
        aten.slice_scatter, lambda d: (d.f("a2b").flatten(1), d.f("ab"), 1, d.n("b"), 2 * d.n("b")), "=(-=) == -> "
                                                                                                     "=(-=)",
    ),
    "slice_scatter, part": (aten.slice_scatter, lambda d: (d.f("a7"), d.f("a3"), -1, 2, 5), "=- =- -> =-"),
    "select_scatter": (aten.select_scatter, lambda d: (d.f("aBc"), d.f("ac"), 1, 1), "=-= == -> =-="),
    "constant_pad_nd": (aten.constant_pad_nd, lambda d: (d.f("abC"), [1, 2, 0, 0]), "==- -> ==-"),
    "constant_pad_nd, ones": (aten.constant_pad_nd, lambda d: (d.f("aBc"), [0, 0, 0, 1], 1.0), "=-= -> =-="),
    "repeat": (aten.repeat, lambda d: (d.f("1b"), [3, d.n("a"), 2]), "1= -> ==(-=)"),
    "repeat of a number": (aten.repeat, lambda d: (d.f(""), d.shape("ab")), ". -> =="),
    "flip": (aten.flip, lambda d: (d.f("aBc"), [-2]), "=-= -> =-="),
    "roll": (aten.roll, lambda d: (d.f("aBc"), [1], [1]), "=-= -> =-="),
    "roll, all": (aten.roll, lambda d: (d.f("ab"), [1]), "-- -> --"),
})  # fmt: skip

REDUCTIONS = cases({
    "sum": (aten.sum.dim_IntList, lambda d: (d.f("abc"), [0, -1]), "+=+ -> ="),
    "sum, kept": (aten.sum.dim_IntList, lambda d: (d.f("abc"), [1], True), "=+= -> =1="),
    "sum, no dimensions": (aten.sum.dim_IntList, lambda d: (d.f("ab"), []), "++ -> ."),
    "sum, all": (aten.sum, lambda d: (d.f("ab"),), "++ -> ."),
    "sum of booleans": (aten.sum.dim_IntList, lambda d: (d.b("ab"), [0]), "+= -> ="),
    "sum of a number": (aten.sum.dim_IntList, lambda d: (d.f(""), [0]), ". -> ."),
    "count_nonzero": (aten.count_nonzero.dim_IntList, lambda d: (d.b("ab"), [1]), "=+ -> ="),
    "mean": (aten.mean.dim, lambda d: (d.f("abc"), [1], True), "=-= -> =1="),
    "mean, all": (aten.mean, lambda d: (d.f("ab"),), "-- -> ."),
    "amax": (aten.amax, lambda d: (d.f("ab"), [-1], True), "=- -> =1"),
    "amin": (aten.amin, lambda d: (d.f("ab"),), "-- -> ."),
    "aminmax": (aten.aminmax, lambda d: (d.f("ab"),), "=- -> = =", {"dim": 1}),
    "argmax": (aten.argmax, lambda d: (d.f("ab"), 1), "=- -> ="),
    "argmin, all": (aten.argmin, lambda d: (d.f("ab"),), "-- -> ."),
    "max": (aten.max.dim, lambda d: (d.f("ab"), 0), "-= -> = ="),
    "max, all": (aten.max, lambda d: (d.f("ab"),), "-- -> ."),
    "min": (aten.min.dim, lambda d: (d.f("ab"), -1, True), "=- -> =1 =1"),
    "min, all": (aten.min, lambda d: (d.f("ab"),), "-- -> ."),
    "any": (aten.any.dim, lambda d: (d.b("ab"), 1), "=- -> ="),
    "any, dimensions": (aten.any.dims, lambda d: (d.b("abc"), [0, 1]), "--= -> ="),
    "any, all": (aten.any, lambda d: (d.b("ab"),), "-- -> ."),
    "all": (aten.all.dim, lambda d: (d.b("ab"), 0), "-= -> ="),
    "all, dimensions": (aten.all.dims, lambda d: (d.b("abc"), [2], True), "==- -> ==1"),
    "all, all": (aten.all, lambda d: (d.b("ab"),), "-- -> ."),
    "prod": (aten.prod.dim_int, lambda d: (d.f("ab"), 1), "=- -> ="),
    "prod, all": (aten.prod, lambda d: (d.f("ab"),), "-- -> ."),
    "logsumexp": (aten.logsumexp, lambda d: (d.f("ab"), [1]), "=- -> ="),
    "vector_norm": (aten.linalg_vector_norm, lambda d: (d.f("ab"), 2, [0], True), "-= -> 1="),
    "var": (aten.var.correction, lambda d: (d.f("ab"), [1]), "=- -> =", {"correction": 0}),
    "std": (aten.std.correction, lambda d: (d.f("ab"), [0]), "-= -> ="),
    "var_mean": (aten.var_mean.correction, lambda d: (d.f("abc"), [1]), "=-= -> =1= =1=", {"keepdim": True}),
    "std_mean": (aten.std_mean.correction, lambda d: (d.f("ab"),), "-- -> . ."),
    "median": (aten.median.dim, lambda d: (d.f("ab"), 1), "=- -> = ="),
    "nanmedian": (aten.nanmedian.dim, lambda d: (d.f("ab"), 1), "=- -> = ="),
    "mode": (aten.mode, lambda d: (d.i("ab", 3), 1), "=- -> = ="),
    "kthvalue": (aten.kthvalue, lambda d: (d.f("ab"), 2, 0), "-= -> = ="),
    "softmax": (aten._softmax, lambda d: (d.f("abc"), -1, False), "==- -> ==-"),
    "softmax of rows that may be masked": (aten._safe_softmax, lambda d: (d.f("abc"), 1), "=-= -> =-="),
    "softmax of a number": (aten._softmax, lambda d: (d.f(""), 0, False), ". -> ."),
    "log_softmax": (aten._log_softmax, lambda d: (d.f("ab"), 0, False), "-= -> -="),
    "softmax gradient": (aten._softmax_backward_data, lambda d: (d.f("ab"), d.p("ab"), -1, torch.float64), "=- =- -> =-"),
    "log_softmax "
    "gradient": (aten._log_softmax_backward_data, lambda d: (d.f("ab"), d.f("ab"), 1, torch.float64), "=- =- -> =-"),
    "cumsum": (aten.cumsum, lambda d: (d.f("abc"), 1), "=-= -> =-="),
    "cumsum of booleans": (aten.cumsum, lambda d: (d.b("ab"), -1), "=- -> =-", {"dtype": torch.int32}),
    "cumprod": (aten.cumprod, lambda d: (d.f("ab"), 1), "=- -> =-"),
    "logcumsumexp": (aten.logcumsumexp, lambda d: (d.f("ab"), 0), "-= -> -="),
    "cummax": (aten.cummax, lambda d: (d.f("ab"), 0), "-= -> -= -="),
    "cummin": (aten.cummin, lambda d: (d.f("ab"), 1), "=- -> =- =-"),
    "sort": (aten.sort, lambda d: (d.f("ab"), 0), "-= -> -= -="),
    "sort, stable": (aten.sort.stable, lambda d: (d.i("ab", 3),), "=- -> =- =-", {"stable": True, "dim": 1}),
    "topk": (aten.topk, lambda d: (d.f("abc"), 2), "==- -> ==- ==-"),
    "argsort": (aten.argsort, lambda d: (d.f("ab"), 0), "-= -> -="),
})  # fmt: skip

LOOKUPS = cases({
    "embedding": (aten.embedding, lambda d: (d.f("Vw"), d.i("rt", d.n("V"))), "-= == -> ==="),
    "embedding gradient": (aten.embedding_dense_backward, embedding_gradient, "++= ++ -> -="),
    "embedding gradient, padding": (aten.embedding_dense_backward, lambda d: embedding_gradient(d, 1), "++= ++ -> -="),
    "embedding gradient, by count": (
        aten.embedding_dense_backward, lambda d: embedding_gradient(d, by_count=True), "--= -- -> -=",
    ),
    "gather": (aten.gather, lambda d: (d.f("rPw"), 1, d.i("rkw", d.n("P"))), "=-= === -> ==="),
    "gather of fewer": (aten.gather, lambda d: (d.f("9Pw"), -2, d.i("akw", d.n("P"))[:6]), "--= -== -> -=="),
    "gather of numbers": (aten.gather, lambda d: (d.i("rtE", 9).int(), -1, d.i("rt1", d.n("E"))), "==- ==1 -> ==1"),
    "scatter": (aten.scatter.src, scattered, "=-= =-= =-= -> =-="),
    "scatter, one value": (aten.scatter.value, lambda d: (d.f("rP"), 1, d.i("rk", d.n("P")), 1.0), "=- =- -> =-"),
    "scatter, zero": (aten.scatter.value, lambda d: (d.f("rP"), -1, d.i("rk", d.n("P")), 0.0), "=- =- -> =-"),
    "scatter_add": (aten.scatter_add, lambda d: (d.f("rPw"), 1, d.i("rkw", d.n("P")), d.f("rkw")), "=-= =-= =-= -> "
                                                                                                   "=-="),
    "scatter_add, longer source": (
        aten.scatter_add, lambda d: (d.f("bPw"), 1, d.i("bkw", d.n("P"))[:4], d.f("bkw")), "--= --= --= -> --=",
    ),
    "scatter_reduce": (
        aten.scatter_reduce.two, lambda d: (d.f("rP"), 1, d.i("rk", d.n("P")), d.f("rk"), "amax"), "=- =- =- -> =-",
    ),
    "index_select": (aten.index_select, lambda d: (d.f("aPb"), 1, d.i("k", d.n("P"))), "=-= = -> ==="),
    "index_add": (aten.index_add, lambda d: (d.f("aPb"), 1, d.i("k", d.n("P")), d.f("akb")), "=-= - =-= -> "
                                                                                             "=-=", {"alpha": 2}),
    "index_copy": (aten.index_copy, lambda d: (d.f("9b"), 0, d.order("6", 9), d.f("6b")), "-= - -= -> -="),
    "index": (aten.index.Tensor, lambda d: (d.f("aPb"), [None, d.i("rk", d.n("P"))]), "=-= == -> ===="),
    "index, pairs": (aten.index.Tensor, lambda d: (d.f("PQb"), [d.i("rk", d.n("P")), d.i("k", d.n("Q"))]), "--= == = -> ==="),
    "index, apart": (
        aten.index.Tensor, lambda d: (d.f("PaQ"), [d.i("r1", d.n("P")), None, d.i("1k", d.n("Q"))]), "-=- =1 1= -> ===",
    ),
    "index, last": (aten.index.Tensor, lambda d: (d.f("abP"), [None, None, d.i("k", d.n("P"))]), "==- = -> ==="),
    "index, mask": (aten.index.Tensor, lambda d: (d.f("ab"), [d.b("a")]), "-- - -> --"),
    "_unsafe_index": (aten._unsafe_index.Tensor, lambda d: (d.f("aP"), [None, d.i("k", d.n("P"))]), "=- = -> =="),
    "index_put": (aten.index_put, lambda d: (d.f("aPb"), [None, d.i("k", d.n("P"))], d.f("akb"), True), "=-= - =-= -> "
                                                                                                        "=-="),
    "index_put, row": (aten.index_put, lambda d: (d.f("Pab"), [d.i("k", d.n("P"))], d.f("b"), True), "-== - = -> -=="),
    "index_put, column": (aten.index_put, lambda d: (d.f("Pab"), [d.i("k", d.n("P"))], d.f("ka1"), True), "-== - -=1 -> -=="),
    "index_put, mask": (aten.index_put, lambda d: (d.f("ab"), [d.b("ab")], d.f("")), "-- -- . -> --"),
    "_unsafe_index_put": (aten._unsafe_index_put, lambda d: (d.f("Pa"), [d.i("k", d.n("P"))], d.f("ka"), True), "-= - -= -> -="),
    "bucketize": (aten.bucketize.Tensor, lambda d: (d.f("ab"), d.f("P").sort()[0]), "== - -> =="),
})  # fmt: skip

MADE = cases({
    "zeros": (aten.zeros, lambda d: (d.shape("ab"),), "-> ==", {"dtype": torch.float64}),
    "ones": (aten.ones, lambda d: (d.shape("ab"),), "-> =="),
    "full": (aten.full, lambda d: (d.shape("ab"), 3.0), "-> =="),
    "full of zeros": (aten.full, lambda d: (d.shape("ab"), 0.0), "-> ==", {"dtype": torch.float64}),
    "new_zeros": (aten.new_zeros, lambda d: (d.f("cd"), d.shape("ab")), "-- -> =="),
    "new_ones": (aten.new_ones, lambda d: (d.f("cd"), d.shape("ab")), "-- -> =="),
    "new_full": (aten.new_full, lambda d: (d.f("cd"), d.shape("ab"), 2), "-- -> =="),
    "scalar_tensor": (aten.scalar_tensor, lambda d: (2,), "-> ."),
    "arange": (aten.arange, lambda d: (d.n("a"),), "-> -"),
    "arange, start": (aten.arange.start, lambda d: (1, 1 + d.n("a")), "-> -"),
    "arange, step": (aten.arange.start_step, lambda d: (0, 12, 2), "-> -"),
    "linspace": (aten.linspace, lambda d: (0, 1, d.n("a")), "-> -"),
    "eye": (aten.eye, lambda d: (d.n("a"),), "-> --"),
    "eye, two sizes": (aten.eye.m, lambda d: (d.n("a"), d.n("b")), "-> --"),
})  # fmt: skip
