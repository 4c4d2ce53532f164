/** The scan report in the Training Dataset node. ComfyUI itself shows the thumbnails below it. */

import { h, isDark, loadStyles, setText } from "./dom.js";

export function addDatasetWidget(node) {
  loadStyles();
  const words = h("pre", { class: "ss-scan-words", tabindex: "0", "aria-label": "Scan report" });
  const root = h("div", { class: "ss-panel ss-scan", "data-testid": "safe-scaler-scan" }, words);
  setText(words, "The pictures are looked at when the graph runs.");
  const widget = node.addDOMWidget("scan", "safe_scaler_scan", root, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => 90,
    getMaxHeight: () => 240,
    getValue: () => "",
    setValue() {},
  });
  widget.serialize = false;
  const executed = node.onExecuted;
  node.onExecuted = function onExecuted(output, ...rest) {
    const text = output?.text;
    if (text) {
      root.dataset.theme = isDark(root) ? "dark" : "light";
      setText(words, Array.isArray(text) ? text.join("\n") : String(text));
    }
    return executed?.call(this, output, ...rest);
  };
}
