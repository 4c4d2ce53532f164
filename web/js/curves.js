/**
 * Curves over steps in bounded memory: a run of any length is kept in at most `capacity` buckets of the smallest and
 * largest value, so an outlier never disappears and adding a step costs the same at step 100,000 as at step 1.
 */

export const CURVE_NAMES = ["loss", "loss_avg", "grad_norm", "loss_scale", "seconds", "vram_gib"];

export class Curves {
  /** @param {string[]} names @param {number} capacity buckets, an even number */
  constructor(names = CURVE_NAMES, capacity = 600) {
    this.names = [...names];
    this.capacity = capacity;
    this.stride = 1;
    this.first = null;
    this.count = 0;
    this.version = 0;
    this.low = Object.fromEntries(this.names.map((name) => [name, new Float64Array(capacity).fill(NaN)]));
    this.high = Object.fromEntries(this.names.map((name) => [name, new Float64Array(capacity).fill(NaN)]));
  }

  /** Curves of a snapshot (`{stride, steps, metrics: {name: {min, max}}, lr: {part: [...]}}`). */
  static from(table, capacity = 600) {
    const rates = Object.keys(table?.lr ?? {});
    const curves = new Curves([...CURVE_NAMES, ...rates.map(rateName)], capacity);
    if (!table || table.steps.length === 0) return curves;
    curves.first = table.steps[0];
    curves.stride = table.stride;
    while ((table.steps[table.steps.length - 1] - curves.first) / curves.stride >= capacity) curves.stride *= 2;
    table.steps.forEach((step, row) => {
      const bucket = curves.#bucket(step);
      for (const [name, sides] of Object.entries(table.metrics)) {
        curves.#merge(name, bucket, sides.min[row]);
        curves.#merge(name, bucket, sides.max[row]);
      }
      for (const part of rates) curves.#merge(rateName(part), bucket, table.lr[part][row]);
    });
    return curves;
  }

  /** Add the values of one step; names not known yet begin here, null and what is not finite leave a gap. */
  add(step, values) {
    if (this.first === null) this.first = step;
    if (step < this.first) return;
    while ((step - this.first) / this.stride >= this.capacity) this.#fold();
    const bucket = this.#bucket(step);
    for (const [name, value] of Object.entries(values)) {
      if (!(name in this.low)) this.#begin(name);
      this.#merge(name, bucket, value);
    }
    this.version += 1;
  }

  /** Forget the steps after `step`: the run went back to it. The bucket that holds `step` stays whole. */
  truncate(step) {
    if (this.first === null) return;
    const kept = Math.max(0, Math.floor((step - this.first) / this.stride) + 1);
    for (const name of this.names) {
      this.low[name].fill(NaN, kept);
      this.high[name].fill(NaN, kept);
    }
    this.count = Math.min(this.count, kept);
    if (this.count === 0) {
      this.first = null;
      this.stride = 1;
    }
    this.version += 1;
  }

  /** Points to draw: one a bucket while a bucket is one step, else its smallest and its largest value. */
  points(names) {
    const single = this.stride === 1;
    const length = single ? this.count : 2 * this.count;
    const x = new Array(length);
    for (let bucket = 0; bucket < this.count; bucket += 1) {
      const start = this.first + bucket * this.stride;
      if (single) x[bucket] = start;
      else {
        x[2 * bucket] = start;
        x[2 * bucket + 1] = start + this.stride / 2;
      }
    }
    return { x, lines: names.map((name) => this.#line(name, length, single)) };
  }

  /** The newest finite value of a curve, or null. */
  last(name) {
    const values = this.high[name];
    for (let bucket = this.count - 1; values && bucket >= 0; bucket -= 1) {
      if (!Number.isNaN(values[bucket])) return values[bucket];
    }
    return null;
  }

  has(name) {
    return this.last(name) !== null;
  }

  get rates() {
    return this.names.filter((name) => name.startsWith("lr:")).map((name) => name.slice(3));
  }

  #line(name, length, single) {
    const y = new Array(length).fill(null);
    const low = this.low[name];
    const high = this.high[name];
    for (let bucket = 0; low && bucket < this.count; bucket += 1) {
      if (Number.isNaN(low[bucket])) continue;
      if (single) y[bucket] = low[bucket];
      else {
        y[2 * bucket] = low[bucket];
        y[2 * bucket + 1] = high[bucket];
      }
    }
    return y;
  }

  #bucket(step) {
    const bucket = Math.floor((step - this.first) / this.stride);
    if (bucket >= this.count) this.count = bucket + 1;
    return bucket;
  }

  #merge(name, bucket, value) {
    if (typeof value !== "number" || !Number.isFinite(value)) return;
    const low = this.low[name];
    const high = this.high[name];
    // NaN compares false, so the first value of a bucket is always taken.
    if (!(low[bucket] <= value)) low[bucket] = value;
    if (!(high[bucket] >= value)) high[bucket] = value;
  }

  #begin(name) {
    this.names.push(name);
    this.low[name] = new Float64Array(this.capacity).fill(NaN);
    this.high[name] = new Float64Array(this.capacity).fill(NaN);
  }

  /** Two buckets become one, and half the room is free again. */
  #fold() {
    const half = Math.ceil(this.count / 2);
    for (const name of this.names) {
      const low = new Float64Array(this.capacity).fill(NaN);
      const high = new Float64Array(this.capacity).fill(NaN);
      const before = [this.low[name], this.high[name]];
      this.low[name] = low;
      this.high[name] = high;
      for (let bucket = 0; bucket < this.count; bucket += 1) {
        this.#merge(name, bucket >> 1, before[0][bucket]);
        this.#merge(name, bucket >> 1, before[1][bucket]);
      }
    }
    this.stride *= 2;
    this.count = half;
  }
}

/** The curve of a part's learning rate. */
export function rateName(part) {
  return `lr:${part}`;
}
