/** Preview pictures: a strip for each prompt in the order of steps, and two of them on top of each other to compare. */

import { attribute, h, keyed, setText } from "./dom.js";
import { plural } from "./format.js";

export class Gallery {
  constructor(env) {
    this.env = env;
    this.before = null;
    this.after = null;
    this.run = null;
    this.prompts = [];
    this.followNewest = true;
    this.imageBefore = h("img", { class: "ss-compare-before", alt: "" });
    this.imageAfter = h("img", { class: "ss-compare-after", alt: "" });
    this.edge = h("div", { class: "ss-compare-edge", "aria-hidden": "true" });
    this.slider = h("input", {
      type: "range", min: "0", max: "100", value: "50", class: "ss-compare-slider",
      "aria-label": "How much of the earlier picture is shown", on: { input: () => this.#slide() },
    }); // prettier-ignore
    this.words = h("figcaption", { class: "ss-compare-words" });
    this.compare = h(
      "figure",
      { class: "ss-compare" },
      h("div", { class: "ss-compare-stage" }, this.imageAfter, this.imageBefore, this.edge),
      this.slider, this.words,
    ); // prettier-ignore
    this.strips = h("div", { class: "ss-strips" });
    this.empty = h("p", { class: "ss-quiet", text: "No preview pictures yet." });
    this.root = h("div", { class: "ss-gallery" }, this.empty, this.compare, this.strips);
    this.#slide();
  }

  update(state) {
    const { previews } = state;
    if (this.run !== state.run.run_id) {
      this.run = state.run.run_id;
      this.before = this.after = null;
      this.followNewest = true;
      this.strips.replaceChildren();
    }
    this.empty.hidden = previews.length > 0;
    this.compare.hidden = previews.length === 0;
    const prompts = byPrompt(previews);
    keyed(
      this.strips,
      prompts,
      ({ index }) => index,
      ({ prompt }) => h("div", { class: "ss-strip" }, h("p", { class: "ss-prompt", text: prompt, title: prompt }), h("div", { class: "ss-thumbs" })),
    );
    prompts.forEach(({ list }, place) => this.#strip(this.strips.children[place].lastChild, list));
    this.prompts = prompts;
    this.#choose();
  }

  destroy() {
    this.root.remove();
  }

  #strip(place, list) {
    keyed(
      place,
      list,
      (preview) => preview.id,
      (preview) =>
        h(
          "button",
          {
            class: "ss-thumb", type: "button", title: `Show step ${preview.step} on the right; with Shift on the left`,
            on: { click: (event) => this.#pick(preview, event.shiftKey) },
          }, // prettier-ignore
          h("img", { loading: "lazy", alt: `Step ${preview.step}: ${preview.prompt}`, src: this.#url(preview) }),
          h("span", { text: preview.step === 0 ? "before" : `step ${preview.step}` }),
        ),
    );
  }

  /** At first the earliest and the newest picture of the first prompt; the newest one takes its place as it comes. */
  #choose() {
    if (this.prompts.length === 0) return;
    const list = (this.prompts.find((one) => one.index === this.after?.index) ?? this.prompts[0]).list;
    if (this.after === null || this.followNewest) this.after = list[list.length - 1];
    if (this.before === null || this.before.index !== this.after.index) this.before = list[0];
    this.#show();
  }

  /** A click puts a picture on the right, with Shift on the left. */
  #pick(preview, left) {
    if (left) this.before = preview;
    else this.after = preview;
    if (left && this.after.index !== preview.index) this.after = preview;
    this.followNewest = false;
    this.#choose();
  }

  #show() {
    const { before, after } = this;
    if (after === null) return;
    const first = before ?? after;
    for (const [image, preview] of [[this.imageBefore, first], [this.imageAfter, after]]) {
      if (image.dataset.id !== `${this.run}/${preview.id}`) {
        image.dataset.id = `${this.run}/${preview.id}`;
        image.src = this.#url(preview);
        image.alt = `Step ${preview.step}: ${preview.prompt}`;
      }
    } // prettier-ignore
    const one = first.id === after.id;
    attribute(this.slider, "disabled", one);
    this.edge.hidden = one;
    const steps = one ? `Step ${after.step}` : `Step ${first.step} on the left, step ${after.step} on the right`;
    setText(this.words, `${steps}, seed ${after.seed}`);
    for (const thumb of this.strips.querySelectorAll(".ss-thumb")) {
      attribute(thumb, "aria-pressed", String(thumb.dataset.key === after.id));
    }
  }

  #slide() {
    const share = Number(this.slider.value);
    this.imageBefore.style.clipPath = `inset(0 ${100 - share}% 0 0)`;
    this.edge.style.left = `${share}%`;
    attribute(this.slider, "aria-valuetext", `${plural(share, "per cent", "per cent")} earlier picture`);
  }

  #url(preview) {
    return this.env.pictureUrl(this.run, preview.id);
  }
}

/** Previews by prompt: `[{index, prompt, list}]`, each list in the order of steps. */
export function byPrompt(previews) {
  const table = new Map();
  for (const preview of [...previews].sort((a, b) => a.step - b.step)) {
    if (!table.has(preview.index)) table.set(preview.index, { index: preview.index, prompt: preview.prompt, list: [] });
    table.get(preview.index).list.push(preview);
  }
  return [...table.values()].sort((a, b) => a.index - b.index);
}
