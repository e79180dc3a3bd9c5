"""Make the space of a job's strategies: every axis of the language that the job and the cluster have sizes for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any

from piper.api.captures.capturing import traced_job
from piper.api.ground.clusters import chosen_cluster
from piper.api.problems.first_candidates import FirstCandidates
from piper.api.problems.recipe_calls import RecipeCall, schedule_call
from piper.api.problems.scale import CUTS, Scale, divisors, powers
from piper.api.problems.space_sizes import AXES, KEPT, KEPT_COMPILED, TILES, Sizes, SpaceSizes
from piper.api.problems.tried_values import ORDERS, TriedOfJob, tried_values
from piper.api.problems.uneven_stages import cut_stages
from piper.api.problems.variants import VariantChoices, skipped
from piper_compiler import Strategy, recipes
from piper_ir.ground.errors import TuneError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import ANY, Where, where
from piper_ir.program.ops import WITHIN, KernelSource
from piper_simulator import Cluster

if TYPE_CHECKING:
    from piper_capture import Traced
    from piper_runtime import Job

MOST_TP = 8
"""The most devices along tp: messages inside of a layer must not leave a node, and published runs have at most 8."""
MOST_CP = 8
"""The most devices along cp."""
MOST_EP = 64
"""The most devices along ep: DeepSeek-V3 was trained with as many (arXiv 2412.19437)."""
MOST_STAGES = 16
"""The most devices along pp, as in published runs of models up to 405B (Llama 3, arXiv 2407.21783, table 4)."""
MOST_ROWS = 8
"""The most rows of a microbatch."""
LEAST_TOKENS = 2_048
"""The fewest tokens of a row that a device has along cp; of fewer, messages take longer than the compute saved."""
MOST_CHUNKS = 8
"""The most stages of a device that schedules interleave."""
PARTS_AWAY = (0.0, 0.5, 1.0)
"""The parts of the layers, the first ones, whose tensors may wait for their backward in the memory of the host."""
SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v")
"""The schedules of pipelines; zbv and dualpipe_v have two stages on each device, interleaved has `chunks`."""
FEWER_LATER = ("one_f_one_b", "interleaved", "zb_h1")
"""The recipes of schedules under which the later devices of a pipeline have fewer microbatches in flight."""
CHUNKED = ("interleaved", "looped_bfs", "interleaved_zb")
"""The schedules with any number of stages of a device."""
STATES = ("optim", "grads", "params")
"""The states of `replicate(shard=)`: zero=n shares the first n."""


@dataclass(frozen=True)
class StrategySpace(SpaceSizes):
    """Make a strategy of a trial's choices: `piper.tune(job, piper.space(job, cluster), cluster=cluster)`.

    All devices of the cluster are used; the ones that the other axes leave are replicas. Choices that do not divide are
    skipped, with the reason.

    Attributes:
        variants: kernels, precisions and CUDA graphs that are tried; none if they are not asked for.
    """

    variants: VariantChoices = field(default_factory=VariantChoices)

    def __call__(self, trial: Any) -> Strategy:
        """Return the strategy of a trial, whose params say its variant, too."""
        variant = self.variants.chosen(trial)
        mesh, calls = self.chosen(trial)
        directives = [directive for call in calls for directive in call.directives]
        if text := skipped(variant, directives):
            trial.skip(text)
        return Strategy(mesh, directives)

    def chosen(self, trial: Any) -> tuple[Mesh, list[RecipeCall]]:
        """Return the mesh of a trial, and the recipes that make its strategy."""
        at = {axis: self._choice(trial, axis, self.sizes[axis]) for axis in self.axes}
        rows = self._choice(trial, "rows", self.rows)
        if text := self.lacking(at, rows):
            trial.skip(text)
        replicas = self.replicas(at)
        calls: list[RecipeCall] = []
        tokens_over = [axis for axis in ("tp", "cp") if at[axis] > 1]
        if at["tp"] > 1:
            whole = at["ep"] > 1 and not self.dropless
            sequence = not whole and self._choice(trial, "sequence", (True, False))
            pieces = self._choice(trial, "pieces", (1,)) if sequence else 1
            more = {"pieces": pieces} if pieces > 1 else {}
            calls.append(RecipeCall("tensor_parallel", {"sequence": sequence, **more}))
            if not sequence:
                tokens_over.remove("tp")
        if at["cp"] > 1:
            exchange = self._choice(trial, "attention", ("ring", "heads", "gather"))
            calls.append(RecipeCall("context_parallel", {"attention": exchange}))
        placed: dict[str, Any] = dict(at)
        if at["ep"] > 1:
            call, placed = self._shared_experts(trial, at, tokens_over)
            calls.append(call)
        calls.append(self._pipeline(trial, at["pp"], self.global_batch // (replicas * rows)))
        calls += self._kept(trial, placed, rows, calls[-1])
        zero = self._zero(trial, at)
        groups = self._groups(trial, at, zero)
        calls += self._replicated(trial, at, zero, groups)
        calls += self._hosted(trial, placed, zero)
        sizes = {axis: size for axis, size in at.items() if size > 1}
        order = ORDERS[self._choice(trial, "order", ("usual",))]
        inner = [axis for axis in order if axis != "etp" or axis in sizes]
        dp = replicas // self.sharing_experts(at) // groups
        return Mesh(**sizes, dp=dp, rep=groups, order=inner), calls

    @property
    def starts(self) -> tuple[dict[str, Any], ...]:
        """Return the choices that a search tries first; see `FirstCandidates`."""
        return FirstCandidates(self).every()

    def kind(self, start: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the sizes of tp, cp and pp: starts that differ in other choices are alike."""
        return tuple(int(start[axis]) for axis in AXES if axis != "ep")

    def _pipeline(self, trial: Any, pp: int, microbatches: int) -> RecipeCall:
        how: dict[str, Any] = {"pp": pp, "microbatches": microbatches}
        if pp == 1:
            return RecipeCall("one_f_one_b", how)
        schedule = self._choice(trial, "schedule", SCHEDULES)
        if schedule in CHUNKED:
            most = max(2, min(MOST_CHUNKS, self.layers // pp))
            how["chunks"] = self._number(trial, "chunks", 2, most)
        name = "one_f_one_b" if schedule == "1f1b" else schedule
        call = schedule_call(name, **how)
        stages = recipes.stages_of(call.directives) or 1
        if stages > self.layers:
            trial.skip(f"{self.layers} layers do not fill {stages} stages")
        at = self._choice(trial, "at", ("even",))
        if at == "even":
            return call
        try:
            return schedule_call(name, **how, at=cut_stages(at, self.layers, stages))
        except TuneError as error:
            trial.skip(str(error))
            raise

    def _shared_experts(
        self, trial: Any, at: Mapping[str, int], tokens_over: Sequence[str]
    ) -> tuple[RecipeCall, dict[str, Any]]:
        """Return how devices share experts: along ep alone, or also along the axes that share the tokens of a row.

        Along tp or cp they may cut each expert instead, and along etp. The sizes of the axes are returned, too, with
        the choices that decide how many experts a device has.
        """
        folded = self.may_fold(at, tokens_over) and self._choice(trial, "fold", (False, True))
        how: dict[str, Any] = {"over": (*tokens_over, "ep")} if folded else {}
        hidden = () if folded or not self.dropless else self._cut(trial, tokens_over)
        placed = {**at, "fold": folded, "cut": "+".join(hidden)}
        if at.get("etp", 1) > 1:
            hidden = (*hidden, "etp")
        if hidden:
            how["hidden"] = hidden[0] if len(hidden) == 1 else hidden
        if self._choice(trial, "beside", (False,)):
            how["beside"] = True
        return RecipeCall("expert_parallel", how), placed

    def _cut(self, trial: Any, tokens_over: Sequence[str]) -> tuple[str, ...]:
        """Return the axes along which each expert is cut, out of the axes that share tokens."""
        values = self.tried.get("cut", (False, True))
        axes = {value: tuple(CUTS.get(value, value).split("+")) for value in values if value}
        if not any(set(named) <= set(tokens_over) for named in axes.values()):
            return ()
        chosen = axes.get(self._choice(trial, "cut", values), ())
        if missing := [axis for axis in chosen if axis not in tokens_over]:
            trial.skip(f"experts are cut over axes that share tokens, and {missing[0]} shares none")
        return chosen

    def _kept(
        self, trial: Any, at: Mapping[str, Any], rows: int, stages: RecipeCall
    ) -> Iterator[RecipeCall]:
        """Yield policies of recomputation, tiles of the loss and offloads: less memory for more compute or messages.

        Tiles of the loss, and tensors that wait on the host, are asked for only where memory is short with all of a
        layer made again; policies by stage only where the sizes of one microbatch let the last devices keep more.
        Values that a user gives for these are tried anywhere.
        """
        tiles = 1
        if "tiles" in self.tried or (self.is_short(at, tiles=1) and self.tiled(at)):
            tiles = self._choice(trial, "tiles", (1, TILES))
        if tiles > 1 and not self.tiled(at, tiles):
            trial.skip(f"{tiles} tiles of the loss do not divide the tokens of a device")
        if tiles > 1:
            yield RecipeCall("tile_loss", {"tiles": tiles})
        keep = self._choice(trial, "keep", KEPT)
        group = 1 if keep == KEPT[0] else self._choice(trial, "group", (1,))
        if group > 1 and WITHIN in keep:
            trial.skip(
                f"a group of {group} layers makes whole layers again, and keep={keep!r} parts of them"
            )
        more = {"group": group} if group > 1 else {}
        if self._may_grade(at, rows, keep, stages, tiles) and self._choice(
            trial, "graded", (False, True)
        ):
            next_one, number = KEPT[KEPT.index(keep) - 1], recipes.stages_of(stages.directives) or 1
            later = [stage % at["pp"] >= at["pp"] // 2 for stage in range(number)]
            policies = tuple(next_one if k else keep for k in later)
            yield RecipeCall("recomputation", {"keep": policies, **more})
        elif keep != KEPT[0] or self.compiles:
            yield RecipeCall("recompute", {"selection": self._layers, "keep": keep, **more})
        away = "away" in self.tried or self.is_short(at, tiles)
        if away and (part := self._choice(trial, "away", PARTS_AWAY)):
            number = max(1, round(self.layers * part))
            first = where(layer=range(number)) if number < self.layers else self._layers
            tensors = self._choice(trial, "away_tensors", ("all",))
            ahead = self._choice(trial, "away_prefetch", (1,))
            waits = {"prefetch": ahead} if ahead != 1 else {}
            waits |= {"tensors": tensors} if tensors != "all" else {}
            yield RecipeCall("offload", {"selection": first, **waits})

    def _hosted(self, trial: Any, at: Mapping[str, Any], zero: int) -> Iterator[RecipeCall]:
        """Yield the optimizer on the host, or all states: where they are large, or a user gives values for it."""
        if "host" in self.tried or self.are_large(at):
            if hosted := self._choice(trial, "host", (False, True)):
                tensors = "optim" if hosted is True else hosted
                if tensors == "states" and zero in (1, 2):
                    trial.skip(
                        f"host='states' goes with zero=0 or zero=3, and zero={zero} shards no parameters"
                    )
                yield RecipeCall("offload", {"selection": where(), "tensors": tensors})

    def _may_grade(
        self, at: Mapping[str, int], rows: int, keep: str, stages: RecipeCall, tiles: int
    ) -> bool:
        """Return whether memory is short, and later devices may keep by the next policy, and the first may not."""
        if at["pp"] == 1 or keep not in KEPT[1:] or stages.name not in FEWER_LATER:
            return False
        if "graded" in self.tried:
            return True
        if not self.is_short(at, tiles=1):
            return False
        more = KEPT[KEPT.index(keep) - 1]
        first, later = (
            self.held_bytes(at, rows, keep=more, flying=flying, tiles=tiles)
            for flying in (1.0, 0.5)
        )
        return later <= self.scale.memory_bytes < first

    def _zero(self, trial: Any, at: Mapping[str, int]) -> int:
        """Return how many states are shared, 0 if no device has the parameters of another one."""
        alone = self.replicas(at) * at["cp"] == 1
        return 0 if alone else int(self._choice(trial, "zero", (0, 1, 2, 3)))

    def _groups(self, trial: Any, at: Mapping[str, int], zero: int) -> int:
        """Return the number of groups of replicas that each have all states: one, or with `hybrid` one in each node.

        The replicas of a node are those along dp: the ranks along tp, cp and ep lie between them.
        """
        sharers = self.sharing_experts(at)
        apart, own = at["tp"] * at["cp"] * sharers, self.replicas(at) // sharers
        inside = self.scale.per_node // apart
        divided = inside > 1 and not self.scale.per_node % apart and not own % inside
        if not zero or not divided or own == inside:
            return 1
        return own // inside if self._choice(trial, "hybrid", (False, True)) else 1

    def _replicated(
        self, trial: Any, at: Mapping[str, int], zero: int, groups: int
    ) -> Iterator[RecipeCall]:
        """Yield how gradients are summed, and which states are shared among all that have the same parameters."""
        replicas = self.replicas(at)
        if replicas == 1 and not zero:  # the devices along cp have the same rows
            return
        over = tuple(
            axis for axis in ("dp", "ep", "etp", "cp") if axis == "dp" or at.get(axis, 1) > 1
        )
        how: dict[str, Any] = {"over": over, "zero": zero}
        if groups > 1:
            how = {"over": (*over, "rep"), "shard": dict.fromkeys(STATES[:zero], over)}
        # In tenths: a file for people has this number.
        how["bucket_mb"] = (
            self._choice(trial, "bucket_mb", ())
            if "bucket_mb" in self.tried
            else round(trial.suggest_float("bucket_mb", 25.0, 800.0, log=True), 1)
        )
        if zero == 3:
            how["prefetch"] = self._number(trial, "prefetch", 1, 2)
            how["resident_mb"] = self._choice(trial, "resident_mb", (0, "step"))
            if whole_mb := self._choice(trial, "whole_mb", (0,)):
                how["whole_mb"] = whole_mb
        yield RecipeCall("data_parallel", how)

    @property
    def compiles(self) -> bool:
        """Return whether plans may have compiled chunks, which keep all only where a strategy says so."""
        return "inductor" in self.variants.kernels

    @property
    def _layers(self) -> Where:
        """Return the selection of all layers; of everything if the model has no layers."""
        return where(layer=ANY) if self.layers else where()

    def _choice(self, trial: Any, name: str, choices: Sequence[Any]) -> Any:
        values = self.tried.get(name, choices)
        return values[0] if len(values) == 1 else trial.suggest_categorical(name, values)

    def _number(self, trial: Any, name: str, least: int, most: int) -> int:
        number: int = (
            self._choice(trial, name, ())
            if name in self.tried
            else trial.suggest_int(name, least, most)
        )
        return number


def space(
    job: Job,
    cluster: str | Cluster,
    *,
    kernels: KernelSource | Sequence[KernelSource] | None = None,
    precision: str | Sequence[str] | None = None,
    cuda_graph: bool | Sequence[bool] | None = None,
    **given: Any,
) -> StrategySpace:
    """Return the space of a job's strategies on a cluster, for `piper.tune`.

    It has the sizes of all axes that divide (tp inside of a node, cp for long rows, ep for mixtures, pp by layers), the
    schedule, the rows of a microbatch, the activations kept for the backward, the states that ranks share, and buckets;
    where memory is short, tiles of the loss and activations that wait on the host.

    Args:
        job: The job, which is traced.
        cluster: Its name, or a Cluster; all of its devices are used.
        kernels: "eager", "inductor" or both, as in `piper.Options`; a single value fixes it, here and below.
        precision: "job" (its own), "float32", "bf16" or "fp16" over float32, "fp8" (bf16 with linear layers in float8,
            by the job's recipe or "tensorwise") or "fp8:RECIPE".
        cuda_graph: False, True or both. These three are asked for only if they are given: plans are eager, in the job's
            precision and without CUDA graphs else.
        given: Values of a parameter of `PARAMETERS`, by name, tried in place of the usual ones; a single one fixes it.

    Raises TuneError for an unknown name, and for a value or a variant that no plan can have, and JobError or
    CaptureError for a job that cannot be traced.
    """
    variants = VariantChoices.asked(kernels=kernels, precision=precision, cuda_graph=cuda_graph)
    target = chosen_cluster(cluster)
    if target is None:
        raise TuneError("space: a cluster is needed, by its name such as 'h100x8*16', or a Cluster")
    tried = tried_values(given, vars(variants))
    if variants:
        variants.check(job, target)
    traced = traced_job(job)
    layers = len({c.coords["layer"] for c in traced.outline.chunks if "layer" in c.coords})
    devices, tokens = target.devices, job.tokens_per_row or 0
    experts = _experts(traced)
    TriedOfJob(job, traced, devices, layers, experts).check(tried)
    sizes = {
        "tp": powers(devices, min(target.per_node, MOST_TP)),
        "cp": powers(devices, min(MOST_CP, max(1, tokens // LEAST_TOKENS))),
        "pp": tuple(n for n in divisors(devices, MOST_STAGES) if n <= max(layers, 1)),
    }
    sizes |= {axis: tuple(sorted(tried[axis])) for axis in (*AXES, "etp") if axis in tried}
    scale = Scale.of(traced, tokens, target)
    if "ep" not in sizes:
        sizes["ep"] = _expert_sizes(gcd(devices, experts), devices, max(sizes["pp"]), scale)
    rows = tuple(sorted(tried.get("rows", divisors(job.global_batch, MOST_ROWS))))
    rest = {name: values for name, values in tried.items() if name not in (*sizes, "rows")}
    if "inductor" in variants.kernels:
        rest.setdefault("keep", KEPT_COMPILED)
    tiles = bool(tokens) and traced.has_cross_entropy
    return StrategySpace(
        devices, job.global_batch, layers, sizes, rows, scale, experts, traced.dropless, tiles, rest, variants
    )  # fmt: skip


def _experts(traced: Traced) -> int:
    """Return how many experts a layer has, 1 if it has none: as many as its matrices of parameters in one."""
    stacked = [p.shape[0] for p in traced.forward.params if len(p.shape) == 3]
    return gcd(*stacked) if traced.experts and stacked else 1


def _expert_sizes(experts: int, devices: int, pp: int, scale: Scale) -> Sizes:
    """Return the sizes of ep: inside of a node, and beyond it if a device could not keep its experts' states there.

    That is judged with the most stages, `pp`, and only the optimizer's states shared, as in `StrategySpace._least`.
    Larger groups exchange their rows between nodes.
    """
    inside = powers(experts, scale.per_node)
    own = scale.own({"tp": 1, "ep": inside[-1], "pp": pp})
    if scale.fits_whole(own, devices // (pp * inside[-1])):
        return inside
    return powers(experts, MOST_EP)
