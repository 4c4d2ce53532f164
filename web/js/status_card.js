/** Where the run stands: state, progress, the newest figures, the GPUs. */

import { attribute, h, keyed, setText } from "./dom.js";
import { bareName, bytes, duration, memory, number } from "./format.js";
import { canGoOn, phaseWords, stateWord, withoutPaths } from "./sentences.js";

export class StatusCard {
  constructor(env) {
    this.env = env;
    this.badge = h("span", { class: "ss-badge", role: "status", "aria-live": "polite" });
    this.name = h("h2", { class: "ss-title" });
    this.fill = h("div", { class: "ss-progress-fill" });
    this.progress = h(
      "div",
      { class: "ss-progress", role: "progressbar", "aria-label": "Training progress", "aria-valuemin": "0" },
      this.fill,
    );
    this.where = h("p", { class: "ss-where", "data-testid": "safe-scaler-progress" });
    this.message = h("p", { class: "ss-message" });
    this.figures = h("dl", { class: "ss-figures" });
    this.gpus = h("div", { class: "ss-gpus" });
    this.root = h(
      "section",
      { class: "ss-card", "aria-label": "Run" },
      h("header", {}, this.name, this.badge),
      this.progress, this.where, this.message, this.figures, this.gpus,
    ); // prettier-ignore
  }

  update(state) {
    const { run } = state;
    setText(this.name, run.name || run.run_id);
    attribute(this.name, "title", `Run ${run.run_id}`);
    setText(this.badge, state.loaded ? stateWord(run.state, state.paused) : "Loading");
    this.badge.className = `ss-badge ss-badge-${state.paused ? "paused" : run.state}`;
    this.#progress(state);
    const words = run.problem || (run.state === "running" ? "" : messageOf(run, this.env.goOn));
    this.message.hidden = words === "";
    setText(this.message, words);
    this.#figures(state);
    this.#gpus();
  }

  #progress({ run, phase, last, loaded }) {
    const total = run.total_steps || 0;
    const share = total > 0 ? Math.min(1, run.step / total) : 0;
    this.fill.style.width = `${(share * 100).toFixed(2)}%`;
    attribute(this.progress, "aria-valuemax", total || 1);
    attribute(this.progress, "aria-valuenow", run.step);
    setText(this.where, loaded ? whereWords({ run, phase, last }) : "Loading…");
  }

  #figures(state) {
    const { run, last, curves } = state;
    const value = (name) => last?.[name] ?? curves.last(name);
    const rates = curves.rates.map((part) => curves.last(`lr:${part}`)).filter((rate) => rate !== null);
    const unit = this.env.settings.unit();
    const rejected = run.rejected ?? 0;
    const rows = [
      ["Loss, average", number(value("loss_avg") ?? run.loss_avg)],
      ["Validation", number(state.validation.at(-1)?.mean)],
      ["Gradient norm", number(value("grad_norm"))],
      ["Learning rate", rates.length ? number(Math.max(...rates)) : "–"],
      ["Loss scale", number(value("loss_scale"), 6)],
      ["Rejected steps", String(rejected), rejected > 0 ? "warn" : ""],
      ["Step time", duration1(value("seconds"))],
      [run.device && run.device !== "cpu" ? "GPU memory" : "Memory", inUse(value("vram_gib"), state.memory, unit)],
    ];
    keyed(
      this.figures,
      rows,
      ([label]) => label,
      ([label, text, tone]) => figure(label, text, tone),
      (element, [, text, tone]) => {
        setText(element.children[1], text);
        element.className = tone ? `ss-figure ss-${tone}` : "ss-figure";
      },
    );
  }

  #gpus() {
    const list = this.env.gpus();
    this.gpus.hidden = list.length === 0;
    keyed(this.gpus, list, (gpu) => gpu.name, gpuBar, fillBar);
  }
}

function figure(label, text, tone) {
  return h(
    "div",
    { class: tone ? `ss-figure ss-${tone}` : "ss-figure" },
    h("dt", { text: label }),
    h("dd", { text }),
  );
}

function gpuBar(gpu) {
  const bar = h("div", { class: "ss-meter", role: "meter", "aria-valuemin": "0" }, h("div", { class: "ss-meter-fill" }));
  const element = h("div", { class: "ss-gpu" }, h("span", { class: "ss-gpu-name" }), bar, h("span", { class: "ss-gpu-words" }));
  fillBar(element, gpu);
  return element;
}

function fillBar(element, gpu) {
  const [name, bar, words] = element.children;
  const used = gpu.total - gpu.free;
  setText(name, gpu.name);
  bar.firstChild.style.width = `${((100 * used) / gpu.total).toFixed(1)}%`;
  bar.className = used / gpu.total > 0.92 ? "ss-meter ss-meter-full" : "ss-meter";
  attribute(bar, "aria-label", `Memory of ${gpu.name}`);
  attribute(bar, "aria-valuemax", gpu.total);
  attribute(bar, "aria-valuenow", used);
  setText(words, `${bytes(used, true)} of ${bytes(gpu.total, true)}`);
}

/** "Making preview pictures 1 of 2 · Step 120 of 400 · 30 % · 12 min left": what a run is at. */
export function whereWords({ run, phase, last }) {
  const total = run.total_steps || 0;
  const parts = [];
  if (total > 0) parts.push(`Step ${run.step} of ${total}`, `${Math.floor(100 * Math.min(1, run.step / total))} %`);
  if (run.state === "running") {
    if (phase && phase.phase !== "training") parts.unshift(phaseWords(phase));
    if (last?.eta_seconds) parts.push(`${duration(last.eta_seconds)} left`);
    if (parts.length === 0) parts.push("Starting"); // its process loads libraries and has said nothing yet
  } else if (run.seconds) parts.push(duration(run.seconds));
  return parts.join(" · ");
}

/** What came of a run. `goOn`: how one goes on here with a run that can be. */
export function messageOf(run, goOn) {
  const result = run.lora ? `LoRA: ${bareName(run.lora)}` : "";
  if (run.state === "finished") return result;
  const told = run.state === "interrupted" ? "The run ended without a last word." : withoutPaths(run.message ?? "");
  return [told, canGoOn(run) ? goOn : "", result].filter(Boolean).join(" ");
}

function inUse(gib, state, unit) {
  const total = state?.capacity ? ` / ${memory(state.capacity / 1024 ** 3, unit)}` : "";
  return `${memory(gib, unit)}${total}`;
}

function duration1(seconds) {
  if (typeof seconds !== "number") return "–";
  return seconds < 10 ? `${number(seconds)} s` : duration(seconds);
}
