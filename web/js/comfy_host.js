/** What the panel needs of ComfyUI: requests, socket messages, dialogs, toasts, settings, memory of the GPUs. */

const BASE = "/safe_scaler/api/v1";
const STATS_MS = 5000;

/** Transport for `PanelClient` over ComfyUI's `api`. */
export function comfyTransport(api) {
  return {
    async request(method, path, body) {
      const options = { method, cache: "no-store" };
      if (method !== "GET") {
        options.headers = { "Content-Type": "application/json" };
        options.body = JSON.stringify(body ?? {});
      }
      return readReply(await api.fetchApi(BASE + path, options));
    },
    listen(onMessage, onReconnect, onPing) {
      const listeners = [
        ["safe_scaler.event", ({ detail }) => onMessage(detail)],
        ["safe_scaler.ping", () => onPing()],
        ["reconnected", () => onReconnect()],
      ];
      for (const [name, listener] of listeners) api.addEventListener(name, listener);
      return () => {
        for (const [name, listener] of listeners) api.removeEventListener(name, listener);
      };
    },
  };
}

/** The JSON of a response; an Error with the server's words and `status` when it is no success. */
export async function readReply(response) {
  let data = null;
  try {
    data = await response.json();
  } catch {
    // An answer of something in between (a proxy's page): the status says enough.
  }
  if (response.ok && data !== null) return data;
  const error = new Error(data?.error?.message ?? `the server answered ${response.status} ${response.statusText}`);
  error.status = response.status;
  throw error;
}

/** The panel's environment inside ComfyUI. */
export function comfyEnvironment(app, api) {
  const manager = app.extensionManager;
  const setting = (id, fallback) => manager.setting.get(`SafeScaler.${id}`) ?? fallback;
  const gpus = new GpuWatch(api);
  return {
    settings: {
      unit: () => setting("Panel.Unit", "GiB"),
      confirmStop: () => setting("Panel.ConfirmStop", true),
      alerts: () => setting("Alerts.Level", "serious"),
      notifyAtEnd: () => setting("Alerts.Notify", false),
    },
    confirm: (title, message) => manager.dialog.confirm({ title, message }),
    notify: (severity, summary, detail) => manager.toast.add({ severity, summary, detail, life: 8000 }),
    pictureUrl: (run, preview) => api.apiURL(`${BASE}/runs/${encodeURIComponent(run)}/previews/${encodeURIComponent(preview)}`),
    reportUrl: (run) => api.apiURL(`${BASE}/runs/${encodeURIComponent(run)}/report`),
    captionPictureUrl: (set, key) => api.apiURL(`${BASE}/data_sets/${encodeURIComponent(set)}/pictures/${encodeURIComponent(key)}`),
    // ComfyUI's own queue is the queue of runs: its own request takes a prompt off it.
    removeWaiting: (prompt) =>
      api.fetchApi("/queue", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ delete: [prompt] }),
      }),
    goOn: "Press Run with the same graph to go on from there.",
    gpus: () => gpus.list(),
  };
}

/** Memory of the devices as ComfyUI's server reads it; asked for only while somebody looks. */
class GpuWatch {
  constructor(api) {
    this.api = api;
    this.known = [];
    this.asked = 0;
  }

  list() {
    const now = Date.now();
    if (now - this.asked > STATS_MS) {
      this.asked = now;
      this.#ask();
    }
    return this.known;
  }

  async #ask() {
    try {
      const response = await this.api.fetchApi("/system_stats");
      const { devices } = await response.json();
      this.known = devices
        .filter((device) => device.vram_total > 0)
        .map((device, index) => ({
          name: device.type === "cpu" ? "RAM" : shortName(device.name, index),
          total: device.vram_total,
          free: device.vram_free,
        }));
    } catch {
      this.known = []; // the server restarts: the panel says so in its own words
    }
  }
}

/** "cuda:0 NVIDIA GeForce RTX 3060 : cudaMallocAsync" is "GPU 0 NVIDIA GeForce RTX 3060". */
export function shortName(name, index) {
  const words = String(name).split(" : ")[0].replace(/^\w+(:\d+)?\s*/, "");
  return `GPU ${index}${words ? ` ${words}` : ""}`;
}
