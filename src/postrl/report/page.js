"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("data").textContent);
  const narrow = () => window.matchMedia("(max-width: 40rem)").matches;
  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function layout(own) {
    const axis = { gridcolor: shade("--line"), zerolinecolor: shade("--line"), linecolor: shade("--line"), automargin: true };
    const ticks = own.ticks ? { type: "log", tickmode: "array", tickvals: own.ticks, ticktext: own.ticks.map(String) } : {};
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: shade("--ink"), size: 12 },
      margin: { l: 8, r: 8, t: 8, b: 8 },
      xaxis: { ...axis, title: { text: own.x || "" }, ...(own.log_x ? { type: "log", nticks: 5 } : {}), ...ticks },
      yaxis: { ...axis, ...(own.log_y ? { type: "log", nticks: 5 } : {}), ...(own.y_from_zero ? { rangemode: "tozero" } : {}) },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      hovermode: "closest",
    };
  }

  const options = () => ({ displaylogo: false, responsive: true, displayModeBar: false, staticPlot: narrow() });
  const draw = (method) => figures.forEach((f) => method(f.key, f.traces, layout(f.layout), options()));
  draw(Plotly.newPlot);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(Plotly.react));

  // Tokens: what is coloured, and the numbers of the one that is pointed at.
  const numbers = (token) => {
    const [logp, advantage, weight, ratio] = token.dataset.n.split(" ").map(Number);
    return { logp, advantage, weight, ratio };
  };
  const read = {
    credit: (n) => n.advantage * n.weight,
    advantage: (n) => n.advantage,
    weight: (n) => n.weight,
    ratio: (n) => Math.log(n.ratio),
    surprise: (n) => n.logp,
  };
  const says = {
    credit: ["less likely", "more likely"], advantage: ["worse", "better"], weight: ["negative", "larger"],
    ratio: ["became less likely", "became more likely"], surprise: ["surprising", ""],
  };

  function colour(mode) {
    const tokens = [...document.querySelectorAll(".t")];
    const values = tokens.map((token) => read[mode](numbers(token))).map((v) => (Number.isFinite(v) ? v : 0));
    const largest = values.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || 1;
    tokens.forEach((token, i) => {
      token.style.setProperty("--s", Math.abs(values[i] / largest).toFixed(3));
      token.toggleAttribute("data-low", values[i] < 0);
    });
    document.querySelector(".key .low").textContent = says[mode][0];
    document.querySelector(".key .high").textContent = says[mode][1];
  }
  document.querySelectorAll("input[name=mode]").forEach((input) => input.addEventListener("change", () => colour(input.value)));

  const readout = document.getElementById("readout");
  let here = null;
  function point(token) {
    if (here) here.classList.remove("here");
    here = token;
    readout.hidden = !token;
    if (!token) return;
    token.classList.add("here");
    const n = numbers(token);
    readout.textContent = `${JSON.stringify(token.textContent)}  log π_old ${n.logp} (π ${Math.exp(n.logp).toPrecision(3)})` +
      `  A ${n.advantage}  W ${n.weight}  π/π_old ${n.ratio}`;
  }
  document.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".t");
    if (token) point(token);
  });
  document.querySelectorAll(".tokens").forEach((text) => {
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const tokens = [...text.querySelectorAll(".t")];
      const next = tokens[text.contains(here) ? tokens.indexOf(here) + step : step > 0 ? 0 : tokens.length - 1];
      if (next) { point(next); event.preventDefault(); }
    });
    text.addEventListener("blur", () => point(null));
  });
})();
