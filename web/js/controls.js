/** The buttons that ask something of a run. */

import { attribute, h, setText } from "./dom.js";

const BUTTONS = [
  { cmd: "stop", label: "Stop", help: "Ends the run: a checkpoint and a usable LoRA are written first" },
  { cmd: "pause", label: "Pause", help: "Waits after the present micro-batch; memory stays in use" },
  { cmd: "save", label: "Save now", help: "Writes a checkpoint and the LoRA as it is now" },
  { cmd: "preview", label: "Preview now", help: "Makes the preview pictures with the LoRA as it is now" },
];

export class Controls {
  constructor(client, env) {
    this.client = client;
    this.env = env;
    this.busy = new Set();
    this.told = null;
    this.buttons = new Map(BUTTONS.map((button) => [button.cmd, this.#button(button)]));
    this.report = h("a", { class: "ss-button", target: "_blank", rel: "noopener", text: "Report" });
    this.answer = h("span", { class: "ss-answer", role: "status", "aria-live": "polite" });
    this.bar = h("div", { class: "ss-buttons", role: "group", "aria-label": "Run" }, ...this.buttons.values(), this.report);
    this.root = h("div", { class: "ss-controls" }, this.bar, this.answer);
  }

  update(state) {
    const { run } = state;
    const running = state.loaded && run.state === "running";
    const other = this.runId !== run.run_id || this.running !== running;
    if (other || (this.told !== null && isPast(this.told, state.paused, Date.now()))) this.#say(null);
    this.runId = run.run_id;
    this.running = running;
    this.paused = state.paused;
    for (const [cmd, button] of this.buttons) {
      button.hidden = !running;
      // Another program's run takes no commands here, but it can be stopped.
      attribute(button, "disabled", this.busy.has(cmd) || this.client.down || (!run.live && cmd !== "stop"));
    }
    setText(this.buttons.get("pause"), state.paused ? "Go on" : "Pause");
    this.report.hidden = !state.loaded || running || run.state === "interrupted";
    attribute(this.report, "href", this.env.reportUrl(run.run_id));
    if (running && !run.live && this.told === null) {
      setText(this.answer, "Started by another program: here it can be watched and stopped.");
    }
  }

  async send(cmd) {
    const { runId } = this; // while the question stands, another run may begin and be shown
    const asked = cmd === "pause" && this.paused ? "resume" : cmd;
    if (asked === "stop" && !(await mayStop(this.env))) return;
    this.busy.add(cmd);
    const answer = await this.client.command(runId, asked);
    this.busy.delete(cmd);
    if (runId !== this.runId) return;
    this.#say({ cmd: asked, ok: answer.ok, words: answer.ok ? WORDS[asked] : answer.message, at: Date.now() });
  }

  #say(told) {
    this.told = told;
    setText(this.answer, told?.words ?? "");
    this.answer.classList.toggle("ss-bad", told !== null && !told.ok);
  }

  #button({ cmd, label, help }) {
    return h("button", {
      class: cmd === "stop" ? "ss-button ss-stop" : "ss-button", type: "button", text: label, title: help,
      "data-testid": `safe-scaler-${cmd}`, on: { click: () => this.send(cmd) },
    }); // prettier-ignore
  }
}

/** Ask before a stop where the settings want that; whether it may be sent. */
async function mayStop(env) {
  if (!env.settings.confirmStop()) return true;
  const words = "Stop this run? A checkpoint and a usable LoRA are written first, and it can be resumed.";
  return Boolean(await env.confirm("Stop training", words));
}

/** A command of the palette or menu acts on the run that the panel shows, when it is running. */
export async function commandShownRun(client, env, cmd) {
  const state = client.current;
  if (state === null || state.run.state !== "running") {
    env.notify("info", "Safe-Scaler", "No run is going on.");
    return;
  }
  const runId = state.run.run_id; // while the question stands, another run may begin and be shown
  const asked = cmd === "pause" && state.paused ? "resume" : cmd;
  if (asked === "stop" && !(await mayStop(env))) return;
  const answer = await client.command(runId, asked);
  env.notify(answer.ok ? "success" : "error", "Safe-Scaler", answer.ok ? `${asked}: sent` : answer.message);
}

const TOLD_MS = 10_000;

/** Whether an answer says nothing about the present any more: it is old, or another tab has asked the contrary. */
export function isPast({ cmd, ok, at }, paused, now) {
  if (!ok || cmd === "stop") return false; // an error stands until the next one; a stop until the run has ended
  const contrary = (cmd === "pause" && !paused) || (cmd === "resume" && paused);
  return contrary || now - at > TOLD_MS;
}

const WORDS = {
  stop: "Stopping: a checkpoint and the LoRA are written first.",
  pause: "Pausing after the present micro-batch.",
  resume: "Going on.",
  save: "Saving.",
  preview: "Making previews.",
};
