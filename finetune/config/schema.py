"""Every knob of a run, typed and documented where it is declared.

The classes are composed by Hydra into one `RunConfig`. `trainer` is the exception: its fields are those of
the installed `trl.SFTConfig` (see `trainer_fields.py`), plus the few of ours declared in `OwnTrainerFields`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from finetune.config.machine import HardwareConfig, PlanConfig


class Method(StrEnum):
    """How the weights are trained."""

    full = "full"
    lora = "lora"
    qlora = "qlora"


class Strategy(StrEnum):
    """How a run is spread over processes."""

    auto = "auto"
    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"
    fsdp_offload = "fsdp_offload"
    zero1 = "zero1"
    zero2 = "zero2"
    zero2_offload = "zero2_offload"
    zero3 = "zero3"
    zero3_offload = "zero3_offload"


class Device(StrEnum):
    """Where the processes run."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class TooLong(StrEnum):
    """What happens to a row longer than `data.max_length`."""

    drop = "drop"
    truncate = "truncate"
    error = "error"


class LossOn(StrEnum):
    """Which tokens are supervised."""

    assistant = "assistant"
    last_assistant = "last_assistant"
    completion = "completion"
    all = "all"


class Format(StrEnum):
    """What the rows of a source look like; null means: recognised from the columns, and printed."""

    messages = "messages"
    prompt_completion = "prompt_completion"
    alpaca = "alpaca"
    sharegpt = "sharegpt"
    text = "text"
    tokenized = "tokenized"


class Thinking(StrEnum):
    """What happens to the thoughts (`reasoning_content`, think blocks) of answers."""

    keep = "keep"
    off = "off"
    mixed = "mixed"


class PackingStrategy(StrEnum):
    """How rows are put together; only strategies that keep rows apart are offered."""

    bfd = "bfd"


class ScaleLearningRate(StrEnum):
    """How the learning rate follows the global batch size."""

    none = "none"
    sqrt = "sqrt"
    linear = "linear"


class Tracker(StrEnum):
    """A service of the Trainer's own integrations that also receives the metrics."""

    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"
    trackio = "trackio"


