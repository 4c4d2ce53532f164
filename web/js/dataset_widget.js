/** The scan report in the Training Dataset node. ComfyUI itself shows the thumbnails below it. */

import { h, isDark, loadStyles, setText } from "./dom.js";

const PROPERTY = "safe_scaler_data_set";
const UNSEEN = "The pictures are looked at when the graph runs.";

/** `remember()` is called when the node has got a new id to keep in the workflow. */
export function addDatasetWidget(node, client, remember = () => {}) {
  loadStyles();
  const words = h("pre", { class: "ss-scan-words", tabindex: "0", "aria-label": "Scan report" });
  const root = h("div", { class: "ss-panel ss-scan", "data-testid": "safe-scaler-scan" }, words);
  const show = (text) => {
    root.dataset.theme = isDark(root) ? "dark" : "light";
    setText(words, text);
  };
  setText(words, UNSEEN);
  const widget = node.addDOMWidget("scan", "safe_scaler_scan", root, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => 150, // what was left out is in the second half of a usual report
    getMaxHeight: () => 240,
    getValue: () => "",
    setValue() {},
  });
  widget.serialize = false;
  const executed = node.onExecuted;
  node.onExecuted = function onExecuted(output, ...rest) {
    const text = output?.text;
    if (text) show(Array.isArray(text) ? text.join("\n") : String(text));
    const id = output?.data_set?.[0];
    if (id) {
      client.hasDataSets = true;
      (node.properties ??= {})[PROPERTY] = id;
      remember();
    }
    return executed?.call(this, output, ...rest);
  };
  // After a reload the workflow still knows the id, and the server the report; another server knows neither.
  const configured = node.onConfigure;
  node.onConfigure = function onConfigure(...rest) {
    restore(node, client, show);
    return configured?.apply(this, rest);
  };
}

async function restore(node, client, show) {
  const id = node.properties?.[PROPERTY];
  if (typeof id !== "string") return;
  try {
    const { report } = await client.dataSet(id);
    client.hasDataSets = true;
    if (report) show(report);
  } catch {
    // Not known any more: the next run looks at the pictures again, and the node says so already.
  }
}
