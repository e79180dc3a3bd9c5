"""Write a described job as a FILE.py of `job` and `strategy`, in at most forty lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from piper_interop.neutral.described import (
    DeviceLayout,
    JobDescription,
    OffloadedTensors,
    Recomputation,
    literal,
)
from piper_ir.ground.errors import JobError
from piper_ir.program.ops import BESIDE, WITHIN

COLUMNS = 120


def python(described: JobDescription, title: str) -> str:
    """Return the text of the FILE.py; `title` says where the job comes from, in a sentence without a full stop.

    Raises JobError if rows do not divide into microbatches of replicas, which no line could say.
    """
    check_batch(described)
    notes = list(_warnings(described.notes))
    stack = "@inductor" if described.stack == "inductor" else ""
    selects = described.recompute or described.offload or described.optim_on_host
    head = [
        *wrap(f'"""{title}, written by `piper import`.', COLUMNS),
        "",
        f"piper simulate FILE.py --cluster NAME{stack}{' --cuda-graph' if described.cuda_graph else ''} predicts it; "
        "piper plan FILE.py searches for a faster strategy.",
        '"""',
        "",
        *(["import warnings", ""] if notes else []),
        "import piper",
        f"from piper import {'ANY, recipes, where' if selects else 'recipes'}",
        "",
        *notes,
    ]
    return "\n".join([*head, *job_lines(described), *_strategy(described)]) + "\n"


def check_batch(described: JobDescription) -> None:
    """Raise JobError unless the rows of a step divide into microbatches of all replicas."""
    replicas, rows = described.layout.replicas, described.rows
    if described.global_batch % (replicas * rows) or described.global_batch < 1:
        raise JobError(
            f"{described.name}: {described.global_batch} rows of a step do not divide into {replicas} replicas of "
            f"{rows} rows per microbatch; give another number of devices, or other rows"
        )


def _warnings(notes: Sequence[str]) -> Iterator[str]:
    """Yield the lines that tell the notes to whoever loads the file, and so to every command that takes it."""
    if not notes:
        return
    yield "for note in ("
    for note in notes:
        parts = wrap(note, COLUMNS - 8, drop_whitespace=False)
        yield from (f"    {literal(part)}" for part in parts[:-1])
        yield f"    {literal(parts[-1])},"
    yield "):"
    yield "    warnings.warn(note, piper.PiperWarning, stacklevel=1)"
    yield ""


def job_lines(described: JobDescription) -> Iterator[str]:
    """Yield the lines that make `sizes` and `job`, after `import piper`."""
    yield from _comment(described, "sizes")
    yield from _call(f"sizes = {described.sizes.text()}")
    yield from _comment(described, "job")
    precision = f"params={literal(described.params)}, compute={literal(described.compute)}"
    if described.compute == described.params:
        precision = f"params={literal(described.params)}"
    if described.reduce != described.params:
        precision += f", reduce={literal(described.reduce)}"
    if described.accumulate:
        precision += f", accumulate={literal(described.accumulate)}"
    arguments = [
        f"global_batch={described.global_batch}",
        f"length={described.length}",
        f"precision=piper.Precision({precision}{_kept(described)}{_scale(described)}{_float8(described)})",
    ]
    if described.clip_norm:
        arguments.append(f"clip_norm={described.clip_norm!r}")
    if described.lr != 3e-4:
        arguments.append(f"lr={described.lr!r}")
    if described.optimizer != "adamw":
        arguments.append(f"optimizer={literal(described.optimizer)}")
    yield from _call(f"job = piper.models.job(sizes, {', '.join(arguments)})")


def _kept(described: JobDescription) -> str:
    """Return the precision of a mixture's router, whose rounded scores would send tokens to other experts."""
    mixture = "experts" in described.sizes.fields and described.compute != described.params
    return ', keep={"*.router.*": "float32"}' if mixture else ""


def _scale(described: JobDescription) -> str:
    """Return how the loss is scaled, unless as it is by default."""
    named = dict(described.loss_scale)
    if not named:
        return ""
    fixed = named.get("fixed")
    scale = f"piper.LossScale({_arguments(named)})" if fixed is None else repr(fixed)
    return f", loss_scale={scale}"


def _float8(described: JobDescription) -> str:
    """Return the linear layers that multiply in float8."""
    if described.float8 is None:
        return ""
    usual = {"modules": ("*",), "keep": (), "saved": "input"}
    given = {n: v for n, v in vars(described.float8).items() if n != "recipe" and v != usual[n]}
    recipe = literal(described.float8.recipe)
    if not given:
        return f", float8={recipe}"
    return f", float8=piper.Float8({recipe}, {_arguments(given)})"


def _strategy(described: JobDescription) -> Iterator[str]:
    layout = described.layout
    yield from _comment(described, "mesh")
    yield "strategy = piper.Strategy("
    order = {"order": layout.order} if layout.order else {}
    yield f"    piper.Mesh({_arguments({**mesh(layout), **order})}),"
    yield "    ("
    for part, call in calls(described):
        origin = described.origins.get(part, "")
        line = f"        {call},"
        if origin and len(line) + len(origin) + 4 <= COLUMNS:
            yield f"{line}  # {origin}"
        else:
            if origin:
                yield from wrap(
                    origin,
                    COLUMNS,
                    initial_indent="        # ",
                    subsequent_indent="        # ",
                    break_on_hyphens=False,
                )
            yield from wrap(
                line,
                COLUMNS,
                subsequent_indent=" " * 12,
                break_long_words=False,
                break_on_hyphens=False,
            )
    yield "    ),"
    yield "    global_batch=job.global_batch,"
    yield ")"


