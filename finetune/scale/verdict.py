"""What the measured points come to in words: is it worth more cards, and if not, why?"""

from __future__ import annotations

from finetune.scale.grid import GLOBAL
from finetune.scale.point import Point, base_of, efficiency, speedup, usual

GOOD = 0.75
"""The efficiency that is asked of other numbers of cards: the lower end of four."""
EXPLAINS = 0.5
"""A cause is named when it accounts for so much of what is lost."""
HOPELESS = 0.43
"""With this part of a step for the exchange, which stays while the rest is halved (the global batch is held),
twice the cards are 2 / (1 + 0.43) = 1.4x.
"""
TOO_GOOD = 1.1
"""An efficiency above this has another cause than the processes."""
RESTLESS = 0.3
"""Steps whose middle half is spread over more of their median than this are told to be uneven."""


def verdict(points: list[Point], cores: int, cards: int, hold: str = GLOBAL) -> str:
    """One line for each strategy, and which one is the fastest; `cards` are those of this machine."""
    requested = list(dict.fromkeys(point.requested for point in points))
    lines = [
        _of_strategy([p for p in points if p.requested == one], points, cores, cards, hold)
        for one in requested
    ]
    lines += [_restless(point) for point in points if _spread(point) > RESTLESS]
    lines += [_beyond(p, base) for p in points if _too_good(p, base := base_of(p, points))]
    if len(requested) > 1:
        best = max(points, key=lambda p: p.tokens_per_second)
        lines.append(f"fastest: {_counted(best)}, {best.tokens_per_second:,.0f} tokens/s")
    return "\n".join(lines)


def _of_strategy(own: list[Point], points: list[Point], cores: int, cards: int, hold: str) -> str:
    largest = max(own, key=lambda p: p.num_processes)
    base = base_of(largest, points)
    if largest is base:
        return f"{_counted(largest)}: nothing to compare it with."
    if largest.device == "cpu":
        return _on_cpu(largest, base, cores)
    lines = [_figure(p, base) for p in own if p is not base and p is not largest]
    told = f"{_figure(largest, base)}: "
    if _good(largest, base):
        return "\n".join([*lines, told + _go_on(largest, cards)])
    return "\n".join([*lines, told + reason(largest, base, hold)])


def reason(point: Point, base: Point, hold: str = GLOBAL) -> str:
    """Why a point stays behind its number of processes: the largest part of what is lost, if it is half."""
    lost = 1 - efficiency(point, base)
    shares = {
        "link": point.exchange_share - base.exchange_share,
        "ranks": point.waiting_share - base.waiting_share,
        "data": point.data_share - base.data_share,
    }
    cause = max(shares, key=lambda name: shares[name])
    communication = f"communication takes {point.communication_share:.0%} of a step"
    if shares[cause] < EXPLAINS * lost:
        return (
            f"{communication} and rows {point.data_share:.0%}, which does not explain it: the work of one "
            "device is too small to fill it, or what it does once a step weighs too much. Raise "
            "trainer.per_device_train_batch_size, data.max_length or trainer.global_batch_size."
        )
    if cause == "link":
        hopeless = hold == GLOBAL and point.exchange_share > HOPELESS
        more = "will not help" if hopeless else "will help less than these did"
        return (
            f"the link is the limit ({communication}), see `doctor`; more cards {more}. What is sent once a "
            "step weighs less with a larger trainer.global_batch_size."
        )
    if cause == "ranks":
        return (
            f"processes wait for each other {point.waiting_share:.0%} of a step, for rank "
            f"{point.slowest_rank} most: its device is slower (see `doctor`), or its rows are longer "
            "(data.packing=true makes them alike)."
        )
    return (
        f"{point.data_share:.0%} of a step goes by until its rows are there: set "
        "trainer.dataloader_num_workers, and see how many cores there are for each process."
    )


def _good(point: Point, base: Point) -> bool:
    band = usual(point, base)
    return speedup(point, base) >= band[0] if band else efficiency(point, base) >= GOOD


def _figure(point: Point, base: Point) -> str:
    band = usual(point, base)
    told = f"usual: {band[0]}-{band[1]}x" if band else f"{efficiency(point, base):.0%} of what could be"
    return f"{_cards(point)} under {point.strategy} are {speedup(point, base):.2f}x {_cards(base)} ({told})"


def _go_on(point: Point, cards: int) -> str:
    following = 2 * point.num_processes
    if following <= cards:
        return f"go on to {following}"
    if point.num_processes < cards:
        return f"go on to {cards}"
    return f"worth it; these are all the cards here, and {following} need another machine or more of them"


def _on_cpu(point: Point, base: Point, cores: int) -> str:
    shared = f"they share the {cores} core{'s' * (cores > 1)} of this CPU"
    threads = (
        f"{base.threads_per_process} thread{'s' * (base.threads_per_process > 1)} each before, "
        f"{point.threads_per_process} now"
    )
    takes = f"communication takes {point.communication_share:.0%} of a step"
    return (
        f"{_counted(point)} are {speedup(point, base):.2f}x {_counted(base)} on the CPU: {shared} "
        f"({threads}), and {takes}. It says nothing of cards."
    )


def _spread(point: Point) -> float:
    lower, upper = point.step_seconds_spread
    return (upper - lower) / point.step_seconds


def _restless(point: Point) -> str:
    return (
        f"{_counted(point)}: the middle half of the steps is spread over {_spread(point):.0%} of their "
        "median: rows of different lengths, or a machine that does other things. More steps tell more."
    )


def _too_good(point: Point, base: Point) -> bool:
    return efficiency(point, base) > TOO_GOOD


def _beyond(point: Point, base: Point) -> str:
    return (
        f"{_counted(point)}: {speedup(point, base):.2f}x is more than so many processes give by themselves. "
        "Other work on the machine, its threads or its memory made the difference: measure again."
    )


def _counted(point: Point) -> str:
    many = "es" * (point.num_processes > 1)
    return f"{point.num_processes} process{many} under {point.strategy}"


def _cards(point: Point) -> str:
    return "one card" if point.num_processes == 1 else f"{point.num_processes} cards"
