/** Health of each module group: the engine's figures, its verdict as a word, and what was said about it last. */

import { h, keyed, setText } from "./dom.js";
import { number } from "./format.js";
import { groupName, tone, verdictWord } from "./sentences.js";

const SIGNS = { good: "✓", warn: "▲", bad: "✕", note: "·" };

/** Columns that are shown where some row has them; `help` is the heading's title. */
const FIGURES = {
  norm: { title: "Norm", help: "Gradient norm of the group", text: (value) => number(value) },
  update_ratio: { title: "Update / weight", help: "How far one step moves the weights, as a share of them", text: share },
  zero_share: { title: "Zeros", help: "Share of the gradients that are exactly zero", text: share },
  consistency: { title: "Direction", help: "How well the gradients of successive steps agree, 0 to 1", text: (value) => number(value, 2) },
};

export class HealthTable {
  constructor() {
    this.head = h("tr", {});
    this.body = h("tbody", {});
    this.table = h("table", { class: "ss-table" }, h("caption", { class: "ss-caption" }), h("thead", {}, this.head), this.body);
    this.list = h("ul", { class: "ss-verdicts" });
    this.empty = h("p", { class: "ss-quiet" });
    this.root = h("div", { class: "ss-health" }, this.list, h("div", { class: "ss-scroll" }, this.table), this.empty);
  }

  update(state) {
    const rows = worstFirst(state.health.rows);
    const columns = Object.keys(FIGURES).filter((name) => rows.some((row) => typeof row.data[name] === "number"));
    this.table.hidden = rows.length === 0;
    setText(this.table.firstChild, rows.length ? `Measured at step ${state.health.step}` : "");
    keyed(
      this.head,
      ["Part", "State", ...columns],
      (name) => name,
      (name) => h("th", { scope: "col", class: name in FIGURES ? "ss-number" : "", text: FIGURES[name]?.title ?? name, title: FIGURES[name]?.help }),
    );
    keyed(this.body, rows, (row) => row.module, () => h("tr", {}));
    rows.forEach((row, index) => fillRow(this.body.children[index], row, columns));
    const verdicts = [...state.verdicts.entries()].reverse();
    keyed(
      this.list,
      verdicts,
      ([name]) => name,
      () => h("li", {}, h("b", {}), h("span", {})),
    );
    verdicts.forEach(([, verdict], index) => fillVerdict(this.list.children[index], verdict));
    this.empty.hidden = rows.length + verdicts.length > 0;
    setText(this.empty, emptyWords(state));
  }
}

function emptyWords(state) {
  const rejected = state.run.rejected ?? 0;
  if (state.run.step === 0) return "Nothing is measured before the first step.";
  if (rejected > 0) return `${rejected} of ${state.run.step} steps were rejected; what happened says why.`;
  return "Every step had finite gradients. Figures for each part are not recorded for this run.";
}

function fillVerdict(element, verdict) {
  const kind = tone(verdict.severity === "info" ? "note" : verdict.severity);
  element.className = `ss-verdict ss-${kind}`;
  setText(element.children[0], `${SIGNS[kind]} ${verdictWord(verdict.kind)}`);
  setText(element.children[1], ` ${verdict.sentence || verdict.where} (since step ${verdict.step})`);
}

function fillRow(element, row, columns) {
  const word = String(row.data.verdict ?? "measured");
  const kind = tone(word);
  element.title = row.data.sentence ?? "";
  element.replaceChildren(
    h("th", { scope: "row", text: groupName(row.module), title: row.data.name }),
    h("td", { class: `ss-${kind}`, text: `${SIGNS[kind]} ${verdictWord(word)}` }),
    ...columns.map((name) => h("td", { class: "ss-number", "data-title": FIGURES[name].title, text: FIGURES[name].text(row.data[name]) })),
  );
}

/** What is not healthy first, then as the engine orders them. */
function worstFirst(rows) {
  const order = { bad: 0, warn: 1, note: 2, good: 3 };
  return [...rows].sort((a, b) => order[tone(a.data.verdict)] - order[tone(b.data.verdict)]);
}

function share(value) {
  return typeof value === "number" ? `${number(100 * value, 2)} %` : "–";
}
