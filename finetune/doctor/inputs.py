"""Would a run be refused in its first seconds: for its folder, its model's files, its data, its remote store?

What a run does itself is done here, with its own words; nothing is fetched, and nothing made is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from finetune.config.schema import ModelConfig, RunConfig
from finetune.doctor.check import FAIL, PASS, Check
from finetune.doctor.network import name_on_the_hub, weights_are_here
from finetune.errors import Refusal, UserError, refuse
from finetune.remote.address import whole_address
from finetune.short_lived import short_lived
from finetune.training.start import CheckedRun, run_folder, to_resume

ROWS = 100
"""Of each source: all of them are `finetune prepare`'s to look at."""
DO = "finetune train refuses it with these words: mend what they name."


def input_checks(run: CheckedRun) -> Iterator[Check]:
    """Everything that a run looks at before its first process computes."""
    config = run.config
    if config.checkpoint.remote is not None and config.launch.machine_rank == 0:  # tried by `check_run`
        yield Check(
            "remote", PASS, f"{whole_address(config.checkpoint.remote)} is reached and can be written"
        )
    yield from _told("run name", lambda: _folder(run))
    here = Path(config.model.name_or_path).expanduser().exists() or weights_are_here(config.model)
    if here:
        (model,) = _told("model", lambda: _model(config.model))
        yield model
        here = model.status != FAIL
    yield from _told("data", lambda: _data(config, with_model=here))


def refused(name: str, error: UserError) -> list[Check]:
    """The words of a run that would be refused, a line for each problem."""
    if not isinstance(error, Refusal):
        return [Check(name, FAIL, " ".join(str(error).split()), DO)]
    return [
        Check(_line(name, one.where), FAIL, f"{one.where}: {one.why}", one.fix or DO)
        for one in error.problems
    ]


def _line(name: str, where: str) -> str:
    return "remote" if where.startswith("checkpoint.remote=") else name


def _told(name: str, look: Callable[[], str]) -> list[Check]:
    try:
        return [Check(name, PASS, look())]
    except UserError as error:
        return refused(name, error)


def _folder(run: CheckedRun) -> str:
    resume = to_resume(run)
    if resume is not None:
        return f"{resume.run_dir.path} is {'completed' if resume.completed else 'gone on with'}"
    path = run_folder(run).path
    return f"{path if run.config.run_name else f'a new one in {path.parent}'} is free"


def _model(model: ModelConfig) -> str:
    """Its tokenizer, its config.json and its weights: the last are looked for and not read."""
    from finetune.model.limits import model_limits
    from finetune.model.source import WEIGHTS, model_folder
    from finetune.model.tokenizer import load_tokenizer

    load_tokenizer(model)
    model_limits(model)
    folder = model_folder(model)
    patterns = [model.gguf_file] if model.gguf_file else WEIGHTS
    if not any(True for pattern in patterns for _ in folder.glob(pattern)):
        why, fix = (
            f"{folder} holds no weights ({', '.join(patterns)})",
            "Bring them there, or name another one.",
        )
        raise refuse(f"model.name_or_path={model.name_or_path}", why, fix, subject="the model")
    return f"tokenizer, config.json and weights are in {folder}"


def _data(config: RunConfig, *, with_model: bool) -> str:
    """The first rows of each source that is not the hub's, read and converted as training does it."""
    from finetune.data.gather import gather
    from finetune.data.read import read
    from finetune.data.rows import RowWriter
    from finetune.model.tokenizer import load_tokenizer

    looked_at = 0
    for split in (config.data.train, config.data.eval):
        here = [replace(one, limit=min(one.limit or ROWS, ROWS)) for one in split if not name_on_the_hub(one)]
        if not with_model:
            looked_at += sum(len(chunk.items) for source in here for chunk in read(source))
        elif here:
            with short_lived("finetune-doctor-") as folder:
                writer = RowWriter(folder, "rows")
                looked_at += gather(here, config.data, load_tokenizer(config.model), writer).read
    if not looked_at:
        return "all of it is the hub's: not looked at"
    done = "converted and encoded" if with_model else "read"
    return f"the first {looked_at:,} rows can be {done} (finetune prepare does it with all)"
