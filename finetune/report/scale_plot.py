"""The points of `finetune scale` as a picture: speed-up beside the ideal, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.report.scale_text import name_of


def draw_scale(record: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = record["points"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws into the file alone: no window, whatever the user's settings say
    speed, shares = figure.subplots(1, 2)
    for requested in dict.fromkeys(point["requested"] for point in points):
        own = [point for point in points if point["requested"] == requested]
        counts = [point["num_processes"] for point in own]
        (line,) = speed.plot(counts, [point["speedup"] for point in own], marker="o", label=requested)
        ideal = [point["speedup"] / point["efficiency"] for point in own]
        speed.plot(counts, ideal, linestyle="--", color=line.get_color(), alpha=0.4)
        for point in own:
            at = (point["num_processes"], point["speedup"])
            speed.annotate(f"{point['speedup']:.2f}x", at, (4, -12), textcoords="offset points")
    for point in points:
        if point["usual_speedup"] is not None:
            speed.vlines(point["num_processes"], *point["usual_speedup"], linewidth=8, alpha=0.2)
    counts = sorted({point["num_processes"] for point in points})
    speed.set(
        xlabel="processes", ylabel="speed-up in tokens/s (dashed: ideal)", xlim=(0, counts[-1] * 1.15), ylim=0
    )
    speed.set_xticks(counts)
    speed.set_title(f"--hold {record['hold']}")
    speed.legend()
    names = [name_of(point) for point in points]
    communication = [100 * point["communication_share"] for point in points]
    rows = [100 * point["data_share"] for point in points]
    shares.bar(names, communication, label="exchange and waiting for it")
    shares.bar(names, rows, bottom=communication, label="rows")
    shares.set(ylabel="% of a step", ylim=(0, 100))
    shares.tick_params(axis="x", rotation=30 if len(names) > 4 else 0)
    shares.legend()
    figure.savefig(path, dpi=110)
