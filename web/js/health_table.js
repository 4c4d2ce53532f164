/** Health of each module group: the engine's figures, its verdict as a word, and what was said about it last. */

import { h, keyed, setText } from "./dom.js";
import { number } from "./format.js";
import { partName, tone } from "./sentences.js";

const SIGNS = { good: "✓", warn: "▲", bad: "✕", note: "·" };
const MOST_COLUMNS = 5;
const TITLES = {
  norm: "Norm",
  grad_norm: "Norm",
  update_ratio: "Update / weight",
  clip_ratio: "Clipped",
  zero_share: "Zeros",
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
    const rows = state.health.rows;
    const columns = numberColumns(rows);
    this.table.hidden = rows.length === 0;
    setText(this.table.firstChild, rows.length ? `Measured at step ${state.health.step}` : "");
    keyed(this.head, ["Part", "State", ...columns], (name) => name, (name) =>
      h("th", { scope: "col", text: TITLES[name] ?? name.replaceAll("_", " ") }),
    ); // prettier-ignore
    keyed(
      this.body,
      rows,
      (row) => row.module,
      (row) => h("tr", {}, ...cells(row, columns)),
      (element, row) => element.replaceChildren(...cells(row, columns)),
    );
    const verdicts = [...state.verdicts.entries()];
    keyed(
      this.list,
      verdicts,
      ([name]) => name,
      () => h("li", {}, h("b", {}), h("span", {})),
    );
    verdicts.forEach(([name, verdict], index) => fillVerdict(this.list.children[index], name, verdict));
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

function fillVerdict(element, name, verdict) {
  const kind = tone(verdict.severity === "info" ? verdict.kind : verdict.severity);
  element.className = `ss-verdict ss-${kind}`;
  setText(element.children[0], `${SIGNS[kind]} ${verdict.kind}`);
  setText(element.children[1], ` ${verdict.sentence || partName(name)} (step ${verdict.step})`);
}

function cells(row, columns) {
  const word = String(row.data.verdict ?? row.data.state ?? row.data.kind ?? "measured");
  const kind = tone(word);
  return [
    h("th", { scope: "row", text: partName(row.module) }),
    h("td", { class: `ss-${kind}`, text: `${SIGNS[kind]} ${word}` }),
    ...columns.map((name) => h("td", { class: "ss-number", text: number(row.data[name]) })),
  ];
}

/** Columns: what is a number in some row, the norm first. */
function numberColumns(rows) {
  const names = new Set();
  for (const row of rows) {
    for (const [name, value] of Object.entries(row.data)) if (typeof value === "number") names.add(name);
  }
  const order = (name) => (name in TITLES ? Object.keys(TITLES).indexOf(name) : 100);
  return [...names].sort((a, b) => order(a) - order(b)).slice(0, MOST_COLUMNS);
}
