"""Texts, files of options, YAML and shell scripts give the same job; what a script does not say is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.interop.tests.megatron_jobs import DENSE, described, of_file
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case

SCRIPT = """#!/bin/bash
# A job on two nodes.
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=4
NODES=${SLURM_NNODES:-"2"}
WORLD_SIZE=$(($GPUS*$NODES))
LAYERS=8; WIDTH=64
DATA=$1
DISTRIBUTED=(--nproc_per_node $GPUS --nnodes=$NODES --node_rank $RANK)
MODEL=(
    --num-layers $LAYERS   # as deep as that
    --hidden_size ${WIDTH} --num-attention-heads=4
    --seq-length 32 --max-position-embeddings 32
    --swiglu --disable-bias-linear --normalization RMSNorm
)
TRAINING="--micro-batch-size 2 --global-batch-size 64 \\
    --bf16 --lr 1e-4 "
if [ "$GPUS" == "4" ]; then
    TRAINING="$TRAINING --vocab-size 1000"
else
    TRAINING="$TRAINING --vocab-size 2000"
fi
if [ -n "${WANDB_KEY}" ]; then
    LOGS+=(--wandb-project p --wandb-exp-name "a b")
fi
mkdir -p "$(dirname "$DATA")" && echo "start of pretrain_gpt.py"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \\
    "${MODEL[@]}" ${TRAINING} ${LOGS[@]} --data-path $DATA \\
    --position-embedding-type ${POSITIONS:-rope} \\
    --hidden-dropout 0 --attention-dropout 0 2>&1 | tee log.txt
"""


def test_a_script_says_the_same_as_a_text(tmp_path: Path) -> None:
    job = of_file(tmp_path / "train.sh", SCRIPT)
    text = described()
    assert job.described.sizes == text.sizes
    assert (job.described.layout, job.described.name) == (text.layout, "train")
    assert job.foreign.values["num-layers"].origin == f"{tmp_path}/train.sh:12"
    assert job.foreign.values["data-path"].value == "$1"
    assert not job.judgement.unknown


@each_case(
    ("old", "new", "complaint"),
    [
        ("LAYERS=8;", "LAYERS=$((4*HALF));", "--num-layers $((4*HALF)): nothing here says what that is (line 8)"),
        ("LAYERS=8;", "LAYERS=$((8/0));", "--num-layers $((8/0)): nothing here says what that is (line 8)"),
        ("LAYERS=8;", "LAYERS=$(nproc);", "$(nproc): nothing here says what that is (line 8)"),
        ("--num-layers $LAYERS", "--num-layers $DEPTH", "--num-layers $DEPTH: nothing here says what that is (line 12)"),
        ('[ "$GPUS" == "4" ]', '[ "$SIZE" == "4" ]', "--vocab-size stands under the condition in line 19"),
        ("--wandb-project p", "--window-size 3,0", "--window-size stands under the condition in line 24"),
        ("torchrun $", "for i in 1 2; do torchrun $", "for begins here and never ends"),
        ("pretrain_gpt.py \\", "pretrain_t5.py \\", "the model of this program"),
        ("--data-path $DATA", "--data-path $DATA $EXTRA_ARGS", "--data-path $1 $EXTRA_ARGS: nothing here says"),
        ("--data-path $DATA", "--log-progress $EXTRA_ARGS", "--log-progress $EXTRA_ARGS: nothing here says"),
        ("--swiglu --", 'more --swiglu "', "a quote"),
    ],
)  # fmt: skip
def test_what_a_script_does_not_say_is_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    assert old in SCRIPT
    with pytest.raises(JobError) as refusal:
        of_file(tmp_path / "train.sh", SCRIPT.replace(old, new, 1))
    assert complaint in str(refusal.value)


@each_case(
    "layers",
    [
        "$((4*2))",
        "$((2 * (GPUS + 1) - 2))",
        "$((${GPUS} * $NODES))",
        "$((-17 / -2))",
        "$((26 % 9))",
    ],
)
def test_arithmetic_of_a_script_is_computed(layers: str, tmp_path: Path) -> None:
    job = of_file(tmp_path / "train.sh", SCRIPT.replace("LAYERS=8;", f"LAYERS={layers};", 1))
    assert job.described.sizes.fields["layers"] == 8


def test_more_of_the_shell(tmp_path: Path) -> None:
    script = f"""
    function note {{ echo note; }}
    check() {{
      LAYERS=3
    }}
    [[ -z "" ]] && MORE="--clip-grad 0.5"
    [ a = b ] || EXTRA=(--weight-decay 0.1)
    case x in x) OTHER=1;; esac
    while false; do OTHER=2; done
    ARGS='{DENSE}'
    ARGS+=" $MORE"
    srun --nodes 2 sh -c "cd /here; python -u pretrain_gpt.py ${{ARGS}} ${{EXTRA[*]}}" > log 2>&1
    """
    job = of_file(tmp_path / "run.slurm", script, devices=8)
    assert job.described.clip_norm == 0.5
    assert job.foreign.values["weight-decay"].value == 0.1
    with pytest.raises(JobError, match="give --gpus"):
        of_file(tmp_path / "run.slurm", script)


def test_a_program_behind_a_variable_alone_says_no_devices(tmp_path: Path) -> None:
    script = f"OPTIONS='{DENSE} --save $OUT'\nsrun train.sh\n"
    assert of_file(tmp_path / "run.sh", script, devices=8).described.layout.dp == 8
    with pytest.raises(JobError, match="give --gpus"):
        of_file(tmp_path / "run.sh", script)


@each_case(
    ("text", "complaint"),
    [
        ("echo hello", "no command with options"),
        (
            "python a.py --num-layers 2\npython b.py --num-layers 3\n",
            "the lines 1, 2 each start a job",
        ),
        ("if $HOT; then\npython a.py --num-layers 2\nfi\n", "under the condition in line 1"),
        ("run() {\npython a.py --num-layers 2\n}\nrun\n", "under the condition in line 1"),
        ("A=${B\n", "begins here and never ends"),
        ("python a.py word --num-layers 2", "'word' stands behind no option"),
        ("function broken", "a function without a body"),
    ],
)
def test_scripts_that_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(JobError) as refusal:
        of_file(tmp_path / "train.sh", text, devices=8)
    assert complaint in str(refusal.value)


def test_a_file_of_options(tmp_path: Path) -> None:
    lines = "# the model\n\n" + "\n".join(f"--{line}" for line in DENSE.split("--") if line.strip())
    job = of_file(tmp_path / "job.args", lines, devices=8)
    assert job.described == of_file(tmp_path / "job.args", lines, devices=8).described
    assert job.described.sizes == described().sizes
    assert job.foreign.values["num-layers"].origin == f"{tmp_path}/job.args:3"
    longer = of_file(tmp_path / "job.args", lines, devices=8, sets=("--seq-length=16", "--bf16"))
    assert longer.described.length == 16


def test_yaml(tmp_path: Path) -> None:
    test = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 8
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 2
  --global-batch-size: 64
  --vocab-size: 1000
  --bf16: true
  --lr: 1.0e-4
  --swiglu: true
  --disable-bias-linear: true
  --position-embedding-type: rope
  --normalization: RMSNorm
  --hidden-dropout: 0.0
  --attention-dropout: 0.0
  --cuda-graph-modules: [attn mlp]
  --offload-modules: "[moe_act core_attn]"
  --recompute-modules: "[mlp]"
  --fp16: false
"""
    folder = tmp_path / "a_case"
    folder.mkdir()
    job = of_file(folder / "model_config.yaml", test, devices=8)
    assert (job.described.sizes, job.described.name) == (described().sizes, "a_case")
    assert job.foreign.values["cuda-graph-modules"].value == ["attn", "mlp"]
    assert job.foreign.values["offload-modules"].value == ["moe_act", "core_attn"]
    assert job.foreign.values["recompute-modules"].value == ["mlp"]
    lines = test.partition("MODEL_ARGS:\n")[2].splitlines()
    plain = "\n".join(line.strip().removeprefix("--").replace("num-", "num_") for line in lines)
    plain = plain.replace("disable-bias-linear: true", "add_bias_linear: false")
    assert of_file(tmp_path / "job.yaml", plain, devices=8).described.sizes == described().sizes


