/** The list of runs: state, name, progress; choosing one, and deleting one that is over. */

import { attribute, h, keyed, setText } from "./dom.js";
import { bytes, clock, duration, plural } from "./format.js";
import { stateWord } from "./sentences.js";

const SIGNS = { running: "▶", finished: "✓", stopped: "■", failed: "✕", interrupted: "!" };

export class RunPicker {
  constructor(client, env) {
    this.client = client;
    this.env = env;
    this.count = h("h3", { text: "Runs" });
    this.list = h("ul", { class: "ss-runs", "aria-label": "Runs, newest first" });
    this.queue = h("ul", { class: "ss-runs ss-waiting", "aria-label": "Runs that wait", "data-testid": "safe-scaler-waiting" });
    this.details = h("details", { class: "ss-section ss-picker" }, h("summary", {}, this.count), this.list);
    this.root = h("div", {}, this.details, this.queue);
    this.opened = false;
  }

  update() {
    const { runs, selected } = this.client;
    this.#drawQueue();
    this.details.hidden = runs.length === 0;
    setText(this.count, runs.length === 1 ? "1 run" : plural(runs.length, "run"));
    keyed(
      this.list,
      runs,
      (run) => run.run_id,
      (run) => this.#entry(run),
    );
    runs.forEach((run, index) => this.#refresh(this.list.children[index], run, selected));
  }

  /** What ComfyUI's queue holds, in its order. */
  #drawQueue() {
    const { waiting } = this.client;
    this.queue.hidden = waiting.length === 0;
    const key = (one) => `${one.prompt_id}/${one.node_id}/${one.position > 0}`; // its turn takes the button away
    keyed(this.queue, waiting, key, (one) => this.#waiting(one));
    for (const one of waiting) setText(this.queue.children[waiting.indexOf(one)].querySelector(".ss-run-facts"), waitingWords(one, this.client));
  }

  #waiting(one) {
    const words = h(
      "div",
      { class: "ss-run-choice" },
      h("span", { class: "ss-run-sign", "aria-hidden": "true", text: "…" }),
      h("span", { class: "ss-run-name", text: one.name || "A run without a name" }),
      h("span", { class: "ss-run-facts" }),
    );
    if (this.env.removeWaiting === null || one.position === 0) return h("li", {}, words);
    const remove = h("button", {
      class: "ss-button ss-small", type: "button", text: "Take off",
      "aria-label": `Take ${one.name} off the queue`, on: { click: () => this.#takeOff(one) },
    }); // prettier-ignore
    return h("li", {}, words, remove);
  }

  async #takeOff(one) {
    try {
      await this.env.removeWaiting(one.prompt_id);
    } catch (error) {
      this.env.notify("error", "The run was not taken off the queue", error.message);
    }
    await this.client.refreshRuns();
  }

  #entry(run) {
    const choose = h(
      "button",
      { class: "ss-run-choice", type: "button", on: { click: () => this.client.select(run.run_id) } },
      h("span", { class: "ss-run-sign", "aria-hidden": "true" }),
      h("span", { class: "ss-run-name" }),
      h("span", { class: "ss-run-facts" }),
    );
    const remove = h("button", {
      class: "ss-button ss-small ss-run-delete", type: "button", text: "Delete…",
      "aria-label": `Delete run ${run.run_id}`, on: { click: () => this.#remove(run) },
    }); // prettier-ignore
    return h("li", {}, choose, remove);
  }

  #refresh(element, run, selected) {
    const [choose, remove] = element.children;
    const [sign, name, facts] = choose.children;
    const known = this.client.states.get(run.run_id);
    const state = known?.loaded ? known.run.state : run.state;
    const step = Math.max(run.step, known?.run.step ?? 0);
    element.className = `ss-state-${state}`;
    attribute(choose, "aria-current", run.run_id === selected ? "true" : null);
    setText(sign, SIGNS[state] ?? "?");
    setText(name, run.name || run.run_id);
    const progress = run.total_steps ? `${step} of ${run.total_steps} steps` : plural(step, "step");
    const left = state === "running" && known?.last?.eta_seconds ? ` · ${duration(known.last.eta_seconds)} left` : "";
    setText(facts, `${stateWord(state)} · ${progress}${left}${run.started ? ` · ${clock(run.started)}` : ""}`);
    attribute(choose, "title", run.problem ? run.problem : `Run ${run.run_id}`);
    remove.hidden = state === "running";
  }

  async #remove(run) {
    try {
      const use = await this.client.disk(run.run_id);
      const words =
        `Delete the run ${run.name ? `${run.name} (${run.run_id})` : run.run_id} with its checkpoints, previews and report ` +
        `(${bytes(use.total)})? LoRA files outside its folder stay. This cannot be undone.`;
      if (!(await this.env.confirm("Delete run", words))) return;
      const done = await this.client.remove(run.run_id);
      this.env.notify("info", "Run deleted", `${bytes(done.bytes)} are free again.`);
    } catch (error) {
      this.env.notify("error", "The run was not deleted", error.message);
    }
  }
}

/** What a graph that has its turn is at, or "Waiting for run cat, about 12 min left · 400 steps": what stands before a queued run, as far as it is known. */
export function waitingWords(one, client) {
  if (one.position === 0) return "Getting ready: the nodes before it come first";
  const before = client.runs.find((run) => run.run_id === one.waiting_for);
  const state = before && client.states.get(before.run_id);
  const parts = [before ? `Waiting for run ${before.name || before.run_id}` : "Waiting for its turn"];
  const left = state?.run.state === "running" ? state.last?.eta_seconds : null;
  if (left && one.position === 1) parts[0] += `, about ${duration(left)} left`;
  if (one.position > 1) parts.push(`${plural(one.position, "graph")} before it`);
  if (one.steps) parts.push(plural(one.steps, "step"));
  return parts.join(" · ");
}
