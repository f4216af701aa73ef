// Charts of one or several runs, drawn in the browser from what kit/ui/curves.py packs. No library, no request.
// Runs inside gr.HTML's js_on_load: `element`, `props` and `watch` are Gradio's.
const NS = "http://www.w3.org/2000/svg";
const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22, HEIGHT = 190;
const root = element.querySelector(".charts") || element;
let drawn = [], cursor = null, last = null, frame = 0;

function svg(name, attributes, parent) {
  const made = document.createElementNS(NS, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(made);
  return made;
}
function html(name, kind, text, parent) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}
function numbers(packed) {
  if (!packed) return null;
  const [low, high, text] = packed, raw = atob(text), count = raw.length / 2, out = new Array(count);
  const scale = ((high - low) || 1) / 65534;
  for (let i = 0; i < count; i++) {
    const place = raw.charCodeAt(2 * i) | (raw.charCodeAt(2 * i + 1) << 8);
    out[i] = place === 65535 ? null : low + place * scale;
  }
  return out;
}
function say(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
}
function tick(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential() : value.toLocaleString("en", { maximumFractionDigits: 4 });
}
function ticks(low, high, count) {
  if (!(high > low)) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  const rough = (high - low) / count, power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= rough * 0.999);
  const out = [];
  for (let i = Math.floor(low / step + 1e-9); ; i++) { out.push(+(i * step).toPrecision(12)); if (i * step >= high - step * 1e-9) break; }
  return out;
}
function smooth(values) {  // a running mean over a fortieth of the points
  const half = Math.max(1, Math.floor(values.length / 80)), out = [];
  for (let i = 0; i < values.length; i++) {
    let sum = 0, count = 0;
    for (let j = Math.max(0, i - half); j <= Math.min(values.length - 1, i + half); j++) if (values[j] !== null) { sum += values[j]; count++; }
    out.push(count ? sum / count : null);
  }
  return out;
}
function unpack(panel, grids) {
  const series = panel.series.map((one, at) => {
    const made = { name: one.name, color: `var(--series${1 + (one.color ?? at) % 6})`, last: one.last };
    if (one.points) {
      made.x = one.points.map(p => p[0]); made.y = one.points.map(p => p[1]); made.whiskers = one.whiskers || []; made.dots = true;
      made.last = made.y[made.y.length - 1];
    } else {
      made.x = grids[one.grid || 0]; made.y = numbers(one.v);
      made.least = numbers(one.a); made.most = numbers(one.b);
      made.lo = numbers(one.lo); made.hi = numbers(one.hi);
      if (panel.smooth !== false && !panel.stacked && made.x.length >= 60) made.mean = smooth(made.y);
    }
    return made;
  });
  if (panel.stacked && series[0].x.length > 1) {  // parts of a whole: each lies on those below it
    let below = series[0].x.map(() => 0);
    for (const one of series) { one.floor = below; below = one.sum = one.y.map((y, i) => below[i] + (y ?? 0)); }
  }
  return series;
}
function path(x, y, px, py) {
  let text = "", pen = false;
  for (let i = 0; i < x.length; i++) {
    if (y[i] === null) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${px(x[i]).toFixed(1)} ${py(y[i]).toFixed(1)}`; pen = true;
  }
  return text;
}
function area(x, low, high, px, py) {
  const there = [], back = [];
  for (let i = 0; i < x.length; i++) if (low[i] !== null && high[i] !== null) {
    there.push(`${px(x[i]).toFixed(1)} ${py(low[i]).toFixed(1)}`); back.push(`${px(x[i]).toFixed(1)} ${py(high[i]).toFixed(1)}`);
  }
  return there.length > 1 ? `M${there.join("L")}L${back.reverse().join("L")}Z` : "";
}
function across_all(xs, data) {  // the steps of a panel; of one point those of the whole run, so that it stands where it belongs
  const range = list => list.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  const [first, end] = range(xs);
  return first === end ? range([...data.grids.flat(), first]) : [first, end];
}
function draw(panel, data, width, target) {
  const series = unpack(panel, data.grids), card = html("figure", "chart-card", undefined, target);
  const head = html("figcaption", "", undefined, card);
  html("b", "", panel.title, head); html("small", "", panel.label, head);
  const legend = html("div", "legend", undefined, card);
  const xs = [], ys = [];
  for (const one of series) {
    for (const x of one.x) xs.push(x);
    for (const list of [one.sum || one.y, one.least, one.most, one.lo, one.hi]) for (const y of list || []) if (y !== null) ys.push(y);
    for (const w of one.whiskers || []) ys.push(w[1], w[2]);
  }
  const [first, end] = across_all(xs, data), single = first === end;
  let low = ys.reduce((a, b) => Math.min(a, b), Infinity), high = ys.reduce((a, b) => Math.max(a, b), -Infinity);
  if (panel.low !== undefined) low = Math.min(low, panel.low);
  if (panel.high !== undefined) high = Math.max(high, panel.high);
  if (low === high && low === 0) high = 1;
  const levels = ticks(low, high, 4), bottom = levels[0], top = levels[levels.length - 1];
  const px = x => single ? (LEFT + width - RIGHT) / 2 : LEFT + (x - first) / (end - first) * (width - LEFT - RIGHT);
  const py = y => TOP + (top - y) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
  const words = series.map(one => { const known = one.y.filter(y => y !== null);
    return known.length ? `${one.name}: from ${say(known[0])} to ${say(known[known.length - 1])}, lowest ${say(known.reduce((a, b) => Math.min(a, b)))}, highest ${say(known.reduce((a, b) => Math.max(a, b)))}` : `${one.name}: nothing yet`; });
  const image = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width: "100%", height: HEIGHT, role: "img", tabindex: "0",
    "aria-label": `${panel.title}, ${panel.label}, ${single ? `step ${first}` : `steps ${first} to ${end}`}. ${words.join("; ")}. Arrow keys read single steps.` }, card);
  for (const level of levels) {
    svg("line", { x1: LEFT, x2: width - RIGHT, y1: py(level), y2: py(level), class: "grid" }, image);
    svg("text", { x: LEFT - 6, y: py(level) + 4, "text-anchor": "end" }, image).textContent = tick(level);
  }
  const across = single ? [first] : ticks(first, end, width < 360 ? 3 : 5).filter(t => t >= first && t <= end && Number.isInteger(t));
  for (const tick of across) svg("text", { x: px(tick), y: HEIGHT - 6, "text-anchor": px(tick) > width - 30 ? "end" : px(tick) < LEFT + 8 ? "start" : "middle" }, image).textContent = tick.toLocaleString("en");
  for (const [step, text] of data.marks || []) if (step >= first && step <= end) {
    const line = svg("line", { x1: px(step), x2: px(step), y1: TOP, y2: HEIGHT - BOTTOM, class: "mark" }, image);
    svg("title", {}, line).textContent = `step ${step}: ${text}`;
  }
  for (const one of series) {
    if (one.sum) { svg("path", { d: area(one.x, one.floor, one.sum, px, py), style: `fill:${one.color};fill-opacity:.75` }, image); continue; }
    if (one.lo) svg("path", { d: area(one.x, one.lo, one.hi, px, py), style: `fill:${one.color};fill-opacity:.14` }, image);
    if (one.least) svg("path", { d: area(one.x, one.least, one.most, px, py), style: `fill:${one.color};fill-opacity:.22` }, image);
    const faint = one.mean ? ";stroke-opacity:.35;stroke-width:1" : "";
    svg("path", { d: path(one.x, one.y, px, py), fill: "none", style: `stroke:${one.color};stroke-width:1.8${faint}` }, image);
    if (one.mean) svg("path", { d: path(one.x, one.mean, px, py), fill: "none", style: `stroke:${one.color};stroke-width:2` }, image);
    for (const [x, l, h] of one.whiskers || []) svg("path", { d: `M${px(x)} ${py(h)}V${py(l)}m-4 0h8M${px(x) - 4} ${py(h)}h8`, fill: "none", style: `stroke:${one.color};stroke-width:1.4` }, image);
    if (one.dots || one.y.filter(y => y !== null).length === 1) one.x.forEach((x, i) => one.y[i] !== null && svg("circle", { cx: px(x), cy: py(one.y[i]), r: 3.2, style: `fill:${one.color}` }, image));
  }
  const needle = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "needle", visibility: "hidden" }, image);
  const state = { image, series, legend, needle, px, width, first, end };
  const at = x => Math.round(first + (x - LEFT) / (width - LEFT - RIGHT) * (end - first));
  image.addEventListener("pointermove", e => { const box = image.getBoundingClientRect(); point(at((e.clientX - box.left) * width / box.width)); });
  image.addEventListener("pointerleave", () => point(null));
  image.addEventListener("blur", () => point(null));
  image.addEventListener("keydown", e => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (e.key === "Home" || e.key === "End") { point(e.key === "Home" ? first : end); e.preventDefault(); }
    else if (move) { const jump = Math.max(1, Math.round((end - first) / 100)); point(Math.min(end, Math.max(first, (cursor ?? end) + move * jump))); e.preventDefault(); }
  });
  drawn.push(state);
}
function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (list[middle] <= x) low = middle; else high = middle; }
  return Math.abs(list[low] - x) <= Math.abs(list[high] - x) ? low : high;
}
function point(x) {
  cursor = x;
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => drawn.forEach(show));
}
function show(state) {
  const x = cursor === null ? null : Math.min(state.end, Math.max(state.first, cursor));
  state.needle.setAttribute("visibility", x === null ? "hidden" : "visible");
  state.legend.textContent = "";
  if (x !== null) { state.needle.setAttribute("x1", state.px(x)); state.needle.setAttribute("x2", state.px(x)); html("span", "at", `step ${x.toLocaleString("en")}`, state.legend); }
  for (const one of state.series) {
    const entry = html("span", "entry", undefined, state.legend), swatch = html("i", "", undefined, entry);
    swatch.style.borderTopColor = one.color;
    if (state.series.length > 1 || one.name !== "mean") html("span", "", one.name, entry);
    const i = x === null ? -1 : nearest(one.x, x), value = i < 0 ? one.last : one.y[i];
    html("b", "", say(value), entry);
    if (i >= 0 && one.least && one.least[i] !== one.most[i]) html("small", "", `${say(one.least[i])} to ${say(one.most[i])}`, entry);
    else if (i >= 0 && one.lo) html("small", "", `${say(one.lo[i])} to ${say(one.hi[i])}`, entry);
    const whisker = i >= 0 && (one.whiskers || []).find(w => w[0] === one.x[i]);
    if (whisker) html("small", "", `${say(whisker[1])} to ${say(whisker[2])}`, entry);
  }
}
function redraw() {
  const place = element.querySelector(".charts");
  if (!place) return;
  let data = null;
  try { data = props.value ? JSON.parse(props.value) : null; } catch { data = null; }
  if (!data || !data.panels) { place.textContent = ""; drawn = []; return; }
  const room = place.clientWidth;
  if (!room) return;  // in a tab that is not shown
  const columns = room >= 1000 ? 3 : room >= 620 ? 2 : 1, width = Math.floor((room - 12 * (columns - 1)) / columns) - 26;
  const focused = drawn.findIndex(state => state.image === document.activeElement);
  const fresh = document.createDocumentFragment();
  drawn = [];
  for (const panel of data.panels) draw(panel, data, width, fresh);
  place.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  place.replaceChildren(fresh);
  drawn.forEach(show);
  if (focused >= 0 && drawn[focused]) drawn[focused].image.focus({ preventScroll: true });
  last = room;
}
watch("value", redraw);
new ResizeObserver(() => { const place = element.querySelector(".charts"); if (place && place.clientWidth && place.clientWidth !== last) redraw(); }).observe(element);
redraw();
