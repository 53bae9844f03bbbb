"""The stages of a rehearsal: each does one part of a run as a user would, and says what it saw."""

from __future__ import annotations

import json

import psutil

from finetune.config.saved import save_config
from finetune.config.schema import Method, Strategy
from finetune.planner.answer import answer
from finetune.rehearse.play import (
    MERGED_TO,
    PROCESSES,
    Play,
    StageFailed,
    last_words,
    refuse_apart,
    refuse_difference,
)
from finetune.rehearse.twin_config import CHECKPOINT_STEP, KILLED_AFTER, STEPS
from finetune.report.record import read_report
from finetune.training.checkpoint import damage, numbered, step_of

SILENT = "it said nothing"


def check(play: Play) -> str:
    """Compose, check and plan the real run; which strategy is rehearsed."""
    planned = answer(play.overrides)[0]
    config, play.composed = planned.config, planned.composed
    named, asked = planned.composed.choices.get("distributed"), config.distributed.strategy
    if named in list(Strategy) and named != asked:
        raise StageFailed(f"conf/distributed/{named}.yaml means strategy {asked.value}")
    play.strategy = planned.plan.chosen.strategy
    alone = play.strategy is Strategy.single
    play.processes = 1 if alone else config.launch.num_processes or PROCESSES
    where = planned.plan.machine.label
    if planned.plan.fits:
        return f"{play.strategy.value}; the real run fits on {where}"
    if config.plan.enforce:
        why = "`finetune plan` tells what would fit, plan.enforce=false rehearses it all the same"
        raise StageFailed(f"{play.strategy.value}: the real run does not fit on {where}; {why}")
    return f"{play.strategy.value}; the real run does not fit on {where} (plan.enforce=false)"


def twin(play: Play) -> str:
    """Make the twin of the model, and the config that trains it."""
    from finetune.rehearse.room import needed_bytes, refuse_small_room
    from finetune.rehearse.twin import make_twin  # torch
    from finetune.rehearse.twin_config import standing_for, twin_config

    assert play.composed is not None
    config = play.composed.config
    standing = standing_for(config)
    place = play.folder / "model"
    made = make_twin(config.model, standing.tokenizer, place, config.seed)
    all_trained = config.adapter.trains_embeddings
    refuse_small_room(play.folder, needed_bytes(made.num_parameters, all_trained=all_trained))
    runs = play.folder / "runs"
    save_config(twin_config(config, standing, play.strategy, play.processes, place, runs), play.recipe)
    kinds = ", ".join(f"{made.layers.count(kind)} {kind}" for kind in dict.fromkeys(made.layers))
    told = f"{made.architecture}, layers: {kinds}; {made.num_parameters:,} parameters"
    return "; ".join([told, *standing.notes])


def prepare(play: Play) -> str:
    """Load, check, tokenise and mask its rows."""
    done = play.finetune("prepare", f"recipe={play.recipe}", "--json")
    if done.returncode != 0:
        raise StageFailed(last_words(done.stderr) or SILENT)
    train = json.loads(done.stdout)["train"]
    if not train["supervised_tokens"]:
        raise StageFailed("no token of the rows would be learnt")
    return f"{train['rows_used']} of {train['rows_read']} rows, {train['supervised_tokens']:,} tokens learnt"


def train(play: Play) -> str:
    """Launch and train; what runs is what was asked for."""
    play.start()
    play.wait(lambda: play.steps_made >= CHECKPOINT_STEP, f"step {CHECKPOINT_STEP}")
    running = next((line for line in play.own_words() if line.startswith("runs  ")), "nothing")
    asked = f"{play.strategy.value} on {play.processes} process"
    if asked not in running:
        raise StageFailed(f"asked for: {asked}(es); what the run says of itself: {running}")
    losses = [step["loss"] for step in play.steps()]
    return f"{asked}{'es' * (play.processes > 1)}, loss {losses[0]:.4f} to {losses[-1]:.4f}"


