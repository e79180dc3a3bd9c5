"""Say which options change neither memory nor time of a training step, and why."""

from __future__ import annotations

from piper_interop.neutral.options import Ignored, Nearest, OptionTable, Unsupported

_LOGS, _DATA = "a message, no part of a step", "data, which a step waits for only if it is late"
_SAVES, _RATES = "checkpoints, which are between steps", "the learning rate, a number of each step"
_ENDS, _INFERS = "when a run ends or starts again", "a part of inference"
_KERNELS = "clusters say how fast the kernels of Megatron are"
_OTHER = "a part of another program"
_OLD = "an option that Megatron itself refuses"

ASIDE: OptionTable = {
    **dict.fromkeys(
        (
            "log-*", "no-log-*", "disable-log-*", "logging-level", "timing-*", "tensorboard-*", "wandb-*", "otel-*",
            "*-one-logger", "one-logger-*", "app-tag-*", "no-barrier-with-level-1-timing", "config-logger-dir",
            "straggler-*", "disable-straggler-*", "run-workload-inspector-server", "profile*", "use-pytorch-profiler",
            "pytorch-profiler-*", "record-*", "memory-snapshot-path", "nvtx-ranges", "dump-param-to-param-group-map",
            "logits-save-*", "flight-recorder-*", "no-flight-recorder-*", "disable-flight-recorder-*",
        ),
        Ignored(_LOGS),
    ),
    **dict.fromkeys(
        (
            "data-*", "train-data-path", "valid-data-path", "test-data-path", "per-*-path", "split", "mock-data",
            "phase-transition-iterations", "dataloader-*", "no-mmap-bin-files", "sample-rate", "mask-prob",
            "short-seq-prob", "num-workers", "reset-position-ids", "eod-mask-loss",
            "no-create-attention-mask-in-dataloader", "num-dataset-builder-threads", "object-storage-cache-path",
            "mid-level-dataset-surplus", "allow-ambiguous-pad-tokens", "fim-*", "tokenizer-*",
            "*-tokenizer-sentencepiece-*", "tiktoken-*", "trust-remote-code", "null-tokenizer-*", "chat-template",
            "use-gigatoken", "sft-*",
        ),
        Ignored(_DATA),
    ),
    **dict.fromkeys(
        (
            "save*", "persistent-save-interval", "no-save-*", "disable-save-*", "load*", "no-load-*", "non-persistent-*",
            "finetune", "pretrained-checkpoint", "ckpt-*", "no-ckpt-*", "disable-ckpt-*", "use-checkpoint-*",
            "use-mp-args-from-checkpoint-args", "*-use-tokenizer-model-from-checkpoint-args",
            "exit-on-missing-checkpoint", "auto-detect-ckpt-format", "async-*", "use-persistent-ckpt-worker",
            "no-strict-fsdp-dtensor-load", "disable-strict-fsdp-dtensor-load", "dist-ckpt-*", "use-dist-ckpt",
            "distrib-optim-*", "replication*", "verify-integrity", "override-ckpt-iteration", "enable-msc",
            "disable-msc",
        ),
        Ignored(_SAVES),
    ),
    **dict.fromkeys(
        (
            "lr-*", "min-lr", "decoupled-lr", "decoupled-min-lr", "override-opt-param-scheduler",
            "weight-decay", "weight-decay-*", "start-weight-decay", "end-weight-decay", "apply-wd-to-qk-layernorm",
            "no-weight-decay-cond-type", "adam-*", "sgd-momentum", "head-lr-mult",
        ),
        Ignored(_RATES),
    ),
    **dict.fromkeys(("muon-*", "lion-*"), Ignored("a part of --optimizer")),
    "no-use-layer-wise-param-layout": Ignored("a part of --optimizer muon"),
    **dict.fromkeys(
        (
            "train-iters", "train-samples", "exit-*", "iterations-to-skip", "adlr-*", "inprocess-*", "enable-ft-package",
            "calc-ft-timeouts", "ft-num-warmup-iters", "error-injection-*", "rerun-mode", "fault-injector-*",
            "result-rejected-tracker-filename", "check-*", "no-check-*", "gpu-sniff-test-interval", "skip-train",
            "test-mode", "eval-*", "start-eval-at-iter", "full-validation", "multiple-validation-sets",
            "validation-set-names",
        ),
        Ignored(_ENDS),
    ),
    **dict.fromkeys(
        (
            "inference-*", "no-inference-*", "max-tokens-to-oom", "flash-decode", "use-legacy-static-engine",
            "decode-only-cuda-graphs", "enable-chunked-prefill", "num-speculative-tokens",
            "use-same-sampling-seed-across-dp-ranks", "symmetric-ar-type", "nccl-all-reduce-for-prefill",
        ),
        Ignored(_INFERS),
    ),
    **dict.fromkeys(("rl-*", "no-rl-*", "grpo-*", "langrl-*", "refit-method"), Ignored("a part of --perform-rl-step")),
    "logits-load-*": Ignored("a part of --logits-load-dir"),
    **dict.fromkeys(
        (
            "use-te-activation-func", "use-transformer-engine-op-fuser", "use-fused-weighted-squared-relu",
            "fused-residual-rmsnorm",
        ),
        Ignored(_KERNELS),
    ),
    **dict.fromkeys(
        (
            "no-masked-softmax-fusion", "no-bias-*", "no-rope-fusion", "no-persist-layer-norm",
            "no-gradient-accumulation-fusion", "disable-jit-fuser",
        ),
        Nearest("kernels that are fused as they are by default", "predicted too fast"),
    ),
    **dict.fromkeys(
        ("dataloader-inter-document-masking", "reset-attention-mask"),
        Nearest("attention over whole rows, across documents", "predicted too slow"),
    ),
    "logits-load-dir": Unsupported("distillation from saved logits", "leave it out with --set"),
    "use-checkpoint-args": Nearest("the options given here", "another job, if those of the checkpoint differ"),
    **dict.fromkeys(
        (
            "seed", "te-rng-tracker", "data-parallel-random-init",
        ),
        Ignored("random numbers, as many as without it"),
    ),
    **dict.fromkeys(
        (
            "distributed-*", "local-rank", "lazy-mpu-init", "nccl-communicator-config-path", "use-sharp",
            "sharp-enabled-group", "disable-gloo-process-groups", "fake-process-group",
        ),
        Ignored("how processes find each other; clusters say how fast messages are"),
    ),
    **dict.fromkeys(
        ("manual-gc*", "no-manual-gc-*", "disable-manual-gc-*", "empty-unused-memory-level", "enable-experimental"),
        Ignored("how Python and the allocator keep house; no plan counts it"),
    ),
    **dict.fromkeys(
        (
            "use-torch-optimizer-for-cpu-offload", "overlap-cpu-optimizer-d2h-h2d",
            "no-pin-cpu-*", "cpu-offloading-retain-pinned-cpu-buffers", "offload-modules", "*-offloaded-tensor-size",
            "delay-offload-*", "delta-offload-*", "activation-offload-fraction", "fine-grained-offloading-*",
        ),
        Ignored("a part of offloading"),
    ),
    **dict.fromkeys(
        (
            "ict-load", "bert-load", "titles-data-path", "query-in-block-prob", "use-one-sent-docs",
            "evidence-data-path", "retriever-*", "block-data-path", "embedding-path", "indexer-*", "num-classes",
            "img-*", "num-channels", "patch-dim", "classes-fraction", "no-data-sharding", "swin-*", "mask-type",
            "mask-factor", "iter-per-epoch", "dino-*", "output-bert-embeddings", "bert-embedder-type", "onnx-safe",
        ),
        Ignored(_OTHER),
    ),
    "use-mcore-models": Ignored("Megatron itself passes it over"),
    "batch-size": Unsupported(_OLD, "give --micro-batch-size"),
    "model-parallel-size": Unsupported(_OLD, "give --tensor-model-parallel-size"),
    "warmup": Unsupported(_OLD, "give --lr-warmup-fraction"),
    "yaml-cfg": Unsupported("options in another file", "give that file itself to be imported"),
}  # fmt: skip
