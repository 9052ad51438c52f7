// Pictures as SVG: runs packed over time on a device, a run's bytes against its budget, and its loss.
const SVG = "http://www.w3.org/2000/svg";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(size) {
  let power = 0;
  while (size >= 1024 && power < UNITS.length - 1) { size /= 1024; power += 1; }
  return `${power && size < 100 ? size.toFixed(1) : Math.round(size)} ${UNITS[power]}`;
}

export function span(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function element(name, attributes = {}, ...children) {
  const found = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

function picture(width, height, label, ...children) {
  return element("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);
}

const line = (x1, y1, x2, y2, kind) => element("svg:line", { x1, y1, x2, y2, class: kind });
const words = (x, y, text, kind = "", anchor = "start") => element("svg:text", { x, y, class: kind, "text-anchor": anchor }, text);

// Each run as a box: its seconds wide, its predicted bytes high, and as much of it filled as was measured.
export function strip(device, now, chosen) {
  const width = Math.max(320, Math.min(1180, document.body.clientWidth - 40)), height = 150, top = 8, bottom = 22;
  const begin = Math.min(now - 60, ...device.runs.map((run) => run.from)), end = Math.max(now + 60, ...device.runs.map((run) => run.to));
  const x = (time) => ((time - begin) / (end - begin)) * width;
  const high = (size) => (size / device.capacity_bytes) * (height - top - bottom);
  const placed = [];
  const svg = picture(width, height, `${device.name}: ${bytes(device.used_bytes)} of ${bytes(device.capacity_bytes)} promised. ` +
    device.runs.map((run) => `${run.name}, ${run.state}, ${bytes(run.bytes)}`).join("; "));
  for (const run of device.runs) {
    const beside = placed.filter((other) => other.from < run.to - 0.01 && other.to > run.from + 0.01).sort((a, b) => a.base - b.base);
    let base = 0;
    for (const other of beside) if (base + run.bytes > other.base && base < other.base + other.bytes) base = other.base + other.bytes;
    placed.push({ ...run, base });
    const left = x(run.from), wide = Math.max(2, x(run.to) - left), y = height - bottom - high(base + run.bytes);
    const box = element("svg:g", run.run === null ? {} : { cursor: "pointer" }, element("svg:rect", { x: left, y, width: wide, height: high(run.bytes), class: `box ${run.state}` }));
    if (run.measured_bytes) {
      const filled = high(Math.min(run.measured_bytes, run.bytes));
      box.append(element("svg:rect", { x: left + 1, y: height - bottom - high(base) - filled, width: Math.min(8, wide - 1), height: filled, class: "within" }));
    }
    box.append(element("svg:title", {}, `${run.name}: ${run.state}, ${bytes(run.bytes)} predicted` + (run.measured_bytes ? `, ${bytes(run.measured_bytes)} measured` : "")));
    if (wide > 60 && high(run.bytes) > 15) box.append(words(left + 13, y + 14, run.name.slice(0, Math.floor((wide - 14) / 7))));
    if (run.run !== null) box.addEventListener("click", () => chosen(run.run));
    svg.append(box);
  }
  const after = x(now) > width - 60;
  svg.append(line(x(now), top, x(now), height - bottom, "now"), words(x(now) + (after ? -4 : 4), height - 7, "now", "soft", after ? "end" : "start"),
    words(4, height - 7, `${span(now - begin)} ago`, "soft"));
  if (!after && end - now > 90) svg.append(words(width - 4, height - 7, `in ${span(end - now)}`, "soft", "end"));
  const caption = element("figcaption", {}, `${device.name}: ${bytes(device.used_bytes)} of ${bytes(device.capacity_bytes)} promised`);
  return element("figure", {}, caption, svg);
}

// What plain PyTorch would take, what was predicted, what was measured; and the budget as a limit.
export function bars(run) {
  if (!run.plan) return element("p", {}, run.refusal?.minimum_bytes ? `The smallest budget that would do: ${bytes(run.refusal.minimum_bytes)} (${run.refusal.minimum_bytes} bytes).` : run.ended ? "It was not planned." : "Not planned yet.");
  const rows = [["plain PyTorch", run.plan.plain_peak_bytes, "box"], ["predicted", run.plan.peak_bytes, "box"], ["measured", run.measured_peak_bytes, "within"]];
  const most = Math.max(run.plan.budget_bytes, ...rows.map((row) => row[1] || 0)), width = 480, left = 100, room = width - left - 90;
  const x = (size) => left + (size / most) * room;
  const told = rows.map(([name, size]) => `${name} ${size ? bytes(size) : "not yet"}`).join(", ");
  const svg = picture(width, 128, `Peak: ${told}; budget ${bytes(run.plan.budget_bytes)}`);
  rows.forEach(([name, size, kind], index) => {
    const y = 12 + index * 30;
    svg.append(words(left - 8, y + 15, name, "", "end"));
    if (size) svg.append(element("svg:rect", { x: left, y, width: Math.max(1, x(size) - left), height: 20, class: kind }));
    svg.append(words(width - 8, y + 15, size ? bytes(size) : "not yet", "soft", "end"));
  });
  const edge = x(run.plan.budget_bytes), late = edge > width - 120;
  svg.append(line(edge, 4, edge, 104, "limit"), words(late ? width - 6 : edge, 120, `budget ${bytes(run.plan.budget_bytes)}`, "soft", late ? "end" : "middle"));
  return svg;
}

export function curve(points, total, over = false) {
  const good = points.filter((point) => Number.isFinite(point.loss));
  if (!good.length) return element("p", {}, over ? "It took no step." : "No steps yet.");
  const width = 480, height = 128, left = 52, low = Math.min(...good.map((p) => p.loss)), high = Math.max(...good.map((p) => p.loss));
  const last = Math.max(total || 0, good.at(-1).step, 2), flat = high === low;
  const x = (step) => left + ((step - 1) / (last - 1)) * (width - left - 12), y = (loss) => (flat ? 54 : 10 + ((high - loss) / (high - low)) * 88);
  const svg = picture(width, height, `Loss, step ${good[0].step} to ${good.at(-1).step}: from ${good[0].loss.toPrecision(3)} to ${good.at(-1).loss.toPrecision(3)}`);
  svg.append(line(left, 102, width - 10, 102, "axis"), line(left, 6, left, 102, "axis"), words(left - 6, 16, high.toPrecision(3), "soft", "end"),
    words(left - 6, 102, low.toPrecision(3), "soft", "end"), words(width - 12, 120, `step ${last}`, "soft", "end"), words(left, 120, "1", "soft"));
  const every = Math.ceil(good.length / 480);
  svg.append(element("svg:polyline", { class: "curve", points: good.filter((_, n) => n % every === 0 || n === good.length - 1).map((p) => `${x(p.step).toFixed(1)},${y(p.loss).toFixed(1)}`).join(" ") }));
  return svg;
}

// The first objective of each trial that is done, in the order of trials, with the best so far as a line; the rest as marks below.
export function trials(study) {
  const done = study.trials.filter((trial) => trial.values.length && Number.isFinite(trial.values[0]));
  if (!done.length) return element("p", {}, "No trial is done yet.");
  const [name, direction] = study.objectives[0], losses = done.map((trial) => trial.values[0]);
  const width = 480, height = 128, left = 62, low = Math.min(...losses), high = Math.max(...losses), last = Math.max(1, study.trials.at(-1).number);
  const x = (trial) => left + 6 + (trial / last) * (width - left - 18), y = (value) => (high === low ? 54 : 10 + ((high - value) / (high - low)) * 84);
  const better = direction === "maximize" ? Math.max : Math.min, path = [];
  let best = null;
  for (const trial of done) { best = best === null ? trial.values[0] : better(best, trial.values[0]); path.push(`${x(trial.number).toFixed(1)},${y(best).toFixed(1)}`); }
  const svg = picture(width, height, `${name} of ${done.length} trials: from ${low.toPrecision(3)} to ${high.toPrecision(3)}, best so far ${best.toPrecision(3)}`);
  svg.append(line(left, 102, width - 10, 102, "axis"), line(left, 6, left, 102, "axis"), words(left - 6, 16, high.toPrecision(3), "soft", "end"),
    words(left - 6, 102, low.toPrecision(3), "soft", "end"), words(left, 120, `${name}, by trial`, "soft"), words(width - 12, 120, String(last), "soft", "end"),
    element("svg:polyline", { class: "curve", points: path.join(" ") }));
  for (const trial of done) svg.append(element("svg:circle", { cx: x(trial.number), cy: y(trial.values[0]), r: 3.5, class: "within" }, element("svg:title", {}, `trial ${trial.number}: ${trial.values[0]}`)));
  return svg;
}
