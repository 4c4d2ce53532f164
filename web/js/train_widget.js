/** The line in the Safe-Scaler Train node: which step, how long it will still take, or what it waits for. */

import { attribute, h, isDark, loadStyles, setText } from "./dom.js";
import { duration, number } from "./format.js";
import { waitingWords } from "./run_picker.js";
import { canGoOn, phaseWords, stateWord } from "./sentences.js";

const HEIGHT = 54; // ComfyUI takes ten pixels of it above and below
const EVERY_MS = 1000;

export function addTrainWidget(node, client) {
  loadStyles();
  const words = h("p", { class: "ss-train-words", role: "status" });
  const fill = h("div", { class: "ss-progress-fill" });
  const bar = h("div", { class: "ss-progress", "aria-hidden": "true" }, fill);
  const root = h("div", { class: "ss-panel ss-train", "data-testid": "safe-scaler-train" }, words, bar);
  const widget = node.addDOMWidget("progress", "safe_scaler_progress", root, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT,
    getValue: () => "",
    setValue() {},
  });
  widget.serialize = false;
  client.watchers += 1;
  const look = () => {
    if (!document.hidden && root.isConnected) draw();
  };
  const draw = () => {
    root.dataset.theme = isDark(root) ? "dark" : "light";
    const state = client.runOfNode(node.id);
    setText(words, progressWords(state, client.waitingOfNode(node.id), client));
    attribute(words, "title", words.textContent);
    const total = state?.run.total_steps || 0;
    fill.style.width = `${total > 0 ? ((100 * Math.min(state.run.step, total)) / total).toFixed(1) : 0}%`;
  };
  const timer = setInterval(look, EVERY_MS);
  draw(); // before the node is on the page: else the bar would be full and without words for a second
  // A workflow that was saved before the line existed has no room for it.
  const configured = node.onConfigure;
  node.onConfigure = function onConfigure(...rest) {
    const least = this.computeSize?.()[1] ?? 0;
    if (this.size[1] < least) this.setSize([this.size[0], least]);
    return configured?.apply(this, rest);
  };
  const removed = node.onRemoved;
  node.onRemoved = function onRemoved(...rest) {
    clearInterval(timer);
    client.watchers -= 1;
    return removed?.apply(this, rest);
  };
}

/** What the line says of a run (or null) and of a queued one (or null). */
export function progressWords(state, waiting, client) {
  const running = state !== null && state.run.state === "running";
  if (waiting !== null && !running) return waitingWords(waiting, client);
  if (state === null) return "Not trained yet";
  const { run, last, phase } = state;
  const parts = [];
  const doing = running && !state.paused && phase && phase.phase !== "training" ? phaseWords(phase) : "";
  if (!running || state.paused) parts.push(stateWord(run.state, state.paused));
  if (doing && run.step === 0) parts.push(doing);
  if (run.total_steps) parts.push(`step ${run.step} of ${run.total_steps}`);
  if (running && last?.eta_seconds) parts.push(`${duration(last.eta_seconds)} left`);
  if (canGoOn(run)) parts.push("Run goes on");
  const loss = last?.loss_avg ?? run.loss_avg;
  if (typeof loss === "number") parts.push(`loss ${number(loss)}`);
  if (doing && run.step > 0) parts.push(doing); // last: the line is cut off on the right
  return parts.join(" · ") || "Starting";
}
