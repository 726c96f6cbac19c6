"use strict";
// Gives Plotly's figures the colors of the page, in light and in dark.
const STATES = {COMPLETE: "--series-0", PRUNED: "--series-1", FAIL: "--bad", RUNNING: "--series-4", WAITING: "--quiet"};

function dressFigures() {
  const style = getComputedStyle(document.body);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = {gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--quiet")};
  const scale = [[0, color("--scale-low")], [1, color("--scale-high")]];
  for (const figure of document.querySelectorAll(".js-plotly-plot")) {
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": color("--text"),
      "legend.bgcolor": "rgba(0,0,0,0)", colorway: [0, 1, 2, 3, 4, 5, 6, 7].map((index) => color(`--series-${index}`)),
    };
    for (const name of Object.keys(figure._fullLayout).filter((each) => /^[xy]axis\d*$/.test(each))) {
      for (const [key, value] of Object.entries(axis)) layout[`${name}.${key}`] = value;
    }
    if (figure.layout.annotations?.some((each) => each.font?.color)) {
      continue;  // Optuna colors each line of its parallel coordinates for a white ground
    }
    figure.data.forEach((trace, index) => {
      if (trace.marker?.colorscale) Plotly.restyle(figure, {"marker.colorscale": [scale], "marker.line.width": 0}, [index]);
      else if (trace.type === "bar" && STATES[trace.name]) {
        Plotly.restyle(figure, {"marker.color": color(STATES[trace.name])}, [index]);
      }
    });
    Plotly.relayout(figure, layout);
  }
}
dressFigures();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dressFigures);
