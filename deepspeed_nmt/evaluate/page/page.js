"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const read = (id) => JSON.parse($(id).textContent);
  const figures = read("figures-data");
  const marks = read("marks-data");
  const positions = read("positions-data");
  const COLOURS = ["#4269d0", "#d99a0b", "#e0593f", "#3ba99c", "#3ca951", "#d96fa5", "#8a63d2", "#7fa8e8", "#9c6b4e", "#8a919c"];
  const MARKS = {
    skip: { words: "skipped update", colour: "#d99a0b", symbol: "triangle-down", sign: "▼" },
    spike: { words: "spike", colour: "#8a63d2", symbol: "triangle-up", sign: "▲" },
    rollback: { words: "rollback", colour: "#e0593f", symbol: "x", sign: "✕", line: "dash" },
    collapse: { words: "warning of collapse", colour: "#d0312d", symbol: "diamond", sign: "◆", line: "solid" },
    failure: { words: "failure", colour: "#d0312d", symbol: "square", sign: "■", line: "dot" },
    resume: { words: "restart", colour: "#8a919c", symbol: "circle", sign: "●", line: "dot" },
    best: { words: "best validation", colour: "#3ca951", symbol: "star", sign: "★" },
  };
  const AXES = { updates: "updates", hours: "hours in updates", tokens: "target tokens" };
  const MOST_LINES = 40;
  let axis = "updates";
  let marked = true;

  // Place of an update on an axis. Between two places that are known, both grow evenly.
  const place = (update) => {
    if (axis === "updates") return update;
    const at = positions[axis + "_at"];
    const values = positions[axis];
    let low = 0;
    let high = at.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] < update) low = middle + 1;
      else high = middle;
    }
    if (low === 0) return values[0];
    const share = Math.min(1, (update - at[low - 1]) / (at[low] - at[low - 1]));
    return values[low - 1] + share * (values[low] - values[low - 1]);
  };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const layoutOf = (figure) => {
    const ink = colour("--soft");
    const lines = { gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
    const given = figure.layout;
    const title = (own, fallback) => ({ text: (own && own.title && own.title.text) || fallback, font: { size: 12 } });
    const layout = {
      height: 250,
      hovermode: figure.data[0].type === "heatmap" ? "closest" : "x unified",
      ...given,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      colorway: COLOURS,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { size: 11 } },
      margin: { l: 52, r: 12, t: given.showlegend ? 30 : 8, b: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--faint"), activecolor: colour("--accent") },
      xaxis: { ...lines, ...given.xaxis, title: title(given.xaxis, figure.timeline ? AXES[axis] : "") },
      yaxis: { ...lines, ...given.yaxis, title: title(given.yaxis, "") },
      shapes: [...(given.shapes || [])],
    };
    if (figure.timeline) layout.xaxis.rangemode = "tozero";
    return layout;
  };

  // Marks lie on an axis of their own along the bottom, or on the curve of their tag; kinds with a line also cross the
  // figure.
  const addMarks = (figure, data, layout) => {
    if (!marked || !figure.timeline || !marks.length || figure.data[0].type === "heatmap") return;
    layout.yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
    for (const [level, { kind, updates, texts, tag, values }] of marks.entries()) {
      const look = MARKS[kind];
      const x = updates.map(place);
      const height = 0.035 + 0.055 * level; // so that two events of one update are both seen
      const where = figure.data.some((trace) => tag && trace.meta === tag)
        ? { y: values, yaxis: "y" }
        : { y: x.map(() => height), yaxis: "y2" };
      data.push({
        type: "scatter", mode: "markers", name: look.words, showlegend: false, x, ...where,
        marker: { symbol: look.symbol, color: look.colour, size: 8, line: { width: 1, color: colour("--card") } },
        text: texts, hovertemplate: "%{text}<extra></extra>", hoverlabel: { align: "left" }, cliponaxis: false,
      });
      if (!look.line) continue;
      for (const at of x.slice(-MOST_LINES)) {
        layout.shapes.push({
          type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, layer: "below", opacity: 0.8,
          line: { color: look.colour, width: 1.2, dash: look.line },
        });
      }
    }
  };

  const draw = (figure) => {
    const element = document.querySelector(`[data-figure="${CSS.escape(figure.id)}"]`);
    const data = figure.data.map((trace) => (figure.timeline ? { ...trace, x: trace.x.map(place) } : trace));
    const layout = layoutOf(figure);
    addMarks(figure, data, layout);
    const config = {
      responsive: true,
      displaylogo: false,
      displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false, // it would cover figures on a phone
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    };
    return Plotly.react(element, data, layout, config);
  };

  const pause = () => new Promise((resolve) => setTimeout(resolve, 0));
  let drawing = Promise.resolve();
  const drawAll = () => {
    drawing = drawing.then(async () => {
      document.documentElement.dataset.drawn = "no";
      for (const figure of figures) {
        await draw(figure);
        await pause();
      }
      document.documentElement.dataset.drawn = "yes";
    });
    return drawing;
  };

  // The library is kept compressed. It runs as a script of this page, which the policy permits by its hash.
  const loadDrawer = async () => {
    const packed = Uint8Array.from(atob($("drawer-data").textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    if (typeof Plotly === "undefined") throw new Error("plotly.js did not run");
  };

  const showTools = () => {
    const tools = document.querySelector("#curves .tools");
    if (!tools) return;
    tools.hidden = false;
    for (const input of document.querySelectorAll('input[name="axis"]')) {
      const known = input.value === "updates" || input.value in positions;
      input.disabled = !known;
      input.parentElement.hidden = !known;
      input.addEventListener("change", () => {
        axis = input.value;
        drawAll();
      });
    }
    $("marks").parentElement.hidden = !marks.length;
    $("marks").addEventListener("change", () => {
      marked = $("marks").checked;
      $("legend").hidden = !marked;
      drawAll();
    });
    for (const { kind } of marks) {
      const item = document.createElement("li");
      item.textContent = MARKS[kind].words;
      item.dataset.sign = MARKS[kind].sign;
      item.style.setProperty("--mark", MARKS[kind].colour);
      $("legend").append(item);
    }
  };

  const make = (tag, text, attributes) => Object.assign(document.createElement(tag), { textContent: text }, attributes);

  const wordsOf = (text) => text.split(/(\s+)/);

  // A cell with a translation, in which the words that the reference does not have are underlined.
  const translation = (text, reference) => {
    const cell = make("td", "", { dir: "auto" });
    const known = new Set(wordsOf(reference));
    for (const word of wordsOf(text)) {
      if (!word.trim() || known.has(word)) cell.append(word);
      else cell.append(make("span", word, { className: "miss" }));
    }
    return cell;
  };

  const tableOf = (head, rows) => {
    const table = make("table", "", { className: "texts" });
    const titles = table.createTHead().insertRow();
    for (const title of head) titles.append(make("th", title, { scope: "col" }));
    table.createTBody().append(...rows);
    const scroll = make("div", "", { className: "scroll" });
    scroll.append(table);
    return scroll;
  };

  const rowOf = (...cells) => {
    const row = document.createElement("tr");
    row.append(...cells);
    return row;
  };

  const number = (value) => value.toLocaleString("en");

  const showSamples = () => {
    const sets = read("samples-data").filter((set) => set.sentences.length);
    if (!sets.length) return;
    $("samples").hidden = false;
    const [choice, view, chosen] = [$("sample-set"), $("sample-view"), $("sample-choice")];
    sets.forEach((set, index) => choice.append(make("option", set.set, { value: index })));
    choice.parentElement.hidden = sets.length < 2;

    const ofSentence = (set, sentence) => {
      const pair = make("dl", "", { className: "pair" });
      for (const [name, text] of [["source", sentence.source], ["reference", sentence.reference]]) {
        const line = document.createElement("div");
        line.append(make("dt", name), make("dd", text, { dir: "auto" }));
        if (text) pair.append(line);
      }
      const rows = set.updates.map((update, index) =>
        rowOf(
          make("th", number(update), { scope: "row" }),
          make("td", sentence.chrf[index].toFixed(1), { className: "number" }),
          translation(sentence.translations[index], sentence.reference),
        ),
      );
      return [pair, tableOf(["update", "chrF", "translation"], rows)];
    };

    const ofUpdate = (set, index) => {
      const rows = set.sentences.map((sentence) =>
        rowOf(
          make("th", number(sentence.number), { scope: "row" }),
          make("td", sentence.chrf[index].toFixed(1), { className: "number" }),
          make("td", sentence.source, { dir: "auto" }),
          make("td", sentence.reference, { dir: "auto" }),
          translation(sentence.translations[index], sentence.reference),
        ),
      );
      return [tableOf(["line", "chrF", "source", "reference", "translation"], rows)];
    };

    const show = () => {
      const set = sets[choice.value];
      const parts = view.value === "sentence" ? ofSentence(set, set.sentences[chosen.value]) : ofUpdate(set, +chosen.value);
      $("sample-table").replaceChildren(...parts);
      $("sample-back").disabled = chosen.selectedIndex <= 0;
      $("sample-on").disabled = chosen.selectedIndex >= chosen.options.length - 1;
    };
    const refill = () => {
      const set = sets[choice.value];
      const bySentence = view.value === "sentence";
      const labels = bySentence
        ? set.sentences.map((each) => `${number(each.number)}: ${(each.source || each.reference).slice(0, 60)}`)
        : set.updates.map(number);
      $("sample-what").textContent = bySentence ? "sentence" : "update";
      chosen.replaceChildren(...labels.map((label, index) => make("option", label, { value: index })));
      chosen.selectedIndex = bySentence ? 0 : labels.length - 1;
      show();
    };
    const move = (step) => {
      chosen.selectedIndex += step;
      show();
    };
    choice.addEventListener("change", refill);
    view.addEventListener("change", refill);
    chosen.addEventListener("change", show);
    $("sample-back").addEventListener("click", () => move(-1));
    $("sample-on").addEventListener("click", () => move(1));
    refill();
  };

  showTools();
  showSamples();
  loadDrawer().then(drawAll).then(
    () => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll),
    (error) => {
      console.error(error);
      document.documentElement.dataset.drawn = "failed";
      for (const plot of document.querySelectorAll(".plot:empty")) {
        plot.append(make("p", "This figure could not be drawn; open the page in a current browser.", { className: "failed-figure" }));
      }
    },
  );
})();
