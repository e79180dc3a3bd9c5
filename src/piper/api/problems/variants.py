"""Choose kernels, precision and CUDA graphs beside a strategy: each combination is a variant of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from piper.api.captures.capturing import traced_job
from piper_compiler import Options, offload
from piper_ir.ground.errors import PiperError, TuneError
from piper_ir.program.ops import KernelSource
from piper_simulator import Cluster

if TYPE_CHECKING:
    from piper_runtime import Job, Precision

OWN = "job"
"""The name of the precision that a job has itself."""
FP8 = "fp8"
"""The name of bfloat16 with linear layers in float8; a recipe may follow, as in "fp8:rowwise"."""
HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""The names of mixed precision, with the dtype of forward and backward; parameters and sums are in float32."""
PRECISIONS = (OWN, "float32", *HALVES, FP8)
"""The names of precisions that a search may try."""
MARK = "variant."
"""The beginning of the names of a strategy's params that say its variant, apart from any name of a user's."""
CHOICES_OF = {"kernels": get_args(KernelSource), "cuda_graph": (False, True)}
"""The values of the choices that have few."""
PLAIN = (str, float, int, Mapping)
"""The types of a precision's fields that are written as they are; the others are classes of piper."""


@dataclass(frozen=True)
class PlanVariant:
    """Say with which kernels, precision and launches a plan runs, beside its strategy.

    Attributes:
        kernels: As in `piper.Options`, and so is `cuda_graph`.
        precision: A name of `PRECISIONS`.
    """

    kernels: KernelSource = "eager"
    precision: str = OWN
    cuda_graph: bool = False

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> PlanVariant:
        """Return the variant that a strategy's params say; raise TuneError for values that are none."""
        said = {f.name: params[MARK + f.name] for f in fields(cls) if MARK + f.name in params}
        for name, value in said.items():
            _check(name, value)
        return cls(**said)

    @property
    def options(self) -> Options:
        """Return the compiler's options."""
        return Options(kernels=self.kernels, cuda_graph=self.cuda_graph)

    def job(self, job: Job) -> Job:
        """Return a job in this precision; raise JobError for a recipe of float8 that is none."""
        dtypes = self.dtypes(job.precision)
        return job if dtypes == job.precision else replace(job, precision=dtypes)

    def dtypes(self, own: Precision) -> Precision:
        """Return the precision of a job whose own is `own`; weights that it keeps in other dtypes stay so."""
        from piper_runtime import Float8, Precision

        if self.precision == OWN:
            return own
        if self.precision == "float32":
            return Precision(params="float32")
        name, _, recipe = self.precision.partition(":")
        float8 = None
        if name == FP8:
            float8 = Float8(recipe) if recipe else own.quantised or Float8()
        half = HALVES.get(name, "bfloat16")
        scale = own.loss_scale if half == "float16" else None
        return Precision("float32", half, "float32", keep=own.keep, loss_scale=scale, float8=float8)

    def text(self, asked: VariantChoices) -> str:
        """Return the choices that were asked for in words, for the end of a schedule's."""
        words: list[str] = [self.kernels] if asked.kernels else []
        words += [self.precision] if asked.precision else []
        words += (
            ["CUDA graphs" if self.cuda_graph else "no CUDA graphs"] if asked.cuda_graph else []
        )
        return "".join(f", {word}" for word in words)