def checkpoint(play: Play) -> str:
    """Whether what is saved beside the training is whole."""
    first = play.run.checkpoints / f"checkpoint-{CHECKPOINT_STEP}"
    play.wait(first.exists, first.name)
    wrong = damage(first)
    if wrong:
        raise StageFailed(f"{first.name}: {wrong}")
    files = [file for file in first.rglob("*") if file.is_file()]
    return f"{first.name} is whole: {len(files)} files, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB"


def kill(play: Play) -> str:
    """End every process as a machine that loses its power does; none is left, and nothing looks finished."""
    play.wait(lambda: play.steps_made >= KILLED_AFTER, f"step {KILLED_AFTER}")
    play.kill()
    play.before = play.steps()
    alive = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    left = [words for words in alive if any(str(play.folder) in word for word in words)]
    if left:
        raise StageFailed(f"{len(left)} processes are still alive: {' '.join(left[0])}")
    if play.run.model.exists():
        raise StageFailed("the folder has a finished model/")
    return f"killed after step {play.before[-1]['step']}; no process is left"


def resume(play: Play) -> str:
    """Go on from the checkpoint: the steps that were made before are made again, and come out the same."""
    for folder in numbered(play.run.checkpoints):
        if step_of(folder) > CHECKPOINT_STEP:
            folder.rename(play.folder / folder.name)  # gone on from would leave no step to compare
    done = play.finetune("train", f"recipe={play.recipe}", "checkpoint.resume=auto")
    if done.returncode != 0 and play.steps_made < STEPS:
        raise StageFailed(last_words(done.stderr or done.stdout) or SILENT)
    again = [step for step in play.before if step["step"] > CHECKPOINT_STEP]
    refuse_difference(again, play.steps())
    return f"steps {again[0]['step']} to {again[-1]['step']} came out the same (loss, gradient norm, rate)"


def save(play: Play) -> str:
    """What the run hands over, and the checks that it made on it."""
    report = read_report(play.run)
    failed = [check for check in report.get("verified", []) if not check["passed"]]
    if failed:
        raise StageFailed("; ".join(f"{check['name']}: {check['detail']}" for check in failed))
    if report.get("status") != "completed":
        raise StageFailed(last_words(str(report.get("error") or f"the run is {report.get('status')}")))
    return f"{len(report['verified'])} checks on the saved model passed"


def merge(play: Play) -> str:
    """One standalone model of it."""
    play.merged = play.folder / "merged"
    done = play.finetune(
        "merge", str(play.run.path), "--to", str(play.merged), "--dtype", MERGED_TO, "--json"
    )
    if done.returncode != 0:
        raise StageFailed(last_words(done.stderr) or SILENT)
    told = json.loads(done.stdout)
    return f"largest difference of the logits {told['max_logit_difference']:.1e}"


def reopen(play: Play) -> str:
    """Open what was saved, and what was merged, with plain transformers and peft in a fresh process."""
    assert play.composed is not None
    assert play.merged is not None
    adapter = play.composed.config.adapter.method is not Method.full
    base = str(play.folder / "model") if adapter else ""
    done = play.python("-m", "finetune.rehearse.opened", str(play.merged), str(play.run.model), base)
    if done.returncode != 0:
        raise StageFailed(last_words(done.stderr) or SILENT)
    play.told = told = json.loads(done.stdout.splitlines()[-1])
    refuse_apart(told)
    return f"{told['architecture']} opens; its logits are {told['difference']:.1e} from those of model/"


def generate(play: Play) -> str:
    """What the merged model answers."""
    if not play.told["tokens"]:
        raise StageFailed("it answers nothing at all")
    return f"{play.told['tokens']} tokens (weights of a twin are random: the answer means nothing)"


STAGES = (check, twin, prepare, train, checkpoint, kill, resume, save, merge, reopen, generate)
