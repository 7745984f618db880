"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
function make(name, values, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in values) made.setAttribute(key, values[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
const nameOf = step => (step < 0 ? "code of no step" : data.steps[step][0]);
function kindOf(step, kind) {
  if (kind !== "code" && kind !== "stamped") return kind;
  return step < 0 ? "other" : data.steps[step][2];
}
function ticks(low, high, most) {
  // round numbers of an axis: 1, 2 or 5 times a power of ten apart
  const rough = (high - low) / most, ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * [1, 2, 5, 10].find(times => times * ten >= rough), found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(+(n * step).toPrecision(12));
  return found;
}
const cycles = value => Math.round(value).toLocaleString("en") + (Math.round(value) === 1 ? " cycle" : " cycles");

// ---- what is chosen: steps, lit in every pane and every timeline

const panes = ["program", "cuda", "sass"].map(byId).filter(Boolean);
let chosen = new Set();
function choose(steps, from) {
  chosen = new Set(steps);
  const ops = new Set(steps.flatMap(step => data.steps[step][1]));
  for (const pane of panes) {
    let first = null;
    for (const line of pane.children) {
      const own = line.dataset.s !== undefined ? chosen.has(+line.dataset.s) : ops.has(+line.dataset.o);
      line.classList.toggle("on", own);
      // of a step that stands in several places the steady loop's, which comes second, is shown
      if (own && (first === null || (first.count < 2 && line.previousSibling !== first.last))) first = { line, count: first ? first.count + 1 : 1 };
      if (own && first) first.last = line;
    }
    if (first && pane !== from) pane.scrollTop = first.line.offsetTop - pane.offsetTop - pane.clientHeight / 3;
  }
  timelines.forEach(one => one.paint());
}
function stepsOf(line) {
  if (line.dataset.s !== undefined) return [+line.dataset.s];
  const op = +line.dataset.o;
  return data.steps.flatMap(([, ops], number) => (ops.includes(op) ? [number] : []));
}
for (const pane of panes) {
  const pick = line => {
    if (!line || line.parentNode !== pane || (line.dataset.s === undefined && line.dataset.o === undefined)) return;
    pane.at = line;
    choose(stepsOf(line), pane);
    tell([...chosen].map(nameOf).join(", ") || "no step does this alone");
  };
  pane.addEventListener("click", event => pick(event.target.closest(".lines > div")));
  pane.addEventListener("keydown", event => {
    const way = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!way) return;
    event.preventDefault();
    let line = pane.at ? pane.at[way] : pane.firstElementChild;
    while (line && line.dataset.s === undefined && line.dataset.o === undefined) line = line[way];
    if (!line) return;
    pick(line);
    line.scrollIntoView({ block: "nearest" });
  });
}
function tell(text) { if (byId("told")) byId("told").textContent = text; }

// The CUDA begins with the program and its schedule as comments: the kernel itself is shown first.
const kernel = byId("cuda") && [...byId("cuda").children].find(line => line.textContent.includes("__global__"));
if (kernel) kernel.parentNode.scrollTop = kernel.offsetTop - kernel.parentNode.offsetTop;

// ---- timelines

const LABEL = 118, ROW = 24, GAP = 5, TOP = 22;
class Timeline {
  constructor(box) {
    this.box = box;
    this.own = data.timelines[+box.dataset.loop];
    this.from = 0;
    this.to = this.own.cycles;
    this.at = null;
    this.svg = make("svg", { height: TOP + this.own.rows.length * (ROW + GAP) + 4 }, box);
    this.layer = make("g", {}, this.svg);
    this.events();
    this.draw();
    new ResizeObserver(() => this.draw()).observe(box);
  }
  label() { return this.box.clientWidth < 600 ? 74 : LABEL; }
  x(cycle) { return this.label() + ((cycle - this.from) / (this.to - this.from)) * (this.box.clientWidth - this.label() - 6); }
  draw() {
    this.layer.replaceChildren();
    const width = this.box.clientWidth, left = this.label();
    this.bars = [];
    this.own.rows.forEach((row, number) => {
      const y = TOP + number * (ROW + GAP);
      make("text", { x: 6, y: y + 16 }, this.layer, width < 600 ? row.name.replace(/ring |slot |,/g, "") : row.name);
      row.bars.forEach((bar, place) => {
        if (bar[1] <= this.from || bar[0] >= this.to) return;
        const x = Math.max(left, this.x(bar[0])), end = Math.min(width - 6, this.x(bar[1]));
        const kind = kindOf(bar[2], bar[3]);
        const even = bar[4] && bar[4] !== data.timelines[0].rows[0].name ? " even" : "";
        const rect = make("rect", { x, y, width: Math.max(0.6, end - x), height: ROW, class: kind + even }, this.layer);
        Object.assign(rect, { row: number, place, bar, kind: kind + even });
        this.bars.push(rect);
        const text = bar[3] === "held" ? "in use" : nameOf(bar[2]).replace(/^(Run|Issue|Fill) /, "");
        if (end - x > text.length * 6.2 + 4) make("text", { x: x + 3, y: y + 16 }, this.layer, text);
      });
    });
    for (const cycle of ticks(this.from, this.to, Math.max(2, Math.floor((width - left) / 110)))) {
      if (this.x(cycle) < width - 40) make("text", { x: this.x(cycle), y: 14, class: "dim" }, this.layer, cycle.toLocaleString("en"));
    }
    this.paint();
  }
  paint() {
    const wanted = byId("search").value.trim().toLowerCase();
    for (const rect of this.bars) {
      const hit = !wanted || nameOf(rect.bar[2]).toLowerCase().includes(wanted);
      const at = this.at && this.at[0] === rect.row && this.at[1] === rect.place;
      rect.setAttribute("class", rect.kind + (hit ? "" : " faint") + (chosen.has(rect.bar[2]) ? " on" : "") + (at ? " at" : ""));
    }
  }
  describe([begin, end, step, kind, group], row) {
    const done = { copy: "is copied", held: "is in use", matmul: "on the tensor core" + (group ? " for " + group : "") }[kind];
    return `${this.own.rows[row].name}: ${nameOf(step)}${done ? ", " + done : ""}, ${cycles(end - begin)} from ${Math.round(begin).toLocaleString("en")}`;
  }
  pick(row, place) {
    const bar = this.own.rows[row].bars[place];
    if (!bar) return;
    this.at = [row, place];
    const width = this.to - this.from;
    if (bar[0] < this.from || bar[1] > this.to) this.window(Math.max(0, (bar[0] + bar[1] - width) / 2), width);
    choose(bar[2] < 0 ? [] : [bar[2]], null);
    tell(this.describe(bar, row));
  }
  window(from, width) {
    width = Math.min(this.own.cycles, Math.max(8, width));
    this.from = Math.min(Math.max(0, from), this.own.cycles - width);
    this.to = this.from + width;
    this.draw();
  }
  zoom(factor, about) {
    const middle = about === undefined ? (this.at ? this.own.rows[this.at[0]].bars[this.at[1]][0] : (this.from + this.to) / 2) : about;
    const width = (this.to - this.from) * factor;
    this.window(middle - ((middle - this.from) / (this.to - this.from)) * width, width);
  }
  cycle(event) {
    const inside = (event.clientX - this.box.getBoundingClientRect().left - this.label()) / (this.box.clientWidth - this.label() - 6);
    return this.from + inside * (this.to - this.from);
  }
  move(way) {
    const [row, place] = this.at || [0, -1];
    if (way === "ArrowRight" || way === "ArrowLeft") return this.pick(row, place + (way === "ArrowRight" ? 1 : -1));
    const other = row + (way === "ArrowDown" ? 1 : -1);
    if (!this.own.rows[other]) return undefined;
    const begin = place < 0 ? 0 : this.own.rows[row].bars[place][0];
    const after = this.own.rows[other].bars.findIndex(bar => bar[1] > begin);
    return this.pick(other, Math.max(0, after));
  }
  events() {
    let drag = null;
    const box = this.box;
    box.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaY) < Math.abs(event.deltaX)) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.cycle(event));
    }, { passive: false });
    box.addEventListener("pointerdown", event => { drag = { x: event.clientX, from: this.from, far: false }; });
    box.addEventListener("pointermove", event => {
      const rect = event.target.closest("rect");
      if (rect && rect.bar && !drag) tell(this.describe(rect.bar, rect.row));
      if (!drag || !event.buttons) return;
      const width = this.to - this.from;
      drag.far = drag.far || Math.abs(event.clientX - drag.x) > 4;
      if (drag.far) this.window(drag.from - ((event.clientX - drag.x) / (box.clientWidth - this.label())) * width, width);
    });
    box.addEventListener("pointerup", event => {
      const rect = event.target.closest("rect");
      if (drag && !drag.far && rect && rect.bar) this.pick(rect.row, rect.place);
      drag = null;
    });
    box.addEventListener("keydown", event => {
      if (event.key.startsWith("Arrow")) this.move(event.key);
      else if (event.key === "+" || event.key === "=") this.zoom(0.5);
      else if (event.key === "-") this.zoom(2);
      else if (event.key.toLowerCase() === "f") this.window(0, this.own.cycles);
      else if (event.key === "Escape") { this.at = null; choose([], null); tell(""); }
      else return;
      event.preventDefault();
    });
  }
}
const timelines = [];
for (const box of document.querySelectorAll(".timeline")) timelines.push(new Timeline(box));
if (timelines.length) {
  byId("in").onclick = () => timelines.forEach(one => one.zoom(0.5));
  byId("out").onclick = () => timelines.forEach(one => one.zoom(2));
  byId("fit").onclick = () => timelines.forEach(one => one.window(0, one.own.cycles));
  const search = byId("search");
  let hits = [], next = 0;
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    hits = [];
    for (const line of panes.flatMap(pane => [...pane.children])) {
      const found = Boolean(wanted) && line.textContent.toLowerCase().includes(wanted);
      line.classList.toggle("found", found);
      if (found) hits.push(line);
    }
    next = 0;
    const bars = wanted ? timelines.flatMap(one => one.own.rows.flatMap(row => row.bars)).filter(bar => nameOf(bar[2]).toLowerCase().includes(wanted)).length : 0;
    byId("hits").textContent = wanted ? `${bars} bars, ${hits.length} lines${hits.length ? "; Enter shows the next line" : ""}` : "";
    timelines.forEach(one => one.paint());
  });
  search.addEventListener("keydown", event => {
    if (event.key !== "Enter" || !hits.length) return;
    const line = hits[next++ % hits.length];
    line.parentNode.scrollTop = line.offsetTop - line.parentNode.offsetTop - line.parentNode.clientHeight / 3;
    if (line.dataset.s !== undefined || line.dataset.o !== undefined) choose(stepsOf(line), line.parentNode);
  });
}

