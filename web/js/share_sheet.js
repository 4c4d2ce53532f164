/** What one needs to share the LoRA of a run; fetched when the section is opened. */

import { h, setText } from "./dom.js";
import { bytes } from "./format.js";

export class ShareSheet {
  constructor(client) {
    this.client = client;
    this.detail = h(
      "select",
      { "aria-label": "How much is told", on: { change: () => this.#load() } },
      h("option", { value: "full", text: "Full" }),
      h("option", { value: "minimal", text: "Minimal: no prompts, no model name" }),
    );
    this.fields = h("dl", { class: "ss-share-fields" });
    this.card = h("textarea", { class: "ss-share-text", readonly: true, "aria-label": "Model card" });
    this.copied = h("span", { class: "ss-quiet", role: "status", "aria-live": "polite" });
    const copy = h("button", { class: "ss-button ss-small", type: "button", text: "Copy the model card", on: { click: () => this.#copy() } });
    this.content = h(
      "div",
      { class: "ss-share" },
      h("div", { class: "ss-share-row" }, this.detail, copy, this.copied),
      this.fields,
      this.card,
    );
    this.root = h(
      "details",
      { class: "ss-section", "data-testid": "safe-scaler-share", on: { toggle: () => this.root.open && this.#load() } },
      h("summary", {}, h("h3", { text: "Share sheet" })),
      this.content,
    );
  }

  update(state) {
    const { run } = state;
    this.root.hidden = !run.lora;
    if (this.runId === run.run_id && this.lora === run.lora) return;
    this.runId = run.run_id;
    this.lora = run.lora;
    if (this.root.open) this.#load();
  }

  async #load() {
    const asked = this.runId;
    setText(this.copied, "");
    try {
      const sheet = await this.client.share(asked, this.detail.value);
      if (asked !== this.runId) return; // another run was chosen meanwhile
      const rows = [...sheet.civitai, ["File", `${sheet.file} (${bytes(sheet.bytes)})`], ["AutoV2 hash", sheet.auto_v2]];
      this.fields.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", { text: name }), h("dd", { text: value })]));
      this.card.value = sheet.model_card;
    } catch (error) {
      this.fields.replaceChildren();
      this.card.value = "";
      setText(this.copied, error.message);
    }
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(this.card.value);
      setText(this.copied, "Copied");
    } catch {
      // Pages that are not served safely have no clipboard: mark the text, so that Ctrl+C takes it.
      this.card.select();
      setText(this.copied, "Marked: press Ctrl+C");
    }
  }
}
