"""One run as one HTML page: `report.html` in its folder, made at its end or at any time before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from finetune.paths import RunDir, write_whole
from finetune.report.charts import charts_of
from finetune.report.cost import Cost, cost_of
from finetune.report.data_page import split_content
from finetune.report.memory import Memory, memory_of
from finetune.report.metrics import POINTS, Metrics, number
from finetune.report.reading import Reading, at, read_run
from finetune.report.render import render
from finetune.report.results import results_of
from finetune.report.settings import leaves, settings_of
from finetune.report.shown import (
    NOT_KNOWN,
    shown_count,
    shown_hours,
    shown_loss,
    shown_money,
    shown_seconds,
    shown_size,
    shown_value,
)

CLASSES = {"completed": "good", "failed": "bad", "interrupted": "warn"}


def page_at_end(run_dir: RunDir, say: Callable[[str], None]) -> None:
    """Make the page of a run that has ended; what goes wrong with it is told, and changes no run's result."""
    try:
        say(f"report    {write_page(read_run(run_dir))}")
    except Exception as error:  # noqa: BLE001 - a model that is saved and checked is not lost over its page
        what = f"{type(error).__name__}: {error}"
        say(f"WARNING   report.html could not be made ({what}); try: finetune report {run_dir.path}")


def write_page(reading: Reading) -> Path:
    """Write `report.html` into the run's folder."""
    page = reading.run_dir.page
    write_whole(page, run_page(reading))
    return page


def run_page(reading: Reading) -> str:
    """The page as text."""
    cost, memory = cost_of(reading), memory_of(reading)
    found, name = results_of(reading, cost, memory), reading.run_dir.path.name
    report = reading.report
    return render(
        "run.html",
        charts_of({name: reading.metrics}),
        name=name,
        folder=str(reading.run_dir.path),
        status=reading.status,
        status_class=CLASSES.get(reading.status, ""),
        sentence=sentence_of(reading),
        figures=figures_of(reading, cost, memory, found),
        failure=_failure(reading),
        missing=reading.missing,
        thinned=thinned_lines({name: reading.metrics}),
        memory=_memory(reading, memory),
        checks=_checks(report.get("verified")),
        model_path=_model_place(reading),
        answers=reading.answers,
        splits=_splits(reading),
        settings=settings_of(reading),
        environment=leaves(reading.environment),
        machine=_machine(reading),
    )


def sentence_of(reading: Reading) -> str:
    """What ran, as far as it is known."""
    count = reading.processes
    parts = [
        shown_value(at(reading.config, "adapter", "method") or ""),
        shown_value(reading.strategy or ""),
        f"{count} process{'es' * (count > 1)}" if count is not None else "",
        shown_value(at(reading.report, "precision") or reading.facts.get("precision") or ""),
    ]
    if reading.status == "running":
        parts.append(f"at step {shown_count(reading.metrics.last_step)}")
    return ", ".join(part for part in parts if part)


def figures_of(
    reading: Reading, cost: Cost, memory: Memory, found: dict[str, Any]
) -> list[tuple[str, str, str]]:
    """Name, value, and a few words below it; `found` is what `results_of` made."""
    plural = "" if cost.devices == 1 else "s" if cost.device == "GPU" else "es"
    devices = f"{cost.devices} {cost.device}{plural}" if cost.devices is not None else ""
    planned = "" if not memory.planned else f"planned up to {shown_size(memory.planned['upper'])}"
    tiles = [
        ("steps", shown_count(found["steps"]), ""),
        ("loss", shown_loss(found["final_loss"]), f"at first {shown_loss(found['first_loss'])}"),
        ("loss on held-out rows", _held_out(reading, found["eval_loss"]), ""),
        ("tokens per second", shown_count(found["tokens_per_second"]), ""),
        ("learnt tokens", shown_count(found["supervised_tokens"]), ""),
        (
            "memory of a process",
            shown_size(memory.most),
            f"{planned} for the last start" if planned and memory.plans_differ else planned,
        ),
        ("time", shown_seconds(cost.seconds), cost.how),
        ("training steps alone", shown_seconds(cost.training_seconds), "evaluations aside"),
        (f"{'GPU' if cost.device == 'GPU' else 'process'} hours", shown_hours(cost.device_hours), devices),
        ("cost", shown_money(cost.money, cost.currency), cost.no_money),
    ]
    return [tile for tile in tiles if tile[1]]


def thinned_lines(runs: dict[str, Metrics]) -> list[str]:
    """Say which curves are not shown whole."""
    return [
        f"{name}: of {metrics.thinned_from:,} points {POINTS:,} are drawn: the lowest and the highest of "
        "each stretch. metrics.jsonl has all of them."
        for name, metrics in runs.items()
        if metrics.thinned_from
    ]


def _held_out(reading: Reading, loss: float | None) -> str:
    """Their loss, or why there is none; empty where none were held out."""
    if loss is not None:
        return shown_loss(loss)
    if reading.data and not reading.data.get("eval"):
        return ""
    if not reading.data or not reading.metrics.curves:
        return NOT_KNOWN
    return "not evaluated" + (" yet" if reading.status == "running" else "")


def _model_place(reading: Reading) -> str:
    """In the folder that is read: it may have been moved since the run named it."""
    if not reading.report.get("model_path"):
        return "It did not pass, and is not offered as a model."
    model = reading.run_dir.model
    return str(model) if model.is_dir() else f"{model} is not there."


