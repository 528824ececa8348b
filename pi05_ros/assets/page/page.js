"use strict";

const PERIOD_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
let shownCount = -1;

// Text only ever enters the page as text, never as markup: prompts and names come from other machines.
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const rounded = (value) => Number(value.toPrecision(3)).toString();

function plot(name, unit, values, executed) {
  const low = Math.min(...values), high = Math.max(...values);
  // A constant line stands in the middle; the labels say its value.
  const span = high - low || 1, base = high === low ? low - 0.5 : low;
  const last = Math.max(values.length - 1, 1);
  const svg = shape("svg", {viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": name});
  const points = values.map((value, row) => `${(100 * row / last).toFixed(2)},${(38 - 36 * (value - base) / span).toFixed(2)}`);
  svg.append(shape("polyline", {points: points.join(" ")}));
  if (executed && executed < values.length) {
    const x = 100 * executed / last;
    svg.append(shape("line", {x1: x, x2: x, y1: 0, y2: 40, class: "executed"}));
  }
  const box = element("div", undefined, "plot"), head = element("div");
  head.append(element("b", name), element("span", `${rounded(low)} … ${rounded(high)} ${unit}`));
  box.append(head, svg);
  return box;
}

function showCameras(state) {
  const seen = new Set(state.chunk ? state.chunk.pictures : []);
  byId("cameras").replaceChildren(...state.slots.map(({slot, camera}) => {
    const figure = element("figure");
    if (seen.has(slot)) {
      const image = element("img");
      image.alt = `${slot} as the model sees it`;
      image.src = `/page/picture/${encodeURIComponent(slot)}?${state.count}`;
      figure.append(image);
    } else {
      figure.append(element("div", camera === null ? "absent" : "nothing yet", "absent"));
    }
    figure.append(element("figcaption", camera === null ? slot : `${slot} ← ${camera}`));
    return figure;
  }));
}

function showChunk(chunk) {
  const columns = chunk.names.map((_, column) => chunk.actions.map((row) => row[column]));
  byId("plots").replaceChildren(
    ...columns.map((values, column) => plot(chunk.names[column], chunk.units[column], values, chunk.executed_steps)));
}

function showChunkFacts(chunk) {
  const step = chunk.step_time_s ? `${rounded(chunk.step_time_s * 1000)} ms a step` : "step time unknown";
  const flags = chunk.guard_flags.length ? ` · ${chunk.guard_flags.join(", ")}` : "";
  const clamped = chunk.clamp_count ? ` · ${chunk.clamp_count} values clamped` : "";
  byId("chunk-facts").textContent = `“${chunk.prompt}” · ${chunk.age_s.toFixed(1)} s ago for the ${chunk.asked_by} · ` +
    `${chunk.actions.length} steps, ${step}, dashed: end of the executed steps${clamped}${flags}`;
}

function showLatency(latency, chunk) {
  const stages = chunk ? Object.entries(chunk.timings_ms).map(([name, ms]) => `${name} ${ms.toFixed(1)}`).join(", ") : "";
  byId("latency-facts").textContent =
    `p50 ${latency.p50_ms.toFixed(1)} ms, p95 ${latency.p95_ms.toFixed(1)} ms, waiting included. Last (ms): ${stages}`;
  let from = latency.counts.findIndex((count) => count > 0);
  let to = latency.counts.length - [...latency.counts].reverse().findIndex((count) => count > 0);
  from = Math.max(0, from - 1);
  to = Math.min(latency.counts.length, Math.max(to + 1, from + 6));
  const counts = latency.counts.slice(from, to), most = Math.max(...counts, 1), width = 100 / counts.length;
  const svg = shape("svg", {viewBox: "0 0 100 30", preserveAspectRatio: "xMinYMid", role: "img", "aria-label": "latency histogram"});
  counts.forEach((count, index) => {
    const height = 22 * count / most, edge = latency.edges_ms[from + index];
    svg.append(shape("rect", {x: index * width + 0.4, y: 25 - height, width: width - 0.8, height}));
    const label = shape("text", {x: (index + 0.5) * width, y: 29, "text-anchor": "middle"});
    label.textContent = edge === undefined ? "more" : `<${edge}`;
    const number = shape("text", {x: (index + 0.5) * width, y: 24 - height, "text-anchor": "middle"});
    number.textContent = count || "";
    svg.append(label, number);
  });
  byId("histogram").replaceChildren(svg);
}

function show(state) {
  const badge = byId("state");
  badge.textContent = state.active ? "active" : "not active";
  badge.className = `badge ${state.active ? "active" : "inactive"}`;
  byId("reason").hidden = state.active;
  byId("reason").textContent = state.reason;
  byId("who").textContent = `${state.profile} · ${state.checkpoint} · ${state.count} chunks · ${state.queue} waiting`;
  const ages = Object.entries(state.ages_s);
  byId("ages-section").hidden = ages.length === 0;
  byId("ages").replaceChildren(...ages.map(([name, age]) => {
    const row = element("tr");
    row.append(element("td", name), element("td", age < 0 ? "nothing yet" : `${(age * 1000).toFixed(0)} ms`));
    return row;
  }));
  byId("no-errors").hidden = state.errors.length > 0;
  byId("errors").replaceChildren(...state.errors.map((error) => {
    const item = element("li");
    item.append(element("b", error.code), ` ${error.message} `,
      element("span", `(${error.door}, ${Math.max(0, state.now - error.at).toFixed(0)} s ago)`, "facts"));
    return item;
  }));
  if (state.chunk) showChunkFacts(state.chunk);
  if (state.latency) showLatency(state.latency, state.chunk);
  if (state.count !== shownCount) {
    showCameras(state);
    if (state.chunk) showChunk(state.chunk);
    shownCount = state.count;
  }
}

async function refresh() {
  try {
    const response = await fetch("/page/state", {cache: "no-store"});
    if (response.status === 401) return location.reload();
    show(await response.json());
  } catch {
    byId("state").textContent = "no connection";
    byId("state").className = "badge inactive";
  }
  setTimeout(refresh, document.hidden ? 5 * PERIOD_MS : PERIOD_MS);
}

refresh();
