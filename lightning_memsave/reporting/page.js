"use strict";
// Draws the figures that the page carries, in the page's colours; hides runs; sorts the table.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const boxes = [...document.querySelectorAll("input[data-run]")];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const isShown = (run) => boxes[run].checked;

  // A trace of several runs keeps only the points of those that are shown.
  function shown(trace) {
    const runs = trace.meta.runs;
    if (!runs) return isShown(trace.meta.run) ? trace : null;
    const picked = {...trace};
    for (const key of ["x", "y", "text", "customdata"]) {
      if (trace[key]) picked[key] = trace[key].filter((_, point) => isShown(runs[point]));
    }
    return picked;
  }

  function draw() {
    const axis = {gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line")};
    for (const [name, figure] of Object.entries(figures)) {
      const {layout} = figure;
      Plotly.react(name, figure.data.map(shown).filter(Boolean), {
        ...layout,
        font: {color: colour("--ink"), family: "system-ui, sans-serif", size: 13},
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        hoverlabel: {align: "left", bgcolor: colour("--row"), font: {color: colour("--ink")}},
        xaxis: {...layout.xaxis, ...axis},
        yaxis: {...layout.yaxis, ...axis},
      }, {responsive: true, displaylogo: false, displayModeBar: false});
    }
  }

  for (const box of boxes) {
    box.addEventListener("change", () => {
      const parts = document.querySelectorAll(`:not(input)[data-run="${box.dataset.run}"]`);
      for (const part of parts) part.hidden = !box.checked;
      draw();
    });
  }

  // Figures by size, words by name; what was not measured comes last either way.
  function compare(first, second, sign) {
    if (first === "" || second === "") return (first === "") - (second === "");
    const difference = Number(first) - Number(second);
    return sign * (Number.isNaN(difference) ? first.localeCompare(second) : difference);
  }

  const table = document.getElementById("figures-table");
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.firstChild.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => compare(value(one), value(other), descending ? -1 : 1));
      table.tBodies[0].append(...rows);
    });
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
