/** The live picture in the Gradient Health Monitor node: norms, loss, verdicts and the few figures that matter. */

import { ChartView } from "./chart_view.js";
import { charts } from "./chart_data.js";
import { h, isDark, loadStyles, setText } from "./dom.js";
import { memory, number } from "./format.js";
import { stateWord, tone, verdictWord } from "./sentences.js";

const SHOWN = ["norms", "loss"];
const HEIGHT = 312;

export function addMonitorWidget(node, client, environment) {
  loadStyles();
  const monitor = new Monitor(node, client, environment);
  const widget = node.addDOMWidget("live", "safe_scaler_monitor", monitor.root, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => 420,
    getValue: () => "",
    setValue() {},
  });
  widget.serialize = false;
  if (node.size && node.size[0] < 340) node.setSize?.([340, Math.max(node.size[1], HEIGHT + 150)]);
  const removed = node.onRemoved;
  node.onRemoved = function onRemoved(...rest) {
    monitor.destroy();
    return removed?.apply(this, rest);
  };
}

class Monitor {
  constructor(node, client, environment) {
    this.node = node;
    this.client = client;
    this.environment = environment;
    this.badge = h("span", { class: "ss-badge" });
    this.where = h("span", { class: "ss-monitor-where" });
    this.figures = h("p", { class: "ss-monitor-figures" });
    this.verdict = h("p", { class: "ss-monitor-verdict", "aria-live": "polite" });
    this.plots = h("div", { class: "ss-monitor-plots" });
    this.views = new Map(SHOWN.map((key) => [key, new ChartView(key, 68)]));
    this.root = h(
      "div",
      { class: "ss-panel ss-monitor", "data-testid": "safe-scaler-monitor" },
      h("header", {}, this.badge, this.where), this.plots, this.figures, this.verdict,
    ); // prettier-ignore
    client.watchers += 1;
    this.alive = true;
    this.visible = true;
    this.seen = new IntersectionObserver((entries) => {
      this.visible = entries.some((entry) => entry.isIntersecting);
    });
    this.seen.observe(this.root);
    this.loop();
  }

  loop() {
    if (!this.alive) return;
    if (this.visible && !document.hidden && this.root.isConnected) requestAnimationFrame(() => this.alive && this.draw());
    this.timer = setTimeout(() => this.loop(), this.client.intervalMs);
  }

  draw() {
    const dark = isDark(this.root);
    this.root.dataset.theme = dark ? "dark" : "light";
    const state = this.client.runOfNode(this.node.id);
    const key = state === null ? "none" : `${state.run.run_id} ${state.version} ${state.paused} ${state.run.state} ${dark}`;
    if (key === this.drawn) return;
    this.drawn = key;
    if (state === null) {
      setText(this.badge, "Waiting");
      this.badge.className = "ss-badge";
      setText(this.where, "Shows the run of this graph once it begins");
      this.#plots([], dark);
      for (const element of [this.figures, this.verdict]) setText(element, "");
      return;
    }
    setText(this.badge, stateWord(state.run.state, state.paused));
    this.badge.className = `ss-badge ss-badge-${state.paused ? "paused" : state.run.state}`;
    setText(this.where, `step ${state.run.step}${state.run.total_steps ? ` of ${state.run.total_steps}` : ""}`);
    this.#plots(charts(state), dark);
    this.#figures(state);
    this.#verdict(state);
  }

  destroy() {
    this.alive = false;
    this.client.watchers -= 1;
    clearTimeout(this.timer);
    this.seen.disconnect();
    for (const view of this.views.values()) view.destroy();
  }

  /** What the run before this one drew goes, also while this one has no numbers yet. */
  #plots(list, dark) {
    for (const [key, view] of this.views) {
      if (!list.some((chart) => chart.key === key)) view.root.remove();
    }
    for (const chart of list.filter((one) => this.views.has(one.key))) {
      const view = this.views.get(chart.key);
      if (!view.root.isConnected) this.plots.append(view.root);
      view.draw(chart, dark);
    }
  }

  #figures({ curves, run }) {
    const unit = this.environment()?.settings.unit() ?? "GiB";
    const parts = [
      `loss scale ${number(curves.last("loss_scale"), 6)}`,
      `rejected ${run.rejected ?? 0}`,
      `memory ${memory(curves.last("vram_gib"), unit)}`,
    ];
    setText(this.figures, parts.join(" · "));
  }

  /** The newest verdict; without one, what is known for certain. */
  #verdict(state) {
    const newest = [...state.verdicts.values()].filter((one) => one.severity !== "info").at(-1);
    const rejected = state.log.filter((line) => line.tone === "warn" || line.tone === "bad").at(-1);
    let kind = "good";
    let words = state.run.step > 0 ? "✓ Every step had finite gradients." : "";
    if (newest) {
      kind = tone(newest.severity === "info" ? newest.kind : newest.severity);
      words = `${verdictWord(newest.kind)}: ${newest.sentence || newest.where} (step ${newest.step})`;
    } else if (rejected) {
      kind = rejected.tone;
      words = `${rejected.text} (step ${rejected.step})`;
    }
    this.verdict.className = `ss-monitor-verdict ss-${kind}`;
    setText(this.verdict, words);
  }
}
