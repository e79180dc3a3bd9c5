"""Define the options of `piper simulate`, `tune`, `plan`, `import`, `export`, `profile` and `show` as records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from piper.cli import foreign_options as foreign
from piper.cli import options as flags
from piper.cli import variant_options as tried


@dataclass(frozen=True, kw_only=True)
class SimulateArguments:
    """Hold the options of `piper simulate`."""

    file: flags.FileArgument
    other: flags.OtherArgument = None
    params: flags.ParamsOption = None
    strategy: flags.StrategyFileOption = None
    versus: flags.VersusOption = None
    why: flags.WhyOption = False
    kernels: flags.KernelsOption = None
    cuda_graph: flags.CudaGraphOption = False
    cluster: flags.ClusterNameOption = "cpu-local"
    costs: flags.CostsFileOption = None
    no_contention: flags.NoContentionOption = False
    load: flags.LoadOption = None
    jitter: flags.JitterOption = None
    repetitions: flags.RepetitionsOption = None
    seed: flags.JitterSeedOption = None
    out: flags.OutOption = None
    memory_snapshot: flags.MemorySnapshotOption = None
    as_json: flags.AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """Hold the options of `piper tune`."""

    file: flags.SpaceFileArgument
    cluster: flags.ClusterNameOption = "cpu-local"
    costs: flags.CostsFileOption = None
    trials: flags.TrialsOption = 100
    confirm: flags.ConfirmOption = 0
    memory_limit: flags.MemoryLimitOption = None
    seed: flags.SeedOption = 0
    storage: flags.StorageOption = None
    workers: flags.SearchersOption = "1"
    launcher: flags.LauncherOption = "ray"
    out: flags.OutOption = flags.RUNS
    objective: flags.ObjectiveOption = None
    load: flags.LoadOption = None
    kernels: tried.KernelsTriedOption = None
    precision: tried.PrecisionTriedOption = None
    cuda_graph: tried.GraphsTriedOption = None
    params: tried.ParametersTriedOption = None
    as_json: flags.AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class ForeignJobArguments:
    """Hold the options for a job of another system, whose file may leave its model or its devices open."""

    gpus: foreign.GpusOption = None
    sets: foreign.SetOption = None
    model: foreign.ModelFileOption = None
    length: flags.LengthOption = None
    global_batch: flags.GlobalBatchOption = None
    python: foreign.SystemPythonOption = None
    stand_ins: foreign.StandInOption = None
    skip_unknown: foreign.SkipUnknownOption = False


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ForeignJobArguments):
    """Hold the options of `piper plan`."""

    source: flags.SourceArgument
    cluster: flags.ClusterNameOption = "h100x8"
    tokens_per_step: flags.TokensPerStepOption = None
    tokens: flags.TokensOption = None
    price: flags.PriceOption = 0.0
    mtbf: flags.MtbfOption = None
    checkpoint_rate: flags.CheckpointRateOption = 1.0
    restart_s: flags.RestartOption = 300.0
    trials: flags.TrialsOption = 40
    kernels: tried.KernelsTriedOption = None
    precision: tried.PrecisionTriedOption = None
    cuda_graph: tried.GraphsTriedOption = None
    params: tried.ParametersTriedOption = None
    rehearse: flags.RehearseOption = False
    seed: flags.SeedOption = 0
    workers: flags.ProcessesOption = 1
    out: flags.OutOption = flags.RUNS
    as_json: flags.AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class ImportArguments(ForeignJobArguments):
    """Hold the options of `piper import`."""

    system: foreign.SystemArgument
    source: foreign.ForeignSourceArgument
    cluster: foreign.PredictedClusterOption = None
    out: foreign.WrittenFileOption = None
    every: foreign.IgnoredOption = False
    as_json: flags.AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Hold the options of `piper export`."""

    file: flags.FileArgument
    to: foreign.TargetOption
    params: flags.ParamsOption = None
    strategy: flags.StrategyFileOption = None
    out: foreign.ExportFolderOption = None
    as_json: flags.AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class ProfileArguments:
    """Hold the options of `piper profile`."""

    file: flags.FileArgument
    params: flags.ParamsOption = None
    strategy: flags.StrategyFileOption = None
    launcher: flags.ProfileLauncherOption = "processes"
    address: flags.AddressOption = "auto"
    rows: flags.RowsOption = None
    keep: flags.KeepOption = None
    repeats: flags.RepeatsOption = 7
    kernels: flags.KernelsOption = None
    out: flags.CostsOutOption = Path("costs.json")
    as_json: flags.AsJsonOption = False


@dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """Hold the options of `piper show`."""

    file: flags.RecipeFileArgument = None
    params: flags.ParamsOption = None
    strategy: flags.StrategyFileOption = None
    cluster: flags.ShownClusterOption = None
    costs: flags.CostsFileOption = None
    recipe: flags.RecipeNameOption = None
    pp: flags.DevicesOption = None
    microbatches: flags.MicrobatchesOption = None
    chunks: flags.ChunksOption = None
    times: flags.ChunkTimesOption = None
    graph: flags.GraphOption = False
    plan: flags.PlanOption = False
    png: flags.PictureOption = None
    csv: flags.CsvOption = None
    lowered: flags.LoweredOption = False
    as_json: flags.AsJsonOption = False