@dataclass(kw_only=True, slots=True)
class ShapeConfig:
    """The sizes of the language model, as in the checkpoint's config.json (or its `text_config`).

    They let a config be checked and planned without the weights, the network or torch.
    """

    model_type: str | None = None
    """transformers' name of the architecture, e.g. `qwen3`; null: read from the local folder."""
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    """Positions the model was made for, before any `rope_scaling` of ours."""
    tie_word_embeddings: bool | None = None
    num_experts: int | None = None
    """Experts of a mixture-of-experts layer; null: dense."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    num_parameters: int | None = None
    """Exact number of parameters of the language model (tied embeddings counted once)."""
    tower_parameters: int = 0
    """Parameters of vision and audio towers and projectors that the checkpoint also holds (frozen here)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further sizes of config.json that this architecture needs to be rebuilt (e.g. `layer_types`)."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Which model is trained, and how it is loaded."""

    name_or_path: str = "???"
    """A folder, or a hub id."""
    revision: str | None = None
    """Hub branch, tag or commit; null: the default branch."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16` for the model's weights; null: float32 for trained weights (the
    master weights), the run's compute precision for frozen ones. An adapter is always trained in float32."""
    attn_implementation: str | None = None
    """transformers' name of the attention kernel (`sdpa`, `flash_attention_2`); null: the best installed."""
    trust_remote_code: bool = False
    """Run Python code that ships with the checkpoint."""
    gguf_file: str | None = None
    """Name of a GGUF file inside `name_or_path`; it is unpacked to ordinary weights while loading."""
    chat_template: str | None = None
    """A Jinja file (or the template itself) instead of the tokenizer's own; it is saved with the model."""
    rope_scaling: dict[str, Any] | None = None
    """transformers' rope parameters, e.g.
    `{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}`: needed before
    `data.max_length` may exceed the model's positions."""
    cpu: bool = False
    """True marks a model small enough to train on a CPU when no GPU is there."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """Full fine-tuning, or a low-rank adapter on a frozen (and possibly quantised) model."""

    method: Method = Method.full
    r: int = 16
    """Width of the low-rank update; adapter memory grows linearly with it."""
    lora_alpha: int | None = None
    """Numerator of the update's scale (alpha / r); null: 2 * r."""
    lora_dropout: float = 0.0
    """Dropout on the adapter's input while training, 0.0 to 1.0."""
    target_modules: Any = "all-linear"
    """peft's `all-linear` (of the language model only; no head, experts or router), or a list of names."""
    modules_to_save: list[str] | None = None
    """Modules trained in full beside the adapter, e.g. `[embed_tokens, lm_head]`."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv:2312.03732)."""
    use_dora: bool = False
    """Train magnitude and direction apart (arXiv:2402.09353)."""
    init_lora_weights: Any = True
    """peft's name of the start (true, false, `gaussian`, `pissa`, `olora`, ...)."""
    experts: bool = False
    """Also adapt a mixture-of-experts model's experts and router; the print-out counts what that adds."""
    init_from: str | None = None
    """Folder of an existing adapter to start from, with a fresh optimizer and schedule."""
    bits: int = 4
    """qlora: bits of a stored weight, 4 or 8."""
    quant_type: str = "nf4"
    """qlora: `nf4` or `fp4`."""
    double_quant: bool = True
    """qlora: quantise the quantisation constants too (saves about 0.4 bits a parameter)."""

    @property
    def trains_embeddings(self) -> bool:
        """Whether rows of new tokens would be learnt, where they are read and where they are written."""
        return self.method is Method.full or {"embed_tokens", "lm_head"} <= {*(self.modules_to_save or ())}


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """One source of rows."""

    path: str = "???"
    """A file (jsonl, json, csv, tsv, parquet, arrow, txt, each also as .gz or .zst), a folder or a glob of
    such files, an address that fsspec knows (s3://, gs://, hf://), or a hub id.
    """
    name: str | None = None
    """Hub: the data set's configuration; json: the field that holds the rows."""
    split: str | None = None
    """Hub and folders: the split to read; null: `train`."""
    revision: str | None = None
    """Hub: branch, tag or commit; null: the newest."""
    format: str | None = None
    """One of `Format`, or a function of yours, `module:function`, that makes a row of one of them from a row
    of the file (None: the row is left out). null: recognised from the columns, and printed.
    """
    columns: dict[str, str] = field(default_factory=dict)
    """`{our name: column in the file}`, e.g. `{prompt: question, completion: answer}`."""
    weight: float | None = None
    """This source's part in the mixture, e.g. 3 and 1: three rows of one for each of the other. As many rows
    as give these parts without a repeat are drawn by `seed`. On all sources or on none; null: every row.
    """
    limit: int | None = None
    """Take only the first N rows; null: all."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What is learnt, and which tokens of it."""

    train: list[SourceConfig] = field(default_factory=list)
    eval: list[SourceConfig] = field(default_factory=list)
    """Held-out rows; empty: none, unless `eval_fraction` takes some from `train`."""
    eval_fraction: float = 0.0
    """Share of the training rows held out for evaluation, chosen once by `seed` before any process starts."""
    eval_samples: int = 3
    """Held-out rows that are answered before the first step and at each evaluation (there is none unless
    `trainer.eval_strategy` is set), to be read in the report (`samples.jsonl`); 0: none.
    """
    max_length: int | None = None
    """Longest row in tokens; null: the model's positions."""
    too_long: TooLong = TooLong.drop
    """What happens to a longer row; always counted and printed."""
    max_dropped: float = 0.8
    """Share of the rows of a split that may be dropped before it is an error (always counted and printed); 0:
    none.
    """
    packing: bool = False
    """Put several rows into one of `max_length` tokens; they never see each other."""
    packing_strategy: PackingStrategy = PackingStrategy.bfd
    """`bfd`: best fit, longest row first."""
    loss_on: LossOn = LossOn.assistant
    """`assistant`: the answers and their end tokens (the completion of a prompt-completion row); plain text
    rows have no roles and are learnt whole."""
    thinking: Thinking = Thinking.keep
    """`keep`: thoughts are learnt as far as the chat template prints them (between think tags in the content
    if it knows no field for them). `off`: they are taken out, and the
    saved chat template does not think unless it is told to. `mixed`: rows without a thought are told not to.
    """
    split_special_tokens: bool | None = None
    """Read `<|im_end|>` and the like in the data as the letters they are, never as the token. null: in the
    contents of conversations, but not in plain text, which may be rendered already.
    """
    streaming: bool = False
    """Read no more of the sources than the steps need, for data larger than the disk; needs
    `trainer.max_steps`.
    """
    num_proc: int | None = None
    """Processes that tokenise; null: one for each core, at least 2,000 rows each."""