@dataclass(frozen=True)
class VariantChoices:
    """Hold the values of kernels, precision and CUDA graphs that a search tries; none of one that is not asked for.

    A single value is a choice, too, so that a strategy's params say it.
    """

    kernels: tuple[KernelSource, ...] = ()
    precision: tuple[str, ...] = ()
    cuda_graph: tuple[bool, ...] = ()

    @classmethod
    def asked(cls, **given: object) -> VariantChoices:
        """Return the choices of arguments, each a value, a sequence of values or None; raise TuneError for others."""
        return cls(**{name: _values(name, value) for name, value in given.items()})

    def __bool__(self) -> bool:
        return bool(self.kernels or self.precision or self.cuda_graph)

    def chosen(self, trial: Any) -> PlanVariant:
        """Return the variant of a trial, which is asked for nothing but these choices."""
        return PlanVariant(
            **{
                name: trial.suggest_categorical(MARK + name, values)
                for name, values in vars(self).items()
                if values
            }
        )

    def every(self) -> Iterator[PlanVariant]:
        """Yield the variants."""
        names = [name for name, values in vars(self).items() if values]
        for values in product(*(vars(self)[name] for name in names)):
            yield PlanVariant(**dict(zip(names, values)))

    def check(self, job: Job, cluster: Cluster) -> None:
        """Raise TuneError, with its name, for a variant that no plan of a job on a cluster can have.

        Each precision is captured, once; a search uses these captures.
        """
        if True in self.cuda_graph and cluster.synchronous:
            raise TuneError(
                f"space(cuda_graph=True): {cluster.device.name} is no CUDA device; name another cluster, or leave "
                f"cuda_graph out"
            )
        if True in self.cuda_graph and job.draws != "rows":
            raise TuneError(
                f"space(cuda_graph=True): CUDA graphs draw random numbers by row, and the job has draws={job.draws!r}"
            )
        for name in self.precision or (OWN,):
            _check_rates(name, cluster)
            try:
                traced = traced_job(PlanVariant(precision=name).job(job))
            except PiperError as error:
                raise TuneError(f"space(precision={name!r}): {error}") from error
            if True in self.cuda_graph and traced.dropless:
                raise TuneError(
                    "space(cuda_graph=True): dropless experts read on the host how many tokens chose them, for which "
                    "no CUDA graph waits; leave cuda_graph out"
                )


def skipped(variant: PlanVariant, directives: Sequence[Any]) -> str:
    """Return why a variant does not go with a strategy's directives; "" if it may."""
    if variant.cuda_graph and any(isinstance(d, offload) for d in directives):
        return "in CUDA graphs everything stays on the device: nothing is offloaded"
    return ""


def said_by(params: Mapping[str, Any]) -> bool:
    """Return whether a strategy's params say a variant."""
    return any(name.startswith(MARK) for name in params)


def precision_text(dtypes: Precision) -> str:
    """Return a precision as people write it."""
    usual = type(dtypes)("float32")
    said = [
        f"{f.name}={'piper.' * (not isinstance(value, PLAIN))}{value!r}"
        for f in fields(dtypes)
        if (value := getattr(dtypes, f.name)) != getattr(usual, f.name)
    ]
    return f"piper.Precision({', '.join(said)})"


def _values(name: str, given: Any) -> tuple[Any, ...]:
    """Return the values of an argument, each once; raise TuneError for one that is none."""
    if given is None:
        return ()
    values = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not values:
        raise TuneError(f"space({name}=()): at least one value is needed")
    for value in values:
        _check(name, value)
    return tuple(dict.fromkeys(values))


def _check(name: str, value: object) -> None:
    """Raise TuneError unless a choice has this value."""
    if name in CHOICES_OF:
        known = any(
            value is one or (value == one and isinstance(one, str)) for one in CHOICES_OF[name]
        )
        accepted = " and ".join(map(str, CHOICES_OF[name]))
    else:
        known = isinstance(value, str) and (value in PRECISIONS or value.startswith(f"{FP8}:"))
        accepted = f"{', '.join(PRECISIONS)} and {FP8}:RECIPE, such as {FP8}:rowwise,"
    if not known:
        raise TuneError(f"space({name}={value!r}): {accepted} are accepted")


def _check_rates(name: str, cluster: Cluster) -> None:
    """Raise TuneError for float8 on a device that has no rate for it."""
    for device in (kind.device for kind in cluster.kinds):
        if name.startswith(FP8) and "float8" not in device.peak_flops:
            raise TuneError(
                f"space(precision={name!r}): {device.name} has no products in float8; leave it out, or name another "
                f"cluster"
            )
