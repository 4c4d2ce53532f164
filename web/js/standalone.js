/** The panel outside ComfyUI: in the gradio twin's page. Nothing happens before `start` is called. */

import { PanelClient } from "./client.js";
import { readReply } from "./comfy_host.js";
import { h } from "./dom.js";
import { mountPanel } from "./panel.js";

/** Show the panel in `root`. `base`: address of the API, relative to the page. */
export function start(root, base) {
  const client = new PanelClient(fetchTransport(base));
  const messages = h("div", { class: "ss-messages", role: "status", "aria-live": "polite" });
  const place = h("div");
  root.replaceChildren(messages, place);
  const environment = {
    settings: { unit: () => "GiB", confirmStop: () => true, alerts: () => "off", notifyAtEnd: () => false },
    confirm: (_title, message) => window.confirm(message),
    notify: (severity, summary, detail) => message(messages, severity, `${summary}: ${detail}`),
    pictureUrl: (run, preview) => `${base}/runs/${encodeURIComponent(run)}/previews/${encodeURIComponent(preview)}`,
    reportUrl: (run) => `${base}/runs/${encodeURIComponent(run)}/report`,
    captionPictureUrl: (set, key) => `${base}/data_sets/${encodeURIComponent(set)}/pictures/${encodeURIComponent(key)}`,
    removeWaiting: null,
    goOn: "Go on with: safe-scaler resume and the folder of this run.",
    gpus: () => [],
  };
  mountPanel(place, client, environment);
  client.start();
  window.safeScaler = { client, ready: true };
}

/** Requests by fetch, and no socket: the client then asks for news by itself. */
export function fetchTransport(base, get = (...asked) => fetch(...asked)) {
  return {
    async request(method, path, body) {
      const options = { method, cache: "no-store" };
      if (method !== "GET") {
        options.headers = { "Content-Type": "application/json" };
        options.body = JSON.stringify(body ?? {});
      }
      return readReply(await get(base + path, options));
    },
    listen: () => () => {},
  };
}

function message(place, severity, text) {
  const line = h("p", { class: severity === "error" ? "ss-notice ss-bad" : "ss-notice", text });
  place.append(line);
  setTimeout(() => line.remove(), 10_000);
}