def mesh(layout: DeviceLayout) -> dict[str, int]:
    """Return the sizes of the mesh's axes; the ones of size 1 are left out, but for dp."""
    sizes = {
        "pp": layout.pp,
        "rep": layout.dp_replicate,
        "dp": layout.dp // layout.sharing_replicas // layout.etp,
        "ep": layout.sharing_replicas,
        "etp": layout.etp,
        "cp": layout.cp,
        "tp": layout.tp,
    }
    return {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"}


def calls(described: JobDescription) -> Iterator[tuple[str, str]]:
    """Yield the calls that make the directives, each with the name of its part in ORIGINS."""
    layout = described.layout
    if layout.tp > 1:
        pieces = f", pieces={layout.pieces}" if layout.pieces > 1 else ""
        yield "tp", f"*recipes.tensor_parallel(sequence={layout.sequence}{pieces})"
    if layout.cp > 1:
        yield "cp", f"*recipes.context_parallel(attention={literal(layout.attention)})"
    if layout.ep > 1:
        axes = (*layout.folded, *(["ep"] if layout.sharing_replicas > 1 else []))
        how: dict[str, Any] = {} if axes == ("ep",) else {"over": axes}
        if layout.hidden:
            how["hidden"] = layout.hidden
        if layout.beside:
            how["beside"] = True
        yield "ep", f"*recipes.expert_parallel({_arguments(how)})"
    part = "pp" if layout.pp > 1 else "batch"
    yield from ((part, call) for call in _pipeline(described))
    if described.loss_tiles > 1:
        yield "loss", f"piper.tile_loss({described.loss_tiles})"
    yield from (("recompute", _recompute(r)) for r in described.recompute)
    if described.offload is not None:
        yield "offload", _offload(described.offload)
    if described.optim_on_host:
        part = "" if described.optim_on_host == 1 else f"layer=range({described.layers_on_host})"
        tensors = "states" if described.params_on_host else "optim"
        yield "offload", f'piper.offload(where({part}), tensors="{tensors}")'
    if layout.replicas > 1 or (layout.zero and layout.over_cp and layout.cp > 1):
        yield "dp", f"*recipes.data_parallel({_arguments(_replicated(layout))})"


def _pipeline(described: JobDescription) -> Iterator[str]:
    layout = described.layout
    how: dict[str, Any] = {"rows": described.rows}
    if layout.schedule in ("interleaved", "looped_bfs", "interleaved_zb"):
        how["chunks"] = layout.chunks
    if layout.group is not None:
        how["group"] = layout.group
    if layout.at and layout.units == "layers":
        how["at"] = layout.at
    elif layout.at:
        yield f"piper.partition({len(layout.at) + 1}, at={layout.at!r}, units={literal(layout.units)})"
    yield f"*recipes.{layout.schedule}({_arguments(how)})"


def _recompute(recompute: Recomputation) -> str:
    layers = "ANY" if recompute.layers is None else literal(recompute.layers)
    if isinstance(recompute.layers, int):
        layers = f"range({recompute.layers})"
    group = "" if recompute.group == 1 else f", group={recompute.group}"
    keep, inside = recompute.keep, ""
    if WITHIN in keep and BESIDE not in keep:
        keep, _, modules = keep.partition(WITHIN)
        inside = f", modules={literal(tuple(modules.split('+')))}"
    return f"piper.recompute(where(layer={layers}), keep={literal(keep)}{group}{inside})"


def _offload(offload: OffloadedTensors) -> str:
    layers = "ANY" if offload.layers is None else f"range({offload.layers})"
    how: dict[str, Any] = {"tensors": offload.tensors}
    if offload.prefetch != 1:
        how["prefetch"] = offload.prefetch
    if offload.modules:
        how["modules"] = offload.modules
    return f"piper.offload(where(layer={layers}), {_arguments(how)})"


def _replicated(layout: DeviceLayout) -> dict[str, Any]:
    """Return the arguments of `recipes.data_parallel`."""
    shards = ["dp", *(["ep"] if layout.sharing_replicas > 1 else [])]
    if layout.etp > 1:
        shards.append("etp")
    if layout.zero and layout.over_cp and layout.cp > 1:
        shards.append("cp")
    how: dict[str, Any] = {"over": tuple(shards)}
    if layout.dp_replicate > 1:
        how["over"] = (*shards, "rep")
        states = ("optim", "grads", "params")[: layout.zero]
        if states:
            how["shard"] = {state: tuple(shards) for state in states}
    else:
        how["zero"] = layout.zero
    if layout.bucket_mb is not None:
        how["bucket_mb"] = layout.bucket_mb
    if layout.prefetch is not None:
        how["prefetch"] = layout.prefetch
    if not layout.overlap:
        how["overlap"] = False
    if layout.whole_mb:
        how["whole_mb"] = layout.whole_mb
    if layout.zero == 3 and not layout.reshard:
        how["resident_mb"] = "step"
    if layout.reduce_once:
        how["reduced_mb"] = "step"
    return how


def _arguments(how: dict[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in how.items())


def _comment(described: JobDescription, part: str) -> Iterator[str]:
    origin = described.origins.get(part, "")
    if origin:
        yield from wrap(
            origin, COLUMNS, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )


def _call(text: str) -> Iterator[str]:
    """Yield a call in as many lines as it needs; the first argument stands behind the bracket."""
    if len(text) <= COLUMNS:
        yield text
        return
    head, _, rest = text.partition("(")
    yield f"{head}("
    yield from wrap(
        rest.removesuffix(")") + ",",
        COLUMNS,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield ")"
