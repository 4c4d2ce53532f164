/** Which events are told beside the panel: as toasts, and as a notice of the system at the end. */

import { sentence, tone } from "./sentences.js";

const REPEAT_MS = 20000;

export class Alerts {
  constructor(env, now = () => Date.now()) {
    this.env = env;
    this.now = now;
    this.told = new Map();
  }

  /** Handle one event of run `runId`. `name`: what the user calls the run. */
  take(name, event) {
    const told = sentence(event);
    if (told === null) return;
    const ended = event.type === "RunFinished";
    if (ended && this.env.settings.notifyAtEnd()) this.#notice(name, told.text);
    const level = this.env.settings.alerts();
    const serious = ended || (event.type === "Verdict" && tone(event.data?.severity) === "bad") || event.type === "Intervention";
    if (level === "off" || (level === "serious" && !serious)) return;
    // A storm of rejected steps is one message, not two hundred.
    const key = `${event.run_id}/${event.type}/${event.data?.kind ?? event.data?.reason ?? ""}`;
    if (this.now() - (this.told.get(key) ?? -Infinity) < REPEAT_MS) return;
    this.told.set(key, this.now());
    const severity = { good: "success", warn: "warn", bad: "error" }[told.tone] ?? "info";
    this.env.notify(severity, name, told.text);
  }

  #notice(name, text) {
    if (typeof Notification === "undefined" || Notification.permission !== "granted") return;
    new Notification(name, { body: text, tag: "safe-scaler" });
  }
}
