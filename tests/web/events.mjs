/** Events as a worker sends them. */

export function event(type, seq, step, data) {
  return { v: 1, seq, type, run_id: "20261129T171500Z-1a2b", step, time: 1_700_000_000 + seq, data };
}

export function stepFinished(seq, step, more = {}) {
  return event("StepFinished", seq, step, {
    applied: step, epoch: 0, loss: 0.5, loss_avg: 0.4, grad_norm: 1.5, lr: { unet: 1e-4, te1: 5e-5 }, loss_scale: 65536,
    rejected_steps: 0, samples_per_second: 2, seconds: 0.5, eta_seconds: 30, vram_gib: 7.5, clipped: false, ...more,
  }); // prettier-ignore
}

export function stepRejected(seq, step) {
  return event("StepRejected", seq, step, {
    applied: step - 1, epoch: 0, reason: "the loss is not a number", loss: null, grad_norm: null, loss_scale: 32768,
    rejected_steps: 1, in_a_row: 1, culprits: ["unet.mid"], samples: ["cat<1>.png"], nonfinite: ["loss", "grad_norm"],
  }); // prettier-ignore
}

export function runStarted(seq = 1) {
  return event("RunStarted", seq, 0, {
    total_steps: 20, parts: ["unet", "te1"], device: "cuda", precision: "bf16", pictures: 12, resumed_from: null,
  }); // prettier-ignore
}

export function runFinished(seq, step, status = "finished") {
  return event("RunFinished", seq, step, {
    status, message: status === "failed" ? "out of memory" : "", applied: step, rejected: 1, lora: "cat.safetensors", seconds: 90,
    checkpoint: "step-00000005",
  }); // prettier-ignore
}

export function snapshot(more = {}) {
  const sides = (values) => ({ min: values, max: values });
  const steps = [1, 2, 3];
  return {
    v: 1, now: 0, seq: 10,
    run: {
      run_id: "20261129T171500Z-1a2b", name: "cat", state: "running", live: true, node_ids: ["5"], paused: false, step: 3,
      total_steps: 20, started: 1_700_000_000, message: "", problem: "", rejected: 0,
    },
    phase: { phase: "training", done: 0, total: 20, detail: "" },
    curves: {
      stride: 1, steps, lr: { unet: [1e-4, 1e-4, 1e-4] }, rejected: [],
      metrics: {
        loss: sides([3, 2, 1]), loss_avg: sides([3, 2.5, 2]), grad_norm: sides([1, 1, 1]), loss_scale: sides([1, 1, 1]),
        seconds: sides([1, 1, 1]), vram_gib: sides([1, 1, 1]),
      },
    },
    validation: [{ step: 0, mean: 0.4, bands: [0.4], pictures: 2, seconds: 1 }],
    previews: [{ id: "0-0", step: 0, index: 0, prompt: "a cat", seed: 1, time: 0 }],
    checkpoints: [], events: [{ ...runStarted(1) }],
    health: { step: 2, rows: [{ module: "unet", step: 2, data: { norm: 0.5 } }], norms: { unet: [[2, 0.5]] } },
    memory: null, ...more,
  }; // prettier-ignore
}