@each_case(
    ("text", "complaint"),
    [
        ("a: [", "no YAML"),
        ("- 1\n- 2\n", "a mapping of options is needed"),
        ("num_layers: many\n", "--num-layers many: a whole number is needed"),
        ("num_layers: [1, 2]\n", "one value is needed"),
        ("swiglu: 3\n", "it takes no value"),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(JobError) as refusal:
        of_file(tmp_path / "job.yaml", text, devices=8)
    assert complaint in str(refusal.value)


def test_no_source() -> None:
    from piper_interop import Asked, import_job

    with pytest.raises(JobError, match="there is no such file; it is no text of options"):
        import_job("megatron", "nowhere.sh", Asked())


def test_options_that_variables_hold_for_another_script(tmp_path: Path) -> None:
    """Megatron's examples keep the options of a model in a file of their own, or give a scheduler a text."""
    held = (
        SCRIPT[: SCRIPT.index("TRAINING=")]
        + 'TRAINING="--micro-batch-size 2 \\\n --vocab-size 99"\n'
    )
    sets = ("--train-samples 64",)
    job = of_file(tmp_path / "model.sh", held, 8, sets).described
    assert (job.rows, job.sizes.fields["layers"], job.compute) == (2, 8, "float32")
    text = f'{held}CMD="cd x; python pretrain_gpt.py ${{MODEL[@]}} --bf16"\nsbatch a.sbatch\n'
    assert of_file(tmp_path / "job.sh", text, 8, sets).described.compute == "bfloat16"
    with pytest.raises(JobError, match="MODEL and OTHER have --num-layers of different values"):
        of_file(tmp_path / "two.sh", f'{held}OTHER="--num-layers 9"\n', 8, sets)