@dataclass(kw_only=True, slots=True)
class OwnTrainerFields:
    """The keys of `trainer` that Hugging Face has no name for."""

    global_batch_size: int | None = None
    """Sequences per optimizer step over all processes: accumulation is derived from it. null: per device x
    processes x `gradient_accumulation_steps`."""
    scale_learning_rate: ScaleLearningRate = ScaleLearningRate.none
    """Multiply `learning_rate` by global batch size / `base_global_batch_size` (or its square root)."""
    base_global_batch_size: int | None = None
    """The global batch size that `learning_rate` was chosen for."""


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    """How weights, gradients and optimizer states are spread; one file of `conf/distributed` each."""

    strategy: Strategy = Strategy.auto
    """`auto`: the fastest that fits, by the planner (where it knows too little: `single` on one device, else
    `ddp`)."""
    reshard_after_forward: bool = True
    """fsdp: free gathered weights after the forward pass; false keeps them (faster, memory like ZeRO-2)."""


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Which processes are started, and where."""

    num_processes: int | None = None
    """Processes over all machines; null: one for each GPU (`auto`), or one on CPU."""
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    """Address of machine 0; needed with several machines."""
    main_process_port: int | None = None
    """null: a free port (one machine), 29500 (several)."""
    detach: bool = False
    """Start the run in the background: it outlives the terminal."""
    device: Device = Device.auto
    """`auto`: GPUs; where none is usable only models marked `model.cpu=true` run, on the CPU."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When a resumable checkpoint is written to `checkpoints/`; a signal always writes one too."""

    every_minutes: float | None = 30.0
    """Wall-clock minutes between checkpoints; null: none by time."""
    every_steps: int | None = None
    """Optimizer steps between checkpoints; null: none by steps."""
    keep: int = 2
    """How many checkpoints stay on disk, the best one aside."""
    best: str | None = None
    """`eval_loss`: the checkpoint with the lowest evaluation loss stays too, and `model/` holds its weights.
    null: `model/` holds those of the last step.
    """
    early_stopping_patience: int | None = None
    """End the run after so many evaluations in a row without a new best; needs `best`. null: never."""
    early_stopping_threshold: float = 0.0
    """By how much an evaluation must be better than the best to count for `early_stopping_patience`."""
    resume: str = "never"
    """`auto`: go on with the run of this `run_name` from its newest whole checkpoint, here or in `remote`, or
    begin it. Or the path of a checkpoint or a run, or its address in a store.
    """
    allow_changes: list[str] = field(default_factory=list)
    """Keys that may differ from the run that is resumed."""
    stop_at: str | None = None
    """When the machine goes: `2h30m` from now, or a moment (`2030-01-31T18:00`). A checkpoint is saved in
    time before it, and the run ends as interrupted, with exit code 143.
    """
    remote: str | None = None
    """Where checkpoints and the model are kept off this machine as well, below the run's name: an address
    that fsspec knows (`s3://bucket/prefix`, `gs://...`, a mounted folder) or `hub://owner/name`. The last
    `keep` checkpoints stay there too. null: nowhere.
    """


@dataclass(kw_only=True, slots=True)
class HooksConfig:
    """Shell commands of yours at the end of a run; they find FINETUNE_RUN_DIR, _STATUS, _EXIT_CODE, _STEPS,
    _LOSS and _MODEL in their environment, and may take ten minutes.
    """

    on_end: str | None = None
    """After a run whose model is saved and verified."""
    on_failure: str | None = None
    """After a run that failed or was stopped."""


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Services beside `metrics.jsonl` that receive the metrics."""

    report_to: Tracker = Tracker.none


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run."""

    output_dir: str = "runs"
    """Folder of all runs."""
    run_name: str | None = None
    """Name of the run's folder; null: recipe or model, strategy and time."""
    seed: int = 42
    """Order of rows, adapter start, dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: Any = field(default_factory=OwnTrainerFields)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
