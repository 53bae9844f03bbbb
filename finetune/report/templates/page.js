"use strict";
// Draws the charts with plotly.js: over the axis that is chosen, in the colours of the page.
(() => {
  const drawn = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 700px)");

  function axis(over) {
    if (over !== "seconds") return { title: drawn.axes[over] || over, divide: 1 };
    const ends = drawn.charts.flatMap((chart) => chart.curves.map((curve) => curve.points.seconds.at(-1)));
    const longest = Math.max(...ends);
    if (longest > 7200) return { title: "training time in hours", divide: 3600 };
    if (longest > 120) return { title: "training time in minutes", divide: 60 };
    return { title: "training time in seconds", divide: 1 };
  }

  function trace(curve, over, divide, colour) {
    const x = curve.points[over];
    return {
      type: "scatter", name: curve.name, y: curve.points.values,
      x: divide === 1 ? x : x.map((value) => value / divide),
      mode: curve.dotted ? "lines+markers" : "lines",
      line: { color: colour("--curve-" + curve.colour), width: 1.8, dash: curve.dashed ? "dot" : "solid" },
      marker: { size: 5 },
      hovertemplate: "%{y}<extra>%{fullData.name}</extra>",
    };
  }

  function draw() {
    const styles = getComputedStyle(document.documentElement);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const chosen = document.querySelector("input[name=over]:checked");
    const over = chosen ? chosen.value : "steps";
    const { title, divide } = axis(over);
    for (const chart of drawn.charts) {
      const node = document.getElementById("chart-" + chart.name);
      // a legend has a row for each curve where the screen is narrow, and the curves keep their height
      const below = chart.curves.length < 2 ? 0 : narrow.matches ? 20 * chart.curves.length : 28;
      node.style.height = narrow.matches ? 270 + below + "px" : "";
      const line = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
      const layout = {
        title: { text: chart.title + (chart.unit ? " <span style='font-size:.75em'>" + chart.unit + "</span>" : ""),
                 font: { size: 15 }, x: 0.01, xanchor: "left" },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
        margin: { l: 56, r: 12, t: 40, b: 44 + below },
        xaxis: { ...line, title: { text: title, standoff: 6 }, fixedrange: narrow.matches },
        yaxis: { ...line, exponentformat: "power", fixedrange: narrow.matches, automargin: true },
        hovermode: "x", hoverlabel: { namelength: -1 },
        showlegend: chart.curves.length > 1,
        legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
      };
      const traces = chart.curves.map((curve) => trace(curve, over, divide, colour));
      Plotly.react(node, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
    }
  }

  for (const input of document.querySelectorAll("input[name=over]")) input.addEventListener("change", draw);
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();
})();