def _failure(reading: Reading) -> dict[str, Any] | None:
    """The diagnosis, and what the processes said themselves; None where nothing failed."""
    error, diagnosis = reading.report.get("error"), at(reading.report, "diagnosis")
    if not (error or diagnosis or reading.failures):
        return None
    advice = at(diagnosis, "advice")
    words = list(reading.failures.items())
    if error and str(error) not in reading.failures.values():
        words.insert(0, ("the run", str(error)))
    told = str(at(diagnosis, "told") or "")
    reason = "" if told else reading.own_words
    return {
        "told": told.splitlines(),
        "advice": advice if isinstance(advice, list) else [],
        "reason": reason,
        "words": [(who, said) for who, said in words if said != reason],
    }


def _memory(reading: Reading, memory: Memory) -> dict[str, Any]:
    held_against = {} if memory.plans_differ else memory.planned
    upper = held_against.get("upper")
    most = max([*memory.measured.values(), *held_against.values(), 1.0])
    lines = [f"{100 * size / most:.2f}" for size in held_against.values()]
    rows = [
        {
            "rank": rank,
            "size": shown_size(size),
            "share": f"{size / upper:.0%}" if upper else "",
            "width": f"{100 * size / most:.2f}",
            "lines": lines,
        }
        for rank, size in memory.measured.items()
    ]
    return {
        "kind": memory.kind,
        "planned": {name: shown_size(size) for name, size in memory.planned.items()},
        "unplanned": reading.unplanned,
        "plans_differ": memory.plans_differ,
        "rows": rows,
        "phases": _phases(reading),
        "starts": len(reading.starts),
    }


def _phases(reading: Reading) -> list[tuple[str, str, str]]:
    """Planned and measured: each phase's memory, the longest forward pass, the step, the speed."""
    forecast = at(reading.report, "forecast")
    phases = at(forecast, "memory", "phases")
    rows = [
        (str(name), *_sides(phase, shown_size))
        for name, phase in (phases.items() if isinstance(phases, dict) else ())
    ]
    others = {
        "micro_batch_tokens": ("tokens at once", shown_count),
        "step_seconds": ("a step", shown_seconds),
        "tokens_per_second": ("tokens per second", shown_count),
    }
    for name, (title, shown) in others.items():
        if isinstance(at(forecast, name), dict):
            rows.append((title, *_sides(forecast[name], shown)))
    return rows


def _sides(pair: Any, shown: Callable[[float | None], str]) -> tuple[str, str]:
    planned, measured = number(at(pair, "planned")), number(at(pair, "measured"))
    return "not planned" if planned is None else shown(planned), shown(measured)


def _checks(verified: Any) -> list[dict[str, Any]]:
    checks = verified if isinstance(verified, list) else []
    names = ("name", "passed", "detail")
    return [{name: at(check, name) for name in names} for check in checks if isinstance(check, dict)]


def _splits(reading: Reading) -> list[dict[str, Any]]:
    """The statistics of data.json; lengths and samples as the page of `finetune prepare` shows them."""
    splits = []
    for name in ("train", "eval"):
        said = reading.data.get(name)
        if not isinstance(said, dict):
            continue
        try:
            content = Markup(split_content(said))
        except (KeyError, TypeError, ValueError, AttributeError):  # said on the page
            content = Markup("")
        splits.append({"name": name, "facts": _data_facts(said), "content": content})
    return splits


def _data_facts(said: dict[str, Any]) -> list[tuple[str, str]]:
    used, tokens = number(said.get("rows_used")), number(said.get("tokens"))
    learnt, filled = number(said.get("supervised_tokens")), number(said.get("packing_efficiency"))
    share = f" ({learnt / tokens:.1%})" if learnt is not None and tokens else ""
    dropped = said.get("dropped")
    reasons = (
        [f"{count} {why}" for why, count in dropped.items()] if isinstance(dropped, dict) else [NOT_KNOWN]
    )
    facts = [
        ("rows", f"{shown_count(used)} of {shown_count(number(said.get('rows_read')))} used"),
        ("dropped", "; ".join(reasons) or "none"),
        ("tokens", f"{shown_count(tokens)}, {shown_count(learnt)} learnt{share}"),
        ("cut", shown_count(number(said.get("truncated")))),
        ("repeats of another row", shown_count(number(said.get("duplicates")))),
        ("format", shown_value(said.get("format"))),
    ]
    if filled is not None:
        packed = f"into {shown_count(number(said.get('packed_rows')))} rows, {filled:.1%} filled"
        facts.append(("packed", packed))
    files = said.get("files")
    return [*facts, ("files", ", ".join(map(str, files)) if isinstance(files, list) else NOT_KNOWN)]


def _machine(reading: Reading) -> str:
    seen = reading.environment
    cards = at(seen, "devices", "gpu_names")
    machine = ", ".join(map(str, cards)) if isinstance(cards, list) and cards else "no GPU"
    parts = [
        machine,
        f"Python {seen.get('python', NOT_KNOWN)}",
        f"torch {at(seen, 'packages', 'torch') or NOT_KNOWN}",
        f"revision {seen.get('git_revision') or NOT_KNOWN}",
    ]
    return ", ".join(parts)
