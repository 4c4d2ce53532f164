/** The panel: sections that each show one side of the chosen run. Built once, then brought up to date. */

import { CaptionTable } from "./caption_table.js";
import { ChartView } from "./chart_view.js";
import { charts } from "./chart_data.js";
import { Controls } from "./controls.js";
import { h, isDark, keyed, loadStyles, setText } from "./dom.js";
import { clock } from "./format.js";
import { Gallery } from "./gallery.js";
import { HealthTable } from "./health_table.js";
import { RunPicker } from "./run_picker.js";
import { ShareSheet } from "./share_sheet.js";
import { StatusCard } from "./status_card.js";

/**
 * Put the panel into `host`. `env`: `{settings, confirm, notify, pictureUrl(runId, previewId), reportUrl(runId),
 * captionPictureUrl(dataSetId, key), removeWaiting(promptId) or null, goOn: how to go on with a run, gpus()}`.
 * Returns a function that takes it away again.
 */
export function mountPanel(host, client, env) {
  loadStyles();
  const panel = new Panel(client, env);
  host.replaceChildren(panel.root);
  client.watchers += 1;
  panel.loop();
  return () => {
    client.watchers -= 1;
    panel.destroy();
  };
}

class Panel {
  constructor(client, env) {
    this.client = client;
    this.env = env;
    this.views = new Map();
    this.picker = new RunPicker(client, env);
    this.status = new StatusCard(env);
    this.controls = new Controls(client, env);
    this.gallery = new Gallery(env);
    this.health = new HealthTable();
    this.notice = h("p", { class: "ss-notice", role: "status", "aria-live": "polite", hidden: true });
    this.chartGrid = h("div", { class: "ss-charts" });
    this.log = h("ol", { class: "ss-log", tabindex: "0", "aria-label": "Event log, newest first" });
    this.sharing = new ShareSheet(client);
    this.captions = new CaptionTable(client, env);
    this.sections = {
      charts: section("Charts", this.chartGrid),
      health: section("Gradient health", this.health.root, "ss-half"),
      pictures: section("Preview pictures", this.gallery.root, "ss-half"),
      log: section("What happened", this.log),
      share: this.sharing.root,
    };
    this.run = h("div", { class: "ss-run" }, this.status.root, this.controls.root, ...Object.values(this.sections));
    this.empty = h("p", { class: "ss-empty", text: "Loading…" });
    this.root = h(
      "div",
      { class: "ss-panel", "data-testid": "safe-scaler-panel" },
      this.notice, this.picker.root, this.empty, this.run, this.captions.root,
    ); // prettier-ignore
    this.alive = true;
    this.drawn = {};
  }

  /** Draw at the chosen rate while the panel can be seen. */
  loop() {
    if (!this.alive) return;
    if (!document.hidden && this.root.isConnected) requestAnimationFrame(() => this.alive && this.draw());
    this.timer = setTimeout(() => this.loop(), this.client.intervalMs);
  }

  draw() {
    const started = performance.now();
    const dark = isDark(this.root);
    if (this.root.dataset.theme !== (dark ? "dark" : "light")) this.root.dataset.theme = dark ? "dark" : "light";
    this.#drawNotice();
    this.picker.update();
    const state = this.client.current;
    this.run.hidden = state === null;
    this.empty.hidden = state !== null || this.client.waiting.length > 0;
    if (state === null) setText(this.empty, this.#emptyWords());
    else this.#drawRun(state, dark);
    this.captions.update(state);
    this.lastFrameMs = performance.now() - started;
    this.root.dataset.frameMs = this.lastFrameMs.toFixed(2);
  }

  destroy() {
    this.alive = false;
    clearTimeout(this.timer);
    for (const view of this.views.values()) view.destroy();
    this.gallery.destroy();
    this.root.remove();
  }

  #drawRun(state, dark) {
    this.status.update(state);
    this.controls.update(state);
    // Text follows every event; pictures of numbers are drawn anew only when there are new numbers.
    const key = `${state.run.run_id} ${state.version} ${state.loaded} ${dark}`;
    if (this.drawn.key === key) return;
    this.drawn.key = key;
    this.#drawCharts(state, dark);
    this.health.update(state);
    this.gallery.update(state);
    this.#drawLog(state);
    this.sharing.update(state);
  }

  #drawCharts(state, dark) {
    if (!this.sections.charts.open) {
      this.drawn.key = null;
      return;
    }
    const list = charts(state);
    const create = (chart) => {
      const view = new ChartView(chart.key);
      this.views.set(chart.key, view);
      return view.root;
    };
    keyed(this.chartGrid, list, (chart) => chart.key, create);
    for (const [key, view] of this.views) {
      if (list.some((chart) => chart.key === key)) continue;
      view.destroy();
      this.views.delete(key);
    }
    for (const chart of list) this.views.get(chart.key).draw(chart, dark);
    this.sections.charts.hidden = list.length === 0;
  }

  #drawLog(state) {
    const lines = state.log.slice(-200).reverse();
    keyed(
      this.log,
      lines,
      (line) => `${state.run.run_id}/${line.seq}`,
      (line) =>
        h(
          "li",
          { class: `ss-line ss-${line.tone}` },
          h("span", { class: "ss-line-when", text: line.step > 0 ? `step ${line.step}` : "start", title: clock(line.time) }),
          h("span", { class: "ss-line-text", text: line.text }),
        ),
    );
    this.sections.log.hidden = lines.length === 0;
  }

  #drawNotice() {
    const { client } = this;
    let words = client.problem ? `The server answered: ${client.problem}` : "";
    if (client.down) words = "The server does not answer; perhaps it is being started anew. Trying again…";
    if (client.connected === false) words = "Nothing heard from the server for a while. Trying again…";
    this.notice.hidden = words === "";
    setText(this.notice, words);
  }

  #emptyWords() {
    if (!this.client.runsLoaded) return "Loading…";
    return "No training yet. Queue a graph with a Safe-Scaler Train node, and the run appears here.";
  }
}

/** A part of the panel that can be folded; open at first. */
function section(title, content, kind = "") {
  return h("details", { class: `ss-section ${kind}`, open: true }, h("summary", {}, h("h3", { text: title })), content);
}
