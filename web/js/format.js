/** Numbers, times and sizes as a person reads them. */

/** A number in about `digits` significant digits: 0.0123, 1.5, 12,300, 1.0e-4. */
export function number(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

/** The label of a tick on an axis whose ticks are `step` apart: as many digits as tell neighbours apart. */
export function tick(value, step) {
  if (typeof value !== "number") return "";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) {
    const digits = step > 0 ? Math.max(0, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step))) : 0;
    return value.toExponential(Math.min(digits, 4)).replace("e+", "e");
  }
  const decimals = step > 0 ? Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) : 3;
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 8), minimumFractionDigits: 0 });
}

/** Seconds as "45 s", "12 min", "3 h 05 min". */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.round(hours / 24)} days`;
}

/** Bytes as "12 MB" (decimal, as disks are sold) or, with `binary`, "1.5 GiB" (as memory is counted). */
export function bytes(value, binary = false) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const base = binary ? 1024 : 1000;
  const units = binary ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let rest = value;
  while (rest >= base && unit < units.length - 1) {
    rest /= base;
    unit += 1;
  }
  return `${unit === 0 || rest >= 100 ? Math.round(rest) : Number(rest.toPrecision(3))} ${units[unit]}`;
}

/** A GiB figure in the unit the user chose ("GiB" or "GB"). */
export function memory(gib, unit = "GiB") {
  if (typeof gib !== "number" || !Number.isFinite(gib)) return "–";
  return unit === "GB" ? `${number((gib * 1024 ** 3) / 1e9)} GB` : `${number(gib)} GiB`;
}

/** Unix seconds as the time of day, with the date when it is another day than `now`. */
export function clock(seconds, now = Date.now() / 1000) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const date = new Date(seconds * 1000);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const sameDay = date.toDateString() === new Date(now * 1000).toDateString();
  return sameDay ? time : `${date.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en-US")} ${count === 1 ? one : many}`;
}

/** A file name's part after the last slash. */
export function bareName(file) {
  return String(file ?? "").split(/[\\/]/).pop();
}
