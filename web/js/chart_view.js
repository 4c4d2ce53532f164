/** Draws the charts of `chart_data.js` with uPlot. One instance a chart; new numbers are set, nothing is built anew. */

import uPlot from "./vendor/uPlot-1.6.32.mjs";
import { legendWords, merged } from "./chart_data.js";
import { h, setText } from "./dom.js";
import { tick } from "./format.js";

const COLORS = {
  dark: {
    main: "#6ea8ff", faint: "#41618f", grid: "#ffffff14", text: "#b8bcc4", mark: "#ff8f6b",
    parts: ["#7ed3b2", "#f2b25c", "#d79bf0", "#f08a8a", "#8fd0f2", "#d6d97a", "#b7a08b", "#c0c6d0"],
  },
  light: {
    main: "#1f62c9", faint: "#a9bfe3", grid: "#0000000f", text: "#555a61", mark: "#c2410c",
    parts: ["#0f7a63", "#b3500a", "#8a3fae", "#a61b1b", "#16708f", "#6b6d0f", "#6b4f36", "#4a5160"],
  },
}; // prettier-ignore

export class ChartView {
  /** @param {string} key @param {number} height of the plot in pixels */
  constructor(key, height = 112) {
    this.key = key;
    this.height = height;
    this.plot = null;
    this.shape = "";
    this.width = 0;
    this.marks = [];
    this.title = h("span", { class: "ss-chart-title" });
    this.legend = h("span", { class: "ss-chart-legend" });
    this.place = h("div", { class: "ss-chart-plot" });
    this.root = h("figure", { class: "ss-chart" }, h("figcaption", {}, this.title, this.legend), this.place);
    this.resizing = new ResizeObserver(() => this.#fit());
    this.resizing.observe(this.place);
  }

  /** Draw `chart` (one entry of `charts(state)`). */
  draw(chart, dark) {
    const { x, lines } = merged(chart.groups);
    const shape = JSON.stringify([dark, chart.log, lines.map((line) => [line.label, line.role])]);
    this.marks = chart.marks ?? [];
    this.lines = lines;
    this.limits = chart.limits ?? [];
    setText(this.title, chart.title);
    this.data = [x, ...lines.map((line) => line.y)];
    if (shape !== this.shape) {
      this.plot?.destroy();
      this.plot = null;
      this.shape = shape;
      this.colors = dark ? COLORS.dark : COLORS.light;
      this.#buildLegend(lines);
    }
    if (this.plot) this.plot.setData(this.data);
    else this.#build(chart);
    this.#describe(null);
  }

  destroy() {
    this.resizing.disconnect();
    this.plot?.destroy();
    this.root.remove();
  }

  #build(chart) {
    this.width = Math.floor(this.place.clientWidth);
    if (this.width < 40) return; // not laid out yet; the resize observer calls again
    const axis = { stroke: this.colors.text, grid: { stroke: this.colors.grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const positive = chart.log && this.lines.every((line) => line.y.every((value) => value === null || value > 0));
    const options = {
      width: this.width,
      height: this.height,
      legend: { show: false },
      padding: [8, 12, 0, 0],
      cursor: { y: false, points: { size: 6 } },
      scales: { x: { time: false, range: () => span(this.data[0]) },
        y: positive ? { distr: 3 } : { range: roomy } },
      axes: [
        { ...axis, size: 22, values: (_, list, _a, _s, gap) => list.map((one) => (Number.isInteger(one) ? tick(one, gap) : "")) },
        { ...axis, grid: { ...axis.grid, filter: positive ? decades : (_, list) => list }, size: 56, values: (_, list, _a, _s, gap) => list.map((one) => tick(one, positive ? 0 : gap)) },
      ],
      series: [{}, ...this.lines.map((line) => this.#series(line))],
      hooks: { setCursor: [(plot) => this.#describe(plot.cursor.idx)], draw: [(plot) => this.#mark(plot)] },
    };
    this.plot = new uPlot(options, this.data, this.place);
  }

  #series(line) {
    const few = line.y.length < 40;
    return {
      label: line.label,
      stroke: this.#color(line.role),
      width: line.role === "faint" ? 1 : 1.5,
      spanGaps: true,
      points: { show: few, size: 4 },
    };
  }

  #color(role) {
    if (role?.startsWith("part")) return this.colors.parts[(Number(role.slice(4)) - 1) % this.colors.parts.length];
    return this.colors[role] ?? this.colors.main;
  }

  #buildLegend(lines) {
    this.values = lines.map(() => h("b", {}));
    const entry = (line, index) => {
      const swatch = h("i", { class: "ss-swatch", "aria-hidden": "true", style: { background: this.#color(line.role) } });
      return h("span", { class: "ss-legend-entry" }, swatch, `${line.label} `, this.values[index]);
    };
    this.legend.replaceChildren(...lines.map(entry));
  }

  /** Values under the cursor, else the newest, in the heading; the same words are the chart's label. */
  #describe(index) {
    const shown = legendWords(this.data[0], this.lines, index ?? null);
    shown.forEach((words, place) => setText(this.values[place], words));
    if (index === null || index === undefined) {
      const words = this.lines.map((line, place) => `${line.label} ${shown[place]}`);
      this.place.setAttribute("role", "img");
      this.place.setAttribute("aria-label", `${this.title.textContent}, newest values: ${words.join(", ")}`);
    }
  }

  /** Rejected steps as ticks on the lower edge, limits as dashed lines. */
  #mark(plot) {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.strokeStyle = this.colors.mark;
    ctx.lineWidth = ratio * 1.5;
    ctx.beginPath();
    for (const step of this.marks) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.moveTo(x, bbox.top + bbox.height);
      ctx.lineTo(x, bbox.top + bbox.height - 8 * ratio);
    }
    ctx.stroke();
    ctx.strokeStyle = this.colors.text;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    for (const limit of this.limits) {
      const y = plot.valToPos(limit.value, "y", true);
      if (y < bbox.top || y > bbox.top + bbox.height) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  #fit() {
    const width = Math.floor(this.place.clientWidth);
    if (width < 40 || width === this.width) return;
    this.width = width;
    if (this.plot) this.plot.setSize({ width, height: this.height });
    else if (this.data) this.#build(JSON.parse(this.shape)[1] ? { log: true } : {});
  }
}

/** Grid lines of a logarithmic axis: at powers of ten alone. */
function decades(_, list) {
  return list.map((value) => (Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6 ? value : null));
}

/** The steps that are shown; a single one stands in the middle. */
function span(steps) {
  if (steps.length === 0) return [0, 1];
  const [first, last] = [steps[0], steps[steps.length - 1]];
  return first === last ? [first - 1, last + 1] : [first, last];
}

/** A flat line stands in the middle; else a tenth of room above and below. */
function roomy(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.1 || Math.abs(high) * 0.5 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}
