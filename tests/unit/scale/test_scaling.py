"""`finetune scale`: figures from what processes measured, verdicts, and which runs the words mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import DoesNotFit, Refusal
from finetune.report.scale_plot import draw_scale
from finetune.report.scale_text import scale_lines
from finetune.scale.grid import doubled, grid_of
from finetune.scale.point import Point, base_of, point_of, records
from finetune.scale.verdict import verdict
from finetune.training.timing import seconds_alone, steps_in_all

CPU = ["recipe=tiny_full", "launch.device=cpu"]


def rank(steps: list[float], communication: list[float]) -> dict[str, Any]:
    return {
        "step_seconds": steps,
        "data_seconds": [0.1 * seconds for seconds in steps],
        "profiled_seconds": [2.0, 2.0],
        "communication_seconds": communication,
        "peak_bytes": 10**9,
    }


def report(*ranks: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    batch = {"per_device": 1, "accumulation": 1, "processes": len(ranks), "global": len(ranks)}
    return {
        "num_processes": {"requested": len(ranks), "actual": len(ranks)},
        "strategy": {"requested": "ddp", "actual": "ddp"},
        "batch": batch,
        "timing": {"tokens": tokens, "ranks": list(ranks)},
    }


def point(count: int, speed: float, **more: Any) -> Point:
    """A point of cards at so many tokens per second."""
    made = Point(
        num_processes=count,
        strategy="ddp",
        requested="ddp",
        device="cuda",
        threads_per_process=4,
        batch={"per_device": 1, "accumulation": 1, "processes": count, "global": count},
        steps=12,
        step_seconds=1.0,
        step_seconds_spread=(0.99, 1.01),
        tokens_per_second=speed,
        communication_share=0.0,
        waiting_share=0.0,
        data_share=0.0,
        slowest_rank=0,
        peak_bytes=10**9,
    )
    return replace(made, **more)


def test_a_collective_counts_while_nothing_is_computed_beside_it() -> None:
    second = 10**9
    collectives = [(0, 4 * second), (3 * second, 6 * second)]  # one behind another: six seconds in all
    work = [(1 * second, 2 * second), (5 * second, 9 * second)]
    assert seconds_alone(collectives, work, (0, 10 * second)) == pytest.approx(4)
    assert seconds_alone(collectives, work, (2 * second, 4 * second)) == pytest.approx(2)
    assert seconds_alone([], work, (0, 10 * second)) == 0
    assert seconds_alone(collectives, [], (20 * second, 30 * second)) == 0


def test_a_step_is_as_long_as_on_its_slowest_process() -> None:
    slow = rank([4.0, 1.0, 2.0], [0.0, 0.2])
    fast = rank([1.0, 3.0, 1.0], [1.0, 0.4])
    made = point_of("ddp", "cuda", 4, report(fast, slow, tokens=[400, 600, 100]))
    assert made.step_seconds == 3.0  # of 4, 3 and 2
    assert made.step_seconds_spread == (2.5, 3.5)
    assert made.tokens_per_second == 100  # of 400 / 4, 600 / 3 and 100 / 2
    assert made.data_share == pytest.approx(0.1)
    assert made.num_processes == 2


def test_waiting_for_a_slower_process_is_told_apart_from_the_exchange() -> None:
    slow = rank([1.0, 1.0, 1.0], [0.2, 0.2])
    fast = rank([1.0, 1.0, 1.0], [1.0, 0.6])
    made = point_of("ddp", "cuda", 4, report(fast, slow, tokens=[1, 1, 1]))
    assert made.communication_share == pytest.approx((1.6 + 0.4) / 8)
    assert made.exchange_share == pytest.approx(0.2 / 2)  # what the slower one takes all the same
    assert made.slowest_rank == 1


def test_speed_up_is_against_the_fewest_processes_of_the_strategy_or_the_single_run() -> None:
    single = point(1, 100, strategy="single", requested="single")
    fsdp = [point(n, speed, strategy="fsdp", requested="fsdp") for n, speed in ((2, 150), (4, 240))]
    assert base_of(fsdp[1], fsdp) is fsdp[0]
    assert base_of(fsdp[1], [single, *fsdp]) is single
    alone = records(fsdp)[1]
    assert (alone["speedup"], alone["efficiency"]) == (pytest.approx(1.6), pytest.approx(0.8))
    beside = records([single, *fsdp])[2]
    assert (beside["speedup"], beside["efficiency"]) == (pytest.approx(2.4), pytest.approx(0.6))
    assert beside["usual_speedup"] == (3.0, 3.7)
    assert alone["usual_speedup"] is None


def test_two_cards_in_the_usual_band_are_sent_on_to_four() -> None:
    points = [point(1, 100), point(2, 184, communication_share=0.05)]
    told = verdict(points, cores=32, cards=8)
    assert told == "2 cards under ddp are 1.84x one card (usual: 1.7-1.9x): go on to 4"
    assert "these are all the cards here" in verdict(points, cores=32, cards=2)


def test_communication_that_explains_the_loss_blames_the_link() -> None:
    points = [point(1, 100), point(2, 120, communication_share=0.61)]
    told = verdict(points, cores=32, cards=8)
    assert told.startswith("2 cards under ddp are 1.20x one card (usual: 1.7-1.9x): the link is the limit")
    assert "communication takes 61% of a step" in told
    assert "more cards will not help" in told
    assert "go on" not in told
    assert "more cards will help less" in verdict(points, 32, 8, "micro")  # the rest of a step is not halved
    points = [point(1, 100), point(2, 160, communication_share=0.2)]
    assert "communication takes 20% of a step), see `doctor`; more cards will help less" in verdict(
        points, 8, 8
    )


def test_uneven_processes_are_named_instead_of_the_link() -> None:
    uneven = point(2, 120, communication_share=0.45, waiting_share=0.4, slowest_rank=1)
    told = verdict([point(1, 100), uneven], cores=32, cards=8)
    assert "processes wait for each other 40% of a step, for rank 1 most" in told
    assert "link is the limit" not in told


def test_rows_that_come_late_are_named() -> None:
    told = verdict([point(1, 100), point(2, 120, data_share=0.4)], cores=32, cards=8)
    assert "40% of a step goes by until its rows are there" in told


def test_a_loss_that_nothing_measured_explains_is_not_blamed_on_the_link() -> None:
    told = verdict([point(1, 100), point(2, 120, communication_share=0.1)], cores=32, cards=8)
    assert "communication takes 10% of a step and rows 0%, which does not explain it" in told
    assert "too small" in told


def test_other_numbers_of_cards_are_judged_by_their_efficiency() -> None:
    points = [point(2, 100), point(4, 160), point(8, 310)]
    told = verdict(points, cores=64, cards=8)
    assert "8 cards under ddp are 3.10x 2 cards (78% of what could be): worth it" in told
    assert "4 cards under ddp are 1.60x 2 cards" in told
    assert "usual" not in told


def test_on_a_cpu_the_cores_are_shared_and_nothing_is_promised() -> None:
    points = [
        point(1, 100, device="cpu", threads_per_process=2),
        point(2, 190, device="cpu", threads_per_process=1, communication_share=0.07),
    ]
    told = verdict(points, cores=2, cards=0)
    assert "2 processes under ddp are 1.90x 1 process" in told
    assert "they share the 2 cores of this CPU (2 threads each before, 1 now)" in told
    assert "says nothing of cards" in told
    assert "communication takes 7% of a step" in told
    assert "go on" not in told
    assert records(points)[1]["usual_speedup"] is None


def test_several_strategies_get_a_line_each_and_the_fastest_is_named() -> None:
    fsdp = [point(n, speed, strategy="fsdp", requested="fsdp") for n, speed in ((1, 90), (2, 160))]
    lines = verdict([point(1, 100), point(2, 180), *fsdp], cores=32, cards=8).splitlines()
    assert lines[0].startswith("2 cards under ddp are 1.80x")
    assert lines[1].startswith("2 cards under fsdp are 1.78x")
    assert lines[-1] == "fastest: 2 processes under ddp, 180 tokens/s"


def test_one_number_of_processes_is_compared_with_nothing() -> None:
    assert verdict([point(1, 100)], 32, 1) == "1 process under ddp: nothing to compare it with."


def test_steps_of_very_different_length_are_told() -> None:
    restless = point(2, 184, step_seconds_spread=(0.8, 1.3))
    told = verdict([point(1, 100), restless], cores=32, cards=8)
    assert "the middle half of the steps is spread over 50% of their median" in told
    assert "spread" not in verdict([point(1, 100), point(2, 184)], cores=32, cards=8)


def test_a_speed_up_beyond_the_processes_is_not_taken_for_theirs() -> None:
    told = verdict([point(1, 100), point(2, 230)], cores=32, cards=8)
    assert "2.30x is more than so many processes give by themselves" in told
    assert "by themselves" not in verdict([point(1, 100), point(2, 210)], cores=32, cards=8)


def test_the_text_fits_80_columns_and_the_picture_is_drawn(tmp_path: Path) -> None:
    named = {"strategy": "zero3_offload", "requested": "zero3_offload"}
    points = [
        point(count, 123_456.0 * count, communication_share=0.07, peak_bytes=139_540_000_000, **named)
        for count in (1, 2, 16)
    ]
    told = verdict(points, 64, 16)
    record = {"points": records(points), "verdict": told, "hold": "global"}
    lines = scale_lines(record)
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("16 x zero3_offload"))
    seen = ["4", "1", "0.99-1.01", "1,975,296", "16.00", "100%", "7%", "0%", "139.5"]
    assert row.split()[3:] == seen
    (longest,) = [line for line in lines if "#" * 34 in line]
    assert longest.startswith("16 x zero3_offload")
    draw_scale(record, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_counts_double_up_to_the_largest() -> None:
    assert doubled(1) == [1]
    assert doubled(8) == [1, 2, 4, 8]
    assert doubled(6) == [1, 2, 4, 6]


def test_strategies_times_numbers_of_processes_and_single_alone(tmp_path: Path) -> None:
    words = ["launch.num_processes=[2,1]", "distributed=[single,ddp]", "trainer.max_steps=7"]
    grid = grid_of([*CPU, *words], "global", tmp_path)
    assert [(one.requested, one.num_processes) for one in grid.wanted] == [
        ("single", 1),
        ("ddp", 1),
        ("ddp", 2),
    ]
    ran = [(one.run.facts.strategy.value, one.run.facts.num_processes) for one in grid.wanted]
    assert ran == [("single", 1), ("ddp", 1), ("ddp", 2)]
    assert {one.run.config.trainer.max_steps for one in grid.wanted} == {steps_in_all(7)}
    assert {one.run.config.output_dir for one in grid.wanted} == {str(tmp_path)}


def test_the_steps_of_a_recipe_are_not_those_that_are_timed(tmp_path: Path) -> None:
    recipe = tmp_path / "long.yaml"
    recipe.write_text(
        "defaults: [override /model: tiny]\ndata: {train: [{path: '${embedded:behaviour.jsonl}'}]}\n"
        "trainer: {max_steps: 5000}\n"
    )
    grid = grid_of([f"recipe={recipe}", "launch.device=cpu", "launch.num_processes=[1]"], "global", tmp_path)
    assert grid.wanted[0].run.config.trainer.max_steps == steps_in_all(12)


def test_the_global_batch_stays_or_that_of_a_process(tmp_path: Path) -> None:
    counts = [*CPU, "launch.num_processes=[1,2,4]"]
    batches = [one.run.facts.batch for one in grid_of(counts, "global", tmp_path).wanted]
    assert [(b.per_device, b.accumulation, b.global_size) for b in batches] == [
        (2, 8, 16),
        (2, 4, 16),
        (2, 2, 16),
    ]
    batches = [one.run.facts.batch for one in grid_of(counts, "micro", tmp_path).wanted]
    assert [(b.per_device, b.accumulation, b.global_size) for b in batches] == [
        (2, 8, 16),
        (2, 8, 32),
        (2, 8, 64),
    ]


def test_without_a_global_batch_that_of_the_most_processes_is_held(tmp_path: Path) -> None:
    words = [*CPU, "launch.num_processes=[1,2]", "trainer.global_batch_size=null"]
    batches = [one.run.facts.batch for one in grid_of(words, "global", tmp_path).wanted]
    assert [(b.accumulation, b.global_size) for b in batches] == [(2, 4), (1, 4)]


def test_evaluation_checkpoints_trackers_and_detaching_are_left_out(tmp_path: Path) -> None:
    words = [
        *("data.eval_fraction=0.1", "trainer.eval_strategy=steps", "trainer.eval_steps=1"),
        *("checkpoint.best=eval_loss", "checkpoint.early_stopping_patience=2", "launch.detach=true"),
        *("tracking=tensorboard", "launch.num_processes=[1]", "trainer.lr_scheduler_type=greedy"),
    ]
    config = grid_of([*CPU, *words], "global", tmp_path).wanted[0].run.config
    assert config.trainer.eval_strategy == "no"
    assert config.checkpoint.best is None
    assert config.tracking.report_to.value == "none"
    assert config.launch.detach is False


@pytest.mark.parametrize(
    ("words", "hold", "told"),
    [
        (["launch.num_processes=[1,two]"], "global", r"launch.num_processes=\[1,two\]: expected numbers"),
        (["launch.num_processes=0"], "global", "launch.num_processes=0: expected numbers"),
        (["distributed=[ddp,fdsp]"], "global", "fdsp"),
        (["distributed=single", "launch.num_processes=[2]"], "global", "it is one process"),
        (["launch.num_machines=2"], "global", "one machine is measured at a time"),
        (["trainer.max_steps=2"], "global", "a median takes at least 3 steps"),
        (
            ["launch.num_processes=[1,3]"],
            "global",
            "global_batch_size=16: not a multiple of 2 per device x 3",
        ),
        (["trainer.per_device_train_batch_size=auto"], "micro", "it would be another one"),
        (["launch.num_processes=[3,6]"], "micro", "global_batch_size=16: 2 per device x 3 at the smallest"),
        ([], "all", "--hold all: expected one of global, micro"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    words: list[str], hold: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(Refusal, match=told):
        grid_of([*CPU, *words], hold, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_same_problem_of_several_runs_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        grid_of([*CPU, "launch.num_processes=[1,2,4]", "trainer.learning_rate=-1"], "global", tmp_path)
    assert len(refused.value.problems) == 1


def test_a_run_that_does_not_fit_is_left_out_and_one_that_is_left_alone_refused(tmp_path: Path) -> None:
    small = [*CPU, "distributed=ddp", "hardware.host_memory_gb=4", "trainer.global_batch_size=128"]
    grid = grid_of([*small, "launch.num_processes=[1,2,64]"], "global", tmp_path)
    assert [bool(one.unfit) for one in grid.wanted] == [False, False, True]
    assert "RAM" in grid.wanted[2].unfit
    with pytest.raises(DoesNotFit, match="fewer than two runs fit"):
        grid_of([*small, "launch.num_processes=[1,64]"], "global", tmp_path)


def test_a_plan_that_is_not_enforced_leaves_nothing_out(tmp_path: Path) -> None:
    words = [
        "distributed=ddp",
        "hardware.host_memory_gb=0.5",
        "plan.enforce=false",
        "launch.num_processes=[2]",
    ]
    assert not grid_of([*CPU, *words], "global", tmp_path).wanted[0].unfit
    with pytest.raises(DoesNotFit, match=r"2 x ddp: .* needs up to .* of RAM"):
        grid_of([*CPU, *words, "plan.enforce=true"], "global", tmp_path)
