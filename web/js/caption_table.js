/** Captions of a data set: each picture with its text to edit. Fetched when the section is opened, a page at a time. */

import { attribute, h, keyed, setText } from "./dom.js";
import { plural } from "./format.js";

const PAGE = 25;
const LOCKED_MS = 4000;

export class CaptionTable {
  constructor(client, env) {
    this.client = client;
    this.env = env;
    this.choice = h("select", { "aria-label": "Data set", on: { change: () => this.#choose(this.choice.value) } });
    this.find = h("input", {
      type: "search", class: "ss-find", placeholder: "Find in captions and names", "aria-label": "Find in captions and names",
      on: { change: () => this.#turn(0) },
    }); // prettier-ignore
    this.count = h("span", { class: "ss-quiet" });
    this.note = h("p", { class: "ss-notice", role: "status", hidden: true });
    this.list = h("ul", { class: "ss-captions", "aria-label": "Pictures with their captions" });
    this.back = pageButton("Earlier", () => this.#turn(this.first - PAGE));
    this.on = pageButton("Later", () => this.#turn(this.first + PAGE));
    this.pages = h("div", { class: "ss-share-row" }, this.back, this.on);
    this.root = h(
      "details",
      { class: "ss-section", "data-testid": "safe-scaler-captions", on: { toggle: () => this.root.open && this.#open() } },
      h("summary", {}, h("h3", { text: "Captions" })),
      h(
        "div",
        { class: "ss-share" },
        h("div", { class: "ss-share-row" }, this.choice, this.find, this.count),
        this.note,
        this.list,
        this.pages,
      ),
    );
    this.first = 0;
    this.chosen = null;
    this.agreed = new Set();
    this.asked = 0;
    this.drawn = 0;
  }

  /** `state`: the run that is shown, or null. Its data set is offered first. */
  update(state) {
    this.root.hidden = this.client.runsLoaded && this.client.runs.length === 0 && !this.client.hasDataSets;
    const wanted = state?.run.data_set || null;
    const running = state?.run.state === "running";
    if (wanted === this.wanted && running === this.running) {
      // The lock goes when the program that follows the run is done with it, a little after the run's last word.
      if (this.root.open && this.page?.locked_by && !running && Date.now() - this.drawn > LOCKED_MS) this.#turn(this.first);
      return;
    }
    const other = wanted !== this.wanted;
    this.wanted = wanted;
    this.running = running;
    // Nobody's half-written caption is thrown away because a run began or ended.
    if (this.root.open && !this.#unsaved()) this.#open(other ? wanted : this.chosen);
    else if (other && !this.root.open) this.chosen = null;
  }

  async #open(chosen = this.chosen) {
    try {
      const { data_sets: sets } = await this.client.dataSets();
      const option = (one) => h("option", { value: one.id, text: one.title || one.id });
      keyed(this.choice, sets, (one) => one.id, option);
      this.choice.hidden = sets.length < 2;
      const known = (id) => sets.some((one) => one.id === id);
      const id = known(chosen) ? chosen : known(this.wanted) ? this.wanted : sets[0]?.id;
      if (id === undefined) {
        this.#say("No data set yet. Run a Training Dataset node, and its pictures appear here.");
        return;
      }
      this.choice.value = id;
      await this.#choose(id);
    } catch (error) {
      this.#say(error.message, true);
    }
  }

  #choose(id) {
    if (this.chosen !== id) this.list.replaceChildren();
    this.chosen = id;
    return this.#turn(0);
  }

  async #turn(first) {
    const asked = ++this.asked;
    this.drawn = Date.now(); // an answer on its way is not asked for again
    try {
      const page = await this.client.captions(this.chosen, Math.max(0, first), PAGE, this.find.value);
      if (asked !== this.asked) return; // another page was asked for meanwhile
      this.first = page.first;
      this.page = page;
      this.#draw();
    } catch (error) {
      if (asked !== this.asked) return;
      this.list.replaceChildren();
      this.#say(error.message, true);
    }
  }

  #draw() {
    const { page } = this;
    this.drawn = Date.now();
    const last = Math.min(page.first + page.rows.length, page.total);
    setText(this.count, page.total > page.rows.length ? `${page.first + 1} to ${last} of ${page.total}` : plural(page.total, "picture"));
    this.pages.hidden = page.total <= PAGE;
    attribute(this.back, "disabled", page.first === 0);
    attribute(this.on, "disabled", last >= page.total);
    this.#say(this.#noteWords());
    this.list.replaceChildren(...page.rows.map((row) => this.#entry(row)));
  }

  #noteWords() {
    const { locked_by: lockedBy, resumable, read_only: readOnly } = this.page;
    if (readOnly) return "These pictures were written by the program itself; their captions are changed where they come from.";
    if (lockedBy) return `Run ${this.#name(lockedBy)} is training on these pictures. Captions can be changed when it has ended.`;
    if (resumable.length === 0) return "";
    const names = resumable.slice(0, 3).map((id) => this.#name(id)).join(", "); // prettier-ignore
    return `With changed captions, ${names} can no longer be continued; a new run or a warm start can.`;
  }

  #name(runId) {
    return this.client.runs.find((run) => run.run_id === runId)?.name || runId;
  }

  #entry(row) {
    const locked = !row.editable || this.page.read_only || Boolean(this.page.locked_by);
    const text = h("textarea", {
      class: "ss-caption-text", rows: "2", maxlength: this.page.max_characters, readonly: locked,
      "aria-label": `Caption of ${row.file}`,
    }); // prettier-ignore
    text.value = row.caption;
    const words = row.problem || (row.why ? `Cannot be changed here: ${row.why}.` : "");
    const told = h("span", { class: row.problem ? "ss-bad" : "ss-quiet", role: "status", "aria-live": "polite", text: words });
    const save = h("button", { class: "ss-button ss-small", type: "button", text: "Save", hidden: true });
    const entry = { row, text, told, save };
    save.addEventListener("click", () => this.#save(entry));
    text.addEventListener("input", () => {
      save.hidden = text.value === entry.row.caption;
      setText(told, "");
    });
    text.addEventListener("keydown", (event) => {
      event.stopPropagation(); // ComfyUI's own keys stay out of the text
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !save.hidden) this.#save(entry);
    });
    const picture = h("img", { loading: "lazy", alt: "", src: this.env.captionPictureUrl(this.chosen, row.key) });
    // A file that the scan refused (or that is gone) has no picture: said in its place, not with the browser's sign.
    picture.addEventListener("error", () => picture.replaceWith(h("span", { class: "ss-no-picture", text: "Cannot be read" })));
    const below = h("div", { class: "ss-share-row" }, save, told);
    const side = h("div", {}, h("span", { class: "ss-caption-file", text: row.file, title: row.file }), text, below);
    return h("li", { class: "ss-caption-row" }, picture, side);
  }

  async #save(entry) {
    const { row, text, told, save } = entry;
    if (this.page.resumable.length > 0 && !this.agreed.has(this.chosen)) {
      if (!(await this.env.confirm("Change captions", `${this.#noteWords()} Change it all the same?`))) return;
      this.agreed.add(this.chosen);
    }
    attribute(save, "disabled", true);
    told.className = "ss-quiet";
    try {
      const { row: now } = await this.client.saveCaption(this.chosen, row.key, text.value, row.version);
      entry.row = now;
      // What was typed while it was being saved stays.
      if (text.value.replace(/\s+$/, "") === now.caption.replace(/\s+$/, "")) text.value = now.caption;
      save.hidden = text.value === now.caption;
      setText(told, "Saved. The next Run reads it.");
    } catch (error) {
      told.className = "ss-bad";
      setText(told, error.message);
    }
    attribute(save, "disabled", false);
  }

  #unsaved() {
    return [...this.list.querySelectorAll("button")].some((button) => !button.hidden);
  }

  #say(words, bad = false) {
    this.note.hidden = words === "";
    this.note.classList.toggle("ss-bad", bad);
    setText(this.note, words);
  }
}

function pageButton(label, click) {
  return h("button", { class: "ss-button ss-small", type: "button", text: label, on: { click } });
}