// ---- the points it was chosen from

function plot(box, points, [x, y], [across, up]) {
  const width = 720, height = 380, side = 64, foot = 44;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}` }, box);
  const range = key => {
    const all = points.map(point => point[key]), low = Math.min(...all), high = Math.max(...all), room = (high - low || high || 1) * 0.06;
    return [low - room, high + room];
  };
  const [left, right] = range(x), [low, high] = range(y);
  const at = value => side + ((value - left) / (right - left)) * (width - side - 14);
  const to = value => height - foot - ((value - low) / (high - low)) * (height - foot - 14);
  make("line", { x1: side, x2: width - 10, y1: height - foot, y2: height - foot }, svg);
  make("line", { x1: side, x2: side, y1: 10, y2: height - foot }, svg);
  for (const tick of ticks(left, right, 5)) make("text", { x: at(tick), y: height - foot + 16, "text-anchor": "middle" }, svg, tick.toLocaleString("en"));
  for (const tick of ticks(low, high, 5)) make("text", { x: side - 6, y: to(tick) + 4, "text-anchor": "end" }, svg, tick.toLocaleString("en"));
  make("text", { x: (side + width) / 2, y: height - 6, "text-anchor": "middle" }, svg, across);
  make("text", { x: 12, y: height / 2, transform: `rotate(-90 14 ${height / 2})`, "text-anchor": "middle" }, svg, up);
  if (y === "measured") {
    const [a, b] = [Math.max(left, low), Math.min(right, high)];
    if (a < b) make("line", { x1: at(a), y1: to(a), x2: at(b), y2: to(b), "stroke-dasharray": "4 4" }, svg);
  }
  // less is better on both axes
  const best = y === "mhz" ? -1 : 1;
  const front = points.filter(one => !points.some(other => other[x] <= one[x] && best * other[y] <= best * one[y] && (other[x] < one[x] || best * other[y] < best * one[y])));
  front.sort((one, other) => one[x] - other[x]);
  make("path", { d: front.map((one, n) => `${n ? "L" : "M"}${at(one[x])} ${to(one[y])}`).join("") }, svg);
  for (const point of points) {
    const dot = make("circle", { cx: at(point[x]), cy: to(point[y]), r: point.built ? 7 : 5, class: point.built ? "built" : "", tabindex: 0 }, svg);
    const words = `${point.built ? "built: " : ""}${point.name}: ${point.predicted} us predicted${point.measured === null ? "" : `, ${point.measured} us measured`}`;
    make("title", {}, dot, words);
    const show = () => { byId("point").textContent = words; };
    dot.addEventListener("pointerenter", show);
    dot.addEventListener("focus", show);
    dot.addEventListener("click", show);
  }
}
if (byId("plot")) {
  const measured = data.space.filter(point => point.measured !== null);
  if (measured.length > 1) plot(byId("plot"), measured, ["predicted", "measured"], ["us predicted", "us measured"]);
  else plot(byId("plot"), data.space, ["work", "mhz"], ["cycles of tasks on an SM, predicted", "MHz that the power limit leaves, predicted"]);
}
